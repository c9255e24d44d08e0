"""Hints in errors: potluck's names for names of other libraries.

The libraries are torch.distributed, Horovod, MPI (mpi4py), Accelerate, pmetal, ml_core, axonml and
dmlf. ``docs/coming-from.md`` has the same names as a page.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_INIT = "ctx = potluck.init()"
_LAUNCHED = (
    "how many processes there are, and which one this is, is for the launcher to say: start the "
    "script with `potluck run --workers N`, torchrun or mpirun, or set RANK and WORLD_SIZE"
)
_MEET = "set MASTER_ADDR and MASTER_PORT in the environment"
_CLOSE = "ctx.close(), or use the context in a with statement"
_LOADER = (
    "the context knows rank and world size, and batch_size counts the samples of all ranks: "
    "DataLoader(dataset, batch_sampler=DistributedSampler(dataset, batch_size=32 * world_size))"
)
_NOT_NEEDED = "leave it out, it is not needed"
_ARRAYS = (
    "ctx.broadcast or ctx.all_gather of an array: Python objects are not sent, nothing is pickled"
)

COLLECTIVES = (
    *("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce"),
    *("reduce_scatter", "scatter", "send", "recv", "rank", "world_size", "local_rank"),
    *("is_master", "new_group", "neighbor_all_reduce"),
)
"""Names that scripts expect at the top of the module, and that potluck's context has."""

PROPERTIES = (
    *("rank", "world_size", "local_rank", "is_master", "epoch", "members", "elastic"),
    "module",
)
"""Those of a context, and of a DDP, that other libraries have as methods."""

OPERATIONS = {
    "bcast": "ctx.broadcast(array, root=0)",
    "broadcastparameters": "potluck.torch.DDP(model), or ctx.broadcast(tensor, root=0) for each",
    **dict.fromkeys(("broadcastobject", "broadcastobjectlist", "allgatherobject"), _ARRAYS),
    "ringallreduce": 'ctx.all_reduce(array, "mean", algorithm="ring"), which changes array',
    "allreduceasync": "ctx.all_reduce(array, async_op=True), a Work with wait()",
    "allreducesum": "potluck.all_reduce_sum(ctx, array)",
    "allreducemean": "potluck.all_reduce_mean(ctx, array)",
    "allgatherintotensor": "ctx.all_gather(array)",
    "reducescattertensor": "ctx.reduce_scatter(array)",
    "alltoallsingle": "ctx.all_to_all(array)",
    "isend": "ctx.send(array, dst, async_op=True), a Work with wait()",
    "irecv": "ctx.recv(array, src, async_op=True), a Work with wait()",
    "receive": "ctx.recv_message(src), of what ctx.send_message(payload, dst) sent; for an array "
    "alone ctx.recv(array, src)",
    "size": "ctx.world_size",
    "enableprofiling": "ctx.stats(): it always counts",
    "metricssnapshot": "ctx.stats()",
    "split": "ctx.new_group(ranks), called by all ranks",
    "ismainprocess": "ctx.is_master",
    "communicationstats": 'ctx.stats()["links"], by peer, with "bytes_sent" and "messages_sent"',
    "synchronize": "work.wait() of the Work that async_op=True gives",
    **dict.fromkeys(("shutdown", "finalize", "destroyprocessgroup"), _CLOSE),
    "newgroup": "ctx.new_group(ranks), a call of the whole context",
    "clone": "the context itself, wherever it is passed",
}
"""Other libraries' names of a context's operations and properties, as ``_folded`` returns them."""

WORK = {
    **dict.fromkeys(("synchronize", "result"), "work.wait(), which returns the result"),
    **dict.fromkeys(("iscompleted", "test", "poll"), "work.done()"),
}
"""Other libraries' names of the operations of a Work."""

