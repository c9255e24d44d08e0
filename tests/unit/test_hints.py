"""What people type who come from another library, and what the error tells them to write."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import potluck
from potluck._core import hints
from potluck._core.context import DistributedContext
from potluck.errors import ConfigurationError
from potluck.federated import FedAvg, Median
from potluck.testing.world import run_world

X = np.ones(3)


def context() -> Any:
    return DistributedContext(potluck.LocalBackend())


ON_A_CONTEXT = {
    "allreduce": "ctx.all_reduce",
    "Allreduce": "ctx.all_reduce",
    "all_reduce_": "ctx.all_reduce",
    "ring_all_reduce": 'ctx.all_reduce(array, "mean", algorithm="ring"), which changes array',
    "Bcast": "ctx.broadcast(array, root=0)",
    "Alltoall": "ctx.all_to_all",
    "reducescatter": "ctx.reduce_scatter",
    "Get_rank": "ctx.rank",
    "get_world_size": "ctx.world_size",
    "size": "ctx.world_size",
    "receive": "ctx.recv_message(src), of what ctx.send_message(payload, dst) sent; for an array "
    "alone ctx.recv(array, src)",
    "Split": "ctx.new_group(ranks), called by all ranks",
    "isend": "ctx.send(array, dst, async_op=True), a Work with wait()",
    "get_communication_stats": 'ctx.stats()["links"], by peer, with "bytes_sent" and '
    '"messages_sent"',
    "enable_profiling": "ctx.stats(): it always counts",
    "metrics_snapshot": "ctx.stats()",
    "broadcast_object_list": "ctx.broadcast or ctx.all_gather of an array: Python objects are not "
    "sent, nothing is pickled",
    "destroy_process_group": "ctx.close(), or use the context in a with statement",
    "clone": "the context itself, wherever it is passed",
}


def test_another_librarys_name_on_a_context() -> None:
    with context() as ctx:
        for name, instead in ON_A_CONTEXT.items():
            with pytest.raises(AttributeError) as caught:
                getattr(ctx, name)
            assert str(caught.value) == (
                f"'DistributedContext' object has no attribute {name!r}; write {instead}"
            )


def test_an_attribute_that_nobody_has_and_one_that_is_broken_stay_plain_errors() -> None:
    class Broken(DistributedContext):
        @property
        def rank(self) -> int:
            return self.nothing  # type: ignore[attr-defined,no-any-return]

    with context() as ctx:
        with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
            _ = ctx.nonsense
        assert not hasattr(ctx, "allreduce")
    with (
        Broken(potluck.LocalBackend()) as ctx,
        pytest.raises(AttributeError, match=r"no attribute 'nothing'$"),
    ):
        _ = ctx.rank


ON_THE_MODULE = {
    "rank": "ctx.rank, with ctx = potluck.init()",
    "get_rank": "ctx.rank, with ctx = potluck.init()",
    "size": "ctx.world_size, with ctx = potluck.init()",
    "allreduce": "ctx.all_reduce, with ctx = potluck.init()",
    "barrier": "ctx.barrier, with ctx = potluck.init()",
    "Average": 'op="mean"',
    "init_process_group": "ctx = potluck.init(); or torch's own, init_process_group('potluck')",
    "World": "ctx = potluck.init()",
    "DDP": "potluck.torch.DDP",
    "DistributedSampler": "potluck.torch.DistributedSampler",
    "DiLoCo": "potluck.torch.DiLoCo",
    "neighbor_allreduce": "ctx.neighbor_all_reduce, with ctx = potluck.init()",
    "CompressionStrategy": (
        "potluck.TopK(ratio), potluck.RandomK(ratio), potluck.Quantize(bits=8), potluck.FP16(), "
        "potluck.BF16() or potluck.PowerSGD(rank)"
    ),
    "MockBackend": "potluck.InProcessBackend.world(n), or potluck.testing.world.run_world",
    "Random": "potluck.RandomK(ratio)",
    "INT8": 'codec="int8" of an all_reduce, or potluck.Quantize(8) for a GradientCompressor',
    "QuantizationType": (
        'codec="int8" of an all_reduce, or potluck.Quantize(8) for a GradientCompressor'
    ),
    "AllReduceStrategy": 'algorithm="ring", "tree", "centralized"',
    "all_reduce_sum_group": "potluck.all_reduce_sum(group, array), group = ctx.new_group(ranks)",
    "Backend": 'potluck.init("gloo"), potluck.init("nccl"), potluck.InProcessBackend.world(n)',
    "save_checkpoint": "potluck.torch.CheckpointStore(directory)",
    "load_model": "potluck.torch.CheckpointStore(directory)",
    "utils": "potluck.balance_workload(costs, num_workers)",
    "DistributedAdaptiveTrainer": "potluck.DistributedNeuralNetTrainer(..., "
    "dynamic_batching=potluck.torch.NoiseBatching(min_batch=32, max_batch=512))",
    "all_reduce_mean_group": "potluck.all_reduce_mean(group, array), group = ctx.new_group(ranks)",
    "topology": "`potluck status` and `potluck nodes`, which show it",
    "comm": "potluck.all_reduce_sum(ctx, array), potluck.all_reduce_mean(ctx, array)",
}


def test_another_librarys_name_on_the_module() -> None:
    for name in ON_THE_MODULE:
        check_name_on_the_module(name)


def check_name_on_the_module(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(potluck, name)
    assert str(caught.value) == (
        f"module 'potluck' has no attribute {name!r}; write {ON_THE_MODULE[name]}"
    )
    with pytest.raises(ImportError) as refused:
        exec(f"from potluck import {name}")
    assert str(refused.value) == (
        f"cannot import name {name!r} from 'potluck'; write {ON_THE_MODULE[name]}"
    )


def test_an_import_of_what_is_there_and_of_what_nobody_has() -> None:
    exec("from potluck import ReduceOp, data, graphs")
    with pytest.raises(ImportError, match=r"cannot import name 'nonsense' from 'potluck'$"):
        exec("from potluck import nonsense")
    assert not hasattr(potluck, "World")
    assert getattr(potluck, "World", None) is None


def test_a_sub_group_says_what_only_the_context_does() -> None:
    with context() as ctx:
        group = ctx.new_group([0])
        with pytest.raises(AttributeError, match=re.escape("write ctx.new_group(ranks)")):
            group.new_group([0])


def test_what_hints_name_exists() -> None:
    pytest.importorskip("torch")
    tables = (hints.OPERATIONS, hints.MODULE, hints.BACKENDS, hints.WORK, hints.TRAINER)
    told = "; ".join(hint for table in tables for hint in table.values())
    with context() as ctx:
        for name in {*hints.COLLECTIVES, *re.findall(r"\bctx\.(\w+)", told)}:
            assert hasattr(ctx, name), name
    for path in re.findall(r"\bpotluck((?:\.\w+)+)", told):
        thing: Any = potluck
        for name in path[1:].split("."):
            if not hasattr(thing, name):
                importlib.import_module(f"{thing.__name__}.{name}")
            thing = getattr(thing, name)


@pytest.mark.beside_torch
def test_asking_for_a_name_that_is_not_there_imports_nothing_heavy() -> None:
    code = (
        "import sys, potluck; assert not hasattr(potluck, 'allreduce');"
        "heavy = {'numpy', 'torch', 'potluck._core.context'};"
        "print(*sorted(heavy & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def alone(call: Callable[[Any], Any]) -> Callable[[], Any]:
    def run() -> None:
        with context() as ctx:
            call(ctx)

    return run


def started(ctx: Any) -> Any:
    return ctx.all_reduce(X.copy(), async_op=True)


# Called as a user without a type checker would.
context_class: Any = DistributedContext
init: Any = potluck.init
ring: Any = potluck.RingBackend
discovery: Any = potluck.AutoDiscoveryBackend
all_reduce_sum: Any = potluck.all_reduce_sum
all_reduce_mean: Any = potluck.all_reduce_mean


@pytest.mark.parametrize(
    ("mistake", "error", "words"),
    [
        (lambda: init(world_size=2, rank=0), TypeError, "start the script with `potluck run"),
        (lambda: init(timeout=3), TypeError, "init has no argument 'timeout'; timeout_s=, in sec"),
        (lambda: init(init_method="env://"), TypeError, "set MASTER_ADDR and MASTER_PORT in the"),
        (lambda: init("mock"), ConfigurationError, "potluck.InProcessBackend.world(n), or potluck"),
        (lambda: init("potluck"), ConfigurationError, "here it is 'auto'"),
        (lambda: context_class(world_size=4, rank=0), TypeError, "ctx = potluck.init(); how many"),
        (lambda: context_class(4, 0), TypeError, "ctx = potluck.init(); how many processes"),
        (lambda: context_class(4), TypeError, "such as RingBackend(peers, rank), not 4; potluck.i"),
        (lambda: context_class("gloo"), TypeError, "not 'gloo'; potluck.init() makes backend and"),
        (lambda: context_class(potluck.LocalBackend), TypeError, "takes a backend, such as"),
        (lambda: init("MPI"), ConfigurationError, "(write 'mpi')"),
        (lambda: init(potluck.RingBackend), ConfigurationError, "DistributedContext(backend)"),
        (lambda: init("ring", ["a:1"], 0), TypeError, "give options by name: potluck.init('ring'"),
        (lambda: ring("127.0.0.1:1", 0), ConfigurationError, "peers is the list of all ranks' a"),
        (lambda: ring(["a:1"], 0, max_retries=3), TypeError, "'max_retries'; POTLUCK_MAX_RETRIES"),
        (lambda: ring(["a:1"], 0, min_peers=1), TypeError, "the length of peers: all of them"),
        (lambda: discovery(gradient_port=1), TypeError, "'gradient_port'; POTLUCK_GRADIENT_PORT"),
        (lambda: discovery(discovery_port=1), TypeError, "POTLUCK_DISCOVERY_PORT"),
        (lambda: discovery(peer_timeout=30), TypeError, "POTLUCK_PEER_TIMEOUT_S, or timeout_s= o"),
        (lambda: discovery(connection_timeout_ms=5000), TypeError, "TIMEOUT_S, in seconds"),
        (lambda: discovery(psk="words"), TypeError, "POTLUCK_PSK, or POTLUCK_PASSPHRASE"),
        (
            lambda: ring([("127.0.0.1", 1)], 0),
            ConfigurationError,
            "not an address; write host:port",
        ),
        (alone(lambda ctx: ctx.reduce(X, "sum")), TypeError, "integer from 0 to 0, not 'sum'"),
        (alone(lambda ctx: ctx.gather(X, [X])), TypeError, "root is a rank, an integer from 0 to"),
        (alone(lambda ctx: ctx.broadcast(X, 0.5)), TypeError, "root is a rank, an integer from 0"),
        (alone(lambda ctx: ctx.scatter(X, None, "x")), TypeError, "root is a rank, an integer"),
        (alone(lambda ctx: ctx.send(X, None)), TypeError, "dst is a rank, an integer from 0 to 0"),
        (alone(lambda ctx: ctx.recv(X, "x")), TypeError, "src is a rank, an integer from 0 to 0,"),
        (
            alone(lambda ctx: ctx.all_reduce(X, timeout="3")),
            TypeError,
            "a number of seconds, not '3",
        ),
        (alone(lambda ctx: started(ctx).is_completed()), AttributeError, "write work.done()"),
        (alone(lambda ctx: started(ctx).synchronize()), AttributeError, "write work.wait(), which"),
        (lambda: all_reduce_sum(X), TypeError, "potluck.all_reduce_sum(ctx, array)"),
        (
            alone(lambda ctx: all_reduce_mean(X, ctx)),
            TypeError,
            "potluck.all_reduce_mean(ctx, array); the first argument is a ndarray",
        ),
        (alone(lambda ctx: ctx.all_reduce(X, "prod")), ValueError, '(write "product")'),
        (alone(lambda ctx: ctx.all_reduce(X, "SUM")), ValueError, '(write "sum")'),
        (
            alone(lambda ctx: ctx.reduce(X, op=SimpleNamespace(name="MPI_MAX"))),
            ValueError,
            '(write "max")',
        ),
        (alone(lambda ctx: ctx.all_reduce(X, "median")), ValueError, "choose from sum, mean, min"),
        (alone(lambda ctx: ctx.all_reduce(X, None)), ValueError, "op None is unknown; choose from"),
    ],
)
def test_an_argument_of_another_library_brings_the_right_one(
    mistake: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        mistake()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: FedAvg(fraction_train=0.5), "'fraction_train'; fraction="),  # type: ignore[call-arg]
        (lambda: Median(min_available_nodes=2), "patience=Patience(min_clients=...)"),
        (
            lambda: potluck.ParameterServer(None, backup_workers=1),  # type: ignore[call-arg,arg-type]
            "'backup_workers'; mode=Synchronous(backup_workers=...)",
        ),
    ],
)
def test_arguments_of_flower_and_of_modes(mistake: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        mistake()


def test_a_traceback_goes_from_the_callers_line_to_the_functions() -> None:
    """Nothing between them, also where names of other libraries are taken."""

    @hints.arguments({}, same={"value": "right"})
    def function(right: int) -> float:
        return 1 / right

    call: Any = function
    for mistake, frames in (
        (lambda: call(0), ["<lambda>", "function"]),
        (lambda: call("1"), ["<lambda>", "function"]),
        (lambda: call(value=0), ["<lambda>", "function"]),
        (lambda: call(other=0), ["<lambda>"]),
        (lambda: potluck.init("nonsense"), ["<lambda>", "init"]),
        (lambda: potluck.init(world_size=2), ["<lambda>"]),  # type: ignore[call-arg]
    ):
        with pytest.raises((TypeError, ArithmeticError, ConfigurationError)) as caught:
            mistake()
        names = [each.name for each in traceback.extract_tb(caught.value.__traceback__)]
        assert names[1 : 1 + len(frames)] == frames
        assert "call" not in names


def test_what_a_function_raises_itself_is_left_as_it_is() -> None:
    @hints.arguments({"wrong": "right="}, "otherwise")
    def function(right: int) -> int:
        return right + "1"  # type: ignore[operator,no-any-return]

    with pytest.raises(TypeError, match="unsupported operand"):
        function(1)
    with pytest.raises(TypeError, match=r"function has no argument 'wrong'; right=$"):
        function(wrong=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"function: missing .*; otherwise$"):
        function()  # type: ignore[call-arg]


def test_average_and_avg_are_the_mean_and_meet_a_mean() -> None:
    assert potluck.ReduceOp.AVERAGE is potluck.ReduceOp.AVG is potluck.ReduceOp.MEAN
    assert [op.value for op in potluck.ReduceOp][:2] == ["sum", "mean"]

    def work(ctx: DistributedContext) -> list[float]:
        word = ("average", "avg", "mean", potluck.ReduceOp.AVERAGE)[ctx.rank]
        value = np.array([float(ctx.rank)])
        scattered = ctx.reduce_scatter(np.full((4, 1), float(ctx.rank)), word)
        return [ctx.all_reduce(value, word)[0], scattered[0], ctx.reduce(value, 0, word)[0]]

    assert run_world(4, work) == [[1.5, 1.5, 1.5]] * 4


@pytest.mark.parametrize("given", [3, 2.5, [1, 2.5], (4, 5), [[1.0], [2.0]], np.float32(7)])
def test_sums_and_means_of_numbers_and_lists_are_arrays(given: Any) -> None:
    def work(ctx: DistributedContext) -> tuple[Any, Any]:
        scaled = np.asarray(given) * (ctx.rank + 1)
        mine = type(given)(scaled) if np.isscalar(given) else scaled.tolist()
        return potluck.all_reduce_sum(ctx, mine), potluck.all_reduce_mean(ctx, mine)

    for total, mean in run_world(2, work):
        assert isinstance(total, np.ndarray)
        assert isinstance(mean, np.ndarray)
        np.testing.assert_array_equal(total, np.asarray(given) * 3)
        np.testing.assert_array_equal(mean, np.asarray(given) * 1.5)
        assert mean.dtype.kind == "f"


def test_other_operations_say_how_a_number_or_list_becomes_an_array() -> None:
    def work(ctx: DistributedContext) -> None:
        calls: list[Callable[[Any], Any]] = [
            *(ctx.all_reduce, ctx.all_gather, ctx.broadcast, ctx.reduce, ctx.gather, ctx.scatter),
            *(ctx.reduce_scatter, ctx.all_to_all, ctx.recv, lambda array: ctx.send(array, 0)),
        ]
        for given in (3.0, [1.0, 2.0]):
            for call in calls:
                words = f"got {type(given).__name__}; wrap it with numpy.asarray"
                with pytest.raises(TypeError, match=words):
                    call(given)

    run_world(2, work)


@pytest.mark.parametrize(
    "module",
    [
        *("potluck", "potluck.compressors", "potluck.data", "potluck.estimators"),
        *("potluck.federated", "potluck.parameter_server", "potluck.services", "potluck.torch"),
        *("potluck.training", "potluck.checkpoint", "potluck.testing"),
    ],
)
def test_an_unknown_argument_of_a_class_is_told_by_its_public_name(module: str) -> None:
    """Seen: MLPRegressor(early_stopping=True) spoke of _Perceptron.__init__()."""
    for package in ("torch", "sklearn"):  # trainers need both
        pytest.importorskip(package)
    public = importlib.import_module(module)
    for name in public.__all__:
        kind = getattr(public, name)
        is_checked = isinstance(kind, type) and not issubclass(kind, BaseException | Enum)
        if not is_checked or getattr(kind, "_is_protocol", False) or "__init__" not in dir(kind):
            continue
        with pytest.raises(TypeError) as caught:
            kind(nonsense=True)
        assert not re.search(r"\b_[A-Za-z]", str(caught.value)), (name, str(caught.value))


def test_what_a_perceptron_does_not_take_says_what_it_has() -> None:
    pytest.importorskip("sklearn")
    estimators = importlib.import_module("potluck.estimators")
    for kind in (estimators.MLPClassifier, estimators.MLPRegressor):
        with pytest.raises(TypeError) as caught:
            kind(early_stopping=True)
        assert str(caught.value).startswith(f"{kind.__name__} has no argument 'early_stopping'; ")
        assert "n_iter_no_change=" in str(caught.value)
        with pytest.raises(TypeError, match=rf"^{kind.__name__}\.fit: missing a required argument"):
            kind().fit(X)
    with pytest.raises(TypeError, match=r"^Median: got an unexpected keyword argument 'nonsense'"):
        Median(nonsense=1)  # type: ignore[call-arg]
