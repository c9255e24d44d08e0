"""Hints in errors: potluck's names for names of other libraries.

The libraries are torch.distributed, Horovod, MPI (mpi4py), Accelerate, pmetal, ml_core, axonml and
dmlf. ``docs/coming-from.md`` has the same names as a page.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

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

OPERATIONS = {
    "bcast": "ctx.broadcast(array, root=0)",
    "broadcastparameters": "potluck.torch.DDP(model), or ctx.broadcast(tensor, root=0) for each",
    **dict.fromkeys(("broadcastobject", "broadcastobjectlist", "allgatherobject"), _ARRAYS),
    "ringallreduce": 'ctx.all_reduce(array, "mean", algorithm="ring")',
    "allreduceasync": "ctx.all_reduce(array, async_op=True), a Work with wait()",
    "allreducesum": "potluck.all_reduce_sum(ctx, array)",
    "allreducemean": "potluck.all_reduce_mean(ctx, array)",
    "allgatherintotensor": "ctx.all_gather(array)",
    "reducescattertensor": "ctx.reduce_scatter(array)",
    "alltoallsingle": "ctx.all_to_all(array)",
    "isend": "ctx.send(array, dst, async_op=True), a Work with wait()",
    "irecv": "ctx.recv(array, src, async_op=True), a Work with wait()",
    "receive": "ctx.recv(array, src)",
    "size": "ctx.world_size",
    "split": "ctx.new_group(ranks), called by all ranks",
    "ismainprocess": "ctx.is_master",
    "communicationstats": "ctx.stats()",
    "synchronize": "work.wait() of the Work that async_op=True gives",
    "shutdown": _CLOSE,
    "finalize": _CLOSE,
    "destroyprocessgroup": _CLOSE,
}
"""Other libraries' names of a context's operations and properties, as ``_folded`` returns them."""

WORK = {
    **dict.fromkeys(("synchronize", "result"), "work.wait(), which returns the result"),
    **dict.fromkeys(("iscompleted", "test", "poll"), "work.done()"),
}
"""Other libraries' names of the operations of a Work."""

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
    "compressionstrategy": "potluck.TopK(ratio), potluck.Random(ratio), potluck.Int(bits=8), "
    "potluck.FP16(), potluck.BF16() or potluck.PowerSGD(rank)",
    "distributedoptimizer": "potluck.torch.DDP(model), and any optimizer as it is",
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
        ("max_staleness", "lr_by_staleness"), "mode=Asynchronous(max_staleness=..., ...)"
    ),
    "alpha": "mode=ElasticAveraging(alpha=...)",
    **dict.fromkeys(("learning_rate", "lr"), "optimizer=SGD(0.1)"),
    "server": "servers=[0]",
}
"""``INIT``, ``CONTEXT``, ``SAMPLER``, ``DDP``, ``FEDAVG`` and ``PARAMETER_SERVER`` have hints for
arguments of these callables."""


def of_object(thing: object, name: str) -> str:
    """The text of an AttributeError for ``name``, which a context or a Work does not have."""
    kind = type(thing)
    said = f"{kind.__name__!r} object has no attribute {name!r}"
    is_work = kind.__name__ == "Work"
    hint = WORK.get(_folded(name)) if is_work else _of_context(name, dir(kind))
    return said if hint is None else f"{said}; write {hint}"


def of_module(name: str) -> str:
    """The text of an AttributeError for ``potluck.name``."""
    said = f"module 'potluck' has no attribute {name!r}"
    hint = MODULE.get(_folded(name))
    if hint is not None:
        return f"{said}; write {hint}"
    hint = _of_context(name, COLLECTIVES)
    return said if hint is None else f"{said}; write {hint}, with {_INIT}"


def _of_context(name: str, known: Iterable[str]) -> str | None:
    same = {_folded(each): each for each in known if not each.startswith("_")}.get(_folded(name))
    return OPERATIONS.get(_folded(name)) if same is None else f"ctx.{same}"


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
    hints: Mapping[str, str], otherwise: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that adds a hint to the TypeError of a call with wrong arguments.

    ``hints`` are by the name of the argument; ``otherwise`` is the hint for all other mistakes.
    Cost: one more Python frame. Errors raised by the function itself are unchanged.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                misfit = _misfit(function, args, kwargs)
                if misfit is None:
                    raise
            said, hint = f": {misfit}", otherwise
            for name in kwargs.keys() & hints.keys():
                said, hint = f" has no argument {name!r}", hints[name]
            owner = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{owner}{said}" + (f"; {hint}" if hint else ""))

        return call

    return decorate


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