TRAINER = {
    **dict.fromkeys(("train", "fit"), "trainer.train_epoch(X, y), once for each epoch"),
    **dict.fromkeys(("evaluate", "score"), "trainer.predict(X), and compare"),
    **dict.fromkeys(
        ("save", "savecheckpoint", "savemodel"), "np.savez(path, **trainer.get_parameters())"
    ),
    **dict.fromkeys(
        ("load", "loadcheckpoint", "loadmodel"), "trainer.set_parameters(dict(np.load(path)))"
    ),
    **dict.fromkeys(("loss", "globalloss"), "trainer.get_global_loss()"),
    "localloss": "trainer.get_local_loss()",
    **dict.fromkeys(("parameters", "weights"), "trainer.get_parameters()"),
    "centroids": "trainer.get_centroids(), of a DistributedKMeansTrainer",
    "synchronize": "trainer.synchronize_model()",
}
NETWORK = {
    "fit": "trainer.train(X, y, epochs)",
    "setmixedprecision": "mixed_precision=torch.bfloat16 where the trainer is made",
    "setlossscaling": "loss_scaling=potluck.torch.LossScale(scale=1024.0), where the trainer is "
    "made, with mixed_precision=torch.float16",
    "enabledynamicbatching": "dynamic_batching=potluck.torch.NoiseBatching(min_batch=32, "
    "max_batch=512), where the trainer is made",
    "setlearningrate": "learning_rate=0.01 where the trainer is made",
}
"""Other libraries' names of a trainer's methods and options, and of those of a network's trainer
alone."""

MODULE = {
    "initprocessgroup": f"{_INIT}; or torch's own, init_process_group('potluck')",
    "isinitialized": f"there is no global state: {_INIT}",
    "world": _INIT,
    "commworld": _INIT,
    "mpi": f"{_INIT}; over MPI: potluck.init('mpi')",
    "distributedconfig": "potluck.RingBackend(['host:port', ...], rank)",
    "processgroup": "ctx.new_group(ranks); for torch: init_process_group('potluck')",
    "mockbackend": "potluck.InProcessBackend.world(n), or potluck.testing.world.run_world",
    "mocktensor": "NumPy arrays; potluck.InProcessBackend.world(n) runs ranks in one process",
    "runworld": "potluck.testing.world.run_world",
    "sum": 'op="sum"',
    "average": 'op="mean"',
    "mean": 'op="mean"',
    "min": 'op="min"',
    "max": 'op="max"',
    "product": 'op="product"',
    "compressionstrategy": "potluck.TopK(ratio), potluck.RandomK(ratio), potluck.Quantize(bits=8), "
    "potluck.FP16(), potluck.BF16() or potluck.PowerSGD(rank)",
    "distributedoptimizer": "potluck.torch.DDP(model), and any optimizer as it is",
    "random": "potluck.RandomK(ratio)",
    **dict.fromkeys(
        ("quantizationtype", "int8"),
        'codec="int8" of an all_reduce, or potluck.Quantize(8) for a GradientCompressor',
    ),
    **dict.fromkeys(("allreducestrategy", "collective"), 'algorithm="ring", "tree", "centralized"'),
    "allreducesumgroup": "potluck.all_reduce_sum(group, array), group = ctx.new_group(ranks)",
    "allreducemeangroup": "potluck.all_reduce_mean(group, array), group = ctx.new_group(ranks)",
    "backend": 'potluck.init("gloo"), potluck.init("nccl"), potluck.InProcessBackend.world(n)',
    **dict.fromkeys(
        ("savecheckpoint", "loadcheckpoint", "savemodel", "loadmodel"),
        "potluck.torch.CheckpointStore(directory)",
    ),
    "metrics": "ctx.report(name, value, labels) for a figure of your own, ctx.stats() for all",
    **dict.fromkeys(("utils", "balance"), "potluck.balance_workload(costs, num_workers)"),
    "distributedadaptivetrainer": "potluck.DistributedNeuralNetTrainer(..., "
    "dynamic_batching=potluck.torch.NoiseBatching(min_batch=32, max_batch=512))",
    **dict.fromkeys(("auto", "discovery"), "potluck.AutoDiscoveryBackend()"),
    **dict.fromkeys(("ring", "connection"), "potluck.RingBackend(['host:port', ...], rank)"),
    **dict.fromkeys(
        ("compression", "compress", "decompress"), "potluck.GradientCompressor(potluck.TopK(0.01))"
    ),
    **dict.fromkeys(
        ("topology", "health", "election", "identity"),
        "`potluck status` and `potluck nodes`, which show it",
    ),
    "comm": "potluck.all_reduce_sum(ctx, array), potluck.all_reduce_mean(ctx, array)",
    "namespace": "POTLUCK_PSK, the secret that keeps clusters apart",
    "report": "ctx.report(name, value, labels)",
    **{
        name.lower(): f"potluck.torch.{name}"
        for name in (
            *("DDP", "DistributedDataParallel", "DistributedSampler", "ElasticLoop", "GradScaler"),
            *("CheckpointStore", "GradientInterceptor", "CompressionState", "DataParallel"),
            *("LocalSGD", "DiLoCo", "Gossip"),
        )
    },
}
"""Other names at the top of the modules of other libraries."""

BACKENDS = {
    "mock": "for tests in one process: potluck.InProcessBackend.world(n), or "
    "potluck.testing.world.run_world",
    "potluck": "that is torch's name for it: init_process_group('potluck'); here it is 'auto'",
    "env://": "'env'",
}
"""Other libraries' names of backends."""

INIT = {
    **dict.fromkeys(("world_size", "num_workers", "size"), _LAUNCHED),
    **dict.fromkeys(("init_method", "master_addr", "master_port"), _MEET),
    "timeout": "timeout_s=, in seconds",
    "comm": "for some of the ranks: ctx.new_group(ranks)",
}
OPTIONS = {
    **dict.fromkeys(
        ("--world-size", "--nproc-per-node", "--nproc", "--num-proc", "--np", "--num-processes"),
        "--workers",
    ),
    **dict.fromkeys(("--nnodes", "--num-machines", "--hosts"), "--nodes"),
    "--parameter-dim": "--sizes",
}
"""Other launchers' options, and what the commands have instead."""

ROOTED = {"root_rank": "root", "src": "root", "dst": "root"}
SENT = {"dest": "dst", "dest_rank": "dst"}
RECEIVED = {"source": "src", "source_rank": "src"}
BACKEND = {
    "gradient_port": "POTLUCK_GRADIENT_PORT, of RingBackend in the peers' addresses",
    "discovery_port": "POTLUCK_DISCOVERY_PORT",
    "min_peers": "the length of peers: all of them form the group",
    "peer_timeout": "POTLUCK_PEER_TIMEOUT_S, or timeout_s= of the context",
    **dict.fromkeys(
        ("connection_timeout_ms", "connection_timeout"), "POTLUCK_CONNECTION_TIMEOUT_S, in seconds"
    ),
    "max_retries": "POTLUCK_MAX_RETRIES",
    **dict.fromkeys(("psk", "namespace"), "POTLUCK_PSK, or POTLUCK_PASSPHRASE"),
}
PARTITIONER = {"total_samples": "total_size", "num_samples": "total_size"}
ROWS = {"send_data": "parts", "recv_data": "output", **ROOTED}
GATHERED = {"send_data": "array", "recv_data": "out", **ROOTED}
SAMPLES = dict.fromkeys(("local_data", "data"), "X") | dict.fromkeys(
    ("local_labels", "labels"), "y"
)
NETWORK_SAME = {
    "lr": "learning_rate",
    "input_size": "input_dim",
    **dict.fromkeys(("hidden_sizes", "hidden_layers"), "hidden_dims"),
    "output_size": "output_dim",
    **dict.fromkeys(("method", "aggregation_method"), "aggregation"),
}
KMEANS = {
    **dict.fromkeys(("k", "num_clusters"), "n_clusters"),
    **dict.fromkeys(("max_iter", "max_iters"), "max_iterations"),
}
WORKLOAD = dict.fromkeys(("world_size", "n_workers"), "num_workers") | {"costs": "task_costs"}
SERVER_SAME = dict.fromkeys(("method", "aggregation", "aggregation_method"), "mode")
FEDERATION_SAME = {"strategy": "aggregation"}
ROUNDS = dict.fromkeys(("sync_every", "period", "num_steps"), "every")
SCALE = {"init_scale": "scale", "growth_factor": "growth", "backoff_factor": "backoff"}
"""Other libraries' names of arguments: what ``arguments`` takes as ``same``."""

NETWORK_FIRST = (
    "the context comes first: DistributedNeuralNetTrainer(ctx, "
    "potluck.TrainingStrategy.DATA_PARALLEL, input_dim, hidden_dims, output_dim, learning_rate)"
)
NETWORK_OPTIONS = {
    **dict.fromkeys(
        ("compression", "compressor"),
        "potluck.torch.DDP(model, compression=...) in a potluck.torch.ElasticLoop",
    ),
    **dict.fromkeys(
        ("checkpoint", "checkpoint_dir", "optimizer", "accumulation"),
        "potluck.torch.ElasticLoop, the loop that the trainer is made of",
    ),
    "epochs": "trainer.train(X, y, epochs)",
}
NOISE = {
    "variance_threshold": "threshold=: the batch size stays if the gradient noise scale differs "
    "from it by less than this fraction"
}
CONTEXT = dict.fromkeys(("world_size", "rank"), f"{_INIT}; {_LAUNCHED}")
SAMPLER = {
    **dict.fromkeys(("num_replicas", "rank", "world_size"), _LOADER),
    "drop_last": "no sample is dropped: the last batch of an epoch may be smaller",
}
DDP = {
    **dict.fromkeys(("device_ids", "output_device"), "move the module to its device before"),
    **dict.fromkeys(
        ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"), _NOT_NEEDED
    ),
    "bucket_cap_mb": "bucket_size_mb=",
    "process_group": f"ctx=, a context: {_INIT}",
    "world": f"ctx=, a context: {_INIT}",
}
FEDAVG = {
    **dict.fromkeys(("fraction_train", "fraction_fit"), "fraction="),
    **dict.fromkeys(
        ("min_train_nodes", "min_fit_clients"), "federation.run(patience=Patience(min_updates=...))"
    ),
    **dict.fromkeys(
        ("min_available_nodes", "min_available_clients"),
        "federation.run(patience=Patience(min_clients=...))",
    ),
    **dict.fromkeys(
        ("fraction_evaluate", "evaluate_fn", "min_evaluate_clients", "min_evaluate_nodes"),
        "federation.run(evaluate=f), or metrics that a client measures before its first epoch",
    ),
    **dict.fromkeys(
        ("on_fit_config_fn", "weighted_by_key"), "config=, and Update(num_samples=...)"
    ),
    "initial_parameters": "federation.run(parameters, ...)",
}
PARAMETER_SERVER = {
    "backup_workers": "mode=Synchronous(backup_workers=...)",
    **dict.fromkeys(
        ("max_staleness", "scale_by_staleness"), "mode=Asynchronous(max_staleness=..., ...)"
    ),
    "alpha": "mode=ElasticAveraging(alpha=...)",
    **dict.fromkeys(("learning_rate", "lr"), "optimizer=SGD(0.1)"),
    "server": "servers=[0]",
    "world_size": f"ParameterServer(ctx), on every worker, with {_INIT}",
}
PERCEPTRON = {
    **dict.fromkeys(
        ("early_stopping", "validation_fraction"),
        "training ends by tol= and n_iter_no_change=, of the loss of all samples",
    ),
    "warm_start": "each fit begins anew",
    "max_fun": "the solvers are adam and sgd",
    "verbose": "loss_curve_ has the loss of each epoch",
}
"""``INIT``, ``BACKEND``, ``CONTEXT``, ``SAMPLER``, ``NETWORK_OPTIONS``, ``DDP``, ``FEDAVG``,
``PARAMETER_SERVER`` and ``PERCEPTRON`` have hints for arguments of these callables."""


def of_object(thing: object, name: str, words: Mapping[str, str] | None = None) -> str:
    """The text of an AttributeError for ``name``, which a context does not have; or, with its own
    ``words``, another object."""
    kind = type(thing)
    said = f"{kind.__name__!r} object has no attribute {name!r}"
    hint = _of_context(name, dir(kind)) if words is None else words.get(_folded(name))
    return said if hint is None else f"{said}; write {hint}"


def of_enum(kind: str, name: str, members: Iterable[str]) -> str:
    """The text of an AttributeError for a member that an enumeration does not have."""
    meant = {"PROD": "PRODUCT"}.get(name)
    said = f"{kind} has no member {name!r}; choose from {', '.join(members)}"
    return said if meant is None else f"{said} (write {kind}.{meant})"


def of_end(error: BaseException | None) -> str:
    """A line about ``error``, which ended the script: for a property that was called as a method;
    else empty. Python's own error has no place for it."""
    if not isinstance(error, TypeError):
        return ""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    if "object is not callable" in str(error):
        lines = lines[-1:]
    elif "forward() missing" not in str(error):  # of the module that a DDP holds
        return ""
    called = re.search(rf"\.({'|'.join(PROPERTIES)})\(\)", "\n".join(lines))
    return f"{called[1]} is a property: write it without parentheses" if called else ""


def of_module(module: str, name: str) -> Exception:
    """The error for ``module.name``, where ``module`` is potluck or a package in it.

    It is an AttributeError, and an ImportError under ``from module import name``: that statement
    would give an AttributeError's text away.
    """
    hint = MODULE.get(_folded(name))
    if hint is None and (hint := _of_context(name, COLLECTIVES)) is not None:
        hint = f"{hint}, with {_INIT}"
    told = "" if hint is None else f"; write {hint}"
    # The import system asks before it looks for a submodule of that name.
    asks = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    if asks and find_spec(f"{module}.{name}") is None:
        return ImportError(f"cannot import name {name!r} from {module!r}{told}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}{told}", name=name)


class Absent:
    """What a class does not have, and other libraries' have: its use is an AttributeError that
    says what to write instead."""

    def __init__(self, hint: str) -> None:
        self._hint = hint

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        said = f"{owner.__name__} has no attribute {self._name!r}; write {self._hint}"
        raise AttributeError(said, name=self._name, obj=owner)


def _of_context(name: str, known: Iterable[str]) -> str | None:
    same = {_folded(each): each for each in known if not each.startswith("_")}.get(_folded(name))
    return OPERATIONS.get(_folded(name)) if same is None else f"ctx.{same}"


def of_option(error: Exception) -> None:
    """Let the error for an option that a command does not have suggest the one that is meant."""
    known = OPTIONS.get(getattr(error, "option_name", "").replace("_", "-"))
    if known is not None and hasattr(error, "possibilities"):
        error.possibilities = [known]


def operation(given: object, names: list[str]) -> str:
    """The text of a ValueError for an unknown reduction, a word or an object of another library."""
    said = f"op {given!r} is unknown; choose from {', '.join(names)}"
    word = str(getattr(given, "name", given)).lower().removeprefix("mpi_")
    meant = {"prod": "product", "avg": "mean", "average": "mean"}.get(word, word)
    return f'{said} (write "{meant}")' if meant in names else said


def backend(given: object, known: Sequence[str]) -> str:
    """The text of a ConfigurationError for an unknown backend."""
    said = f"backend {given!r} is unknown; choose from {', '.join(known)}"
    if not isinstance(given, str):
        return f"{said}; pass an object to potluck.DistributedContext(backend)"
    word = given.lower()
    hint = f"write {word!r}" if word in known else BACKENDS.get(word)
    return said if hint is None else f"{said} ({hint})"


def arguments(
    hints: Mapping[str, str], otherwise: str = "", *, same: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that adds a hint to the TypeError of a call with wrong arguments.

    ``hints`` are by the name of the argument; ``otherwise`` is the hint for all other mistakes.
    ``same`` has other libraries' names of arguments that mean the same, which are taken. The error
    names the class of the object, not the base class that has the method. Cost: one more Python
    call, of which tracebacks show nothing. Errors raised by the function itself are unchanged.
    """
    known = same or {}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                try:
                    return function(*args, **kwargs)
                except TypeError:
                    misfit = _misfit(function, args, kwargs)
                    if misfit is None:
                        raise
                ours: Any = {known.get(name, name): value for name, value in kwargs.items()}
                is_other = ours.keys() != kwargs.keys() and len(ours) == len(kwargs)
                if is_other and _misfit(function, args, ours) is None:
                    return function(*args, **ours)
                said, hint = f": {misfit}", otherwise
                for name in kwargs.keys() & hints.keys():
                    said, hint = f" has no argument {name!r}", hints[name]
                raise TypeError(f"{_name_of(function, args)}{said}" + (f"; {hint}" if hint else ""))
            except BaseException as error:
                # The traceback goes on from the caller's line to the function's.
                mine = error.__traceback__
                error.__traceback__ = mine and mine.tb_next
                raise

        return call

    return decorate


def of_init(
    hints: Mapping[str, str], otherwise: str = "", *, same: Mapping[str, str] | None = None
) -> Callable[[type[T]], type[T]]:
    """``arguments`` for the ``__init__`` that a dataclass makes."""

    def decorate(kind: type[T]) -> type[T]:
        new = arguments(hints, otherwise, same=same)(kind.__init__)
        kind.__init__ = new  # type: ignore[method-assign]
        return kind

    return decorate


def _name_of(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    owner, _, name = function.__qualname__.rpartition(".")
    if args and any(base.__qualname__ == owner for base in type(args[0]).__mro__):
        owner = type(args[0]).__name__
    return f"{owner}.{name}".strip(".").removesuffix(".__init__")


def _misfit(function: Callable[..., Any], args: Any, kwargs: Any) -> TypeError | None:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None


def _folded(name: str) -> str:
    """``name`` without case, underscores and "get": ``Get_rank`` equals ``rank``, and ``Allreduce``
    ``all_reduce``."""
    return name.lower().replace("_", "").removeprefix("get")
