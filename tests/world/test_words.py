"""Words of the seeds' users: each works where it can mean one thing, else its error has ours."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import potluck
from potluck._core import hints
from potluck._core.context import DistributedContext
from potluck.errors import UnknownService
from potluck.parameter_server import SGD, Asynchronous, ParameterServer, Synchronous
from potluck.testing.world import run_world

SIZES = [1, 2, 4]

# Called as a user without a type checker would.
partitioner: Any = potluck.DataPartitioner
compressor: Any = potluck.GradientCompressor
op: Any = potluck.ReduceOp


@pytest.mark.parametrize("size", SIZES)
def test_operations_take_the_names_of_arguments_that_mean_the_same(size: int) -> None:
    def work(given: DistributedContext) -> None:
        ctx: Any = given
        last, rank = size - 1, ctx.rank
        mine = np.full(3, float(rank))
        assert (ctx.broadcast(mine.copy(), root_rank=last) == last).all()
        assert (ctx.broadcast(mine.copy(), src=last) == last).all()
        total = ctx.reduce(mine.copy(), root_rank=last)
        assert rank != last or (total == sum(range(size))).all()
        rows = np.arange(3.0 * size).reshape(size, 3) if rank == last else None
        part = ctx.scatter(np.empty(3), rows, root_rank=last)
        np.testing.assert_array_equal(part, 3 * rank + np.arange(3.0))
        found = ctx.gather(part, dst=last)
        assert rank != last or (found.ravel() == np.arange(3.0 * size)).all()
        pieces = ctx.gather_uneven(np.full(rank + 1, 1.0), root_rank=0)
        assert rank != 0 or [len(each) for each in pieces] == list(range(1, size + 1))
        if size > 1 and rank == 0:
            ctx.send(mine, dest=1)
        if size > 1 and rank == 1:
            assert (ctx.recv(mine, source_rank=0) == 0).all()

    run_world(size, work)


def test_two_names_of_one_argument_are_an_error() -> None:
    def work(given: Any) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'root_rank'"):
            given.broadcast(np.ones(1), root=0, root_rank=0)
        with pytest.raises(TypeError, match="multiple values"):
            given.broadcast(np.ones(1), 0, root=0)

    run_world(1, work)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("word", ["Ring", "Tree", "CENTRALIZED", "ring"])
def test_an_algorithm_in_any_case(size: int, word: str) -> None:
    def work(ctx: DistributedContext) -> None:
        total = ctx.all_reduce(np.full(1000, ctx.rank + 1.0), algorithm=word)
        assert (total == size * (size + 1) / 2).all()
        exact = ctx.all_reduce(np.full(256, 127.0, np.float32), codec="INT8")
        assert (exact == 127 * size).all()
        with pytest.raises(ValueError, match="there is no algorithm 'Star'; the algorithms are"):
            ctx.all_reduce(np.ones(2), algorithm="Star")
        with pytest.raises(ValueError, match="there is no codec 'Int7'"):
            ctx.all_reduce(np.ones(2, np.float32), codec="Int7")
        with pytest.raises(ValueError, match="there is no codec FP16"):
            ctx.all_reduce(np.ones(2, np.float32), codec=potluck.FP16())  # type: ignore[arg-type]

    run_world(size, work)


@pytest.mark.parametrize("name", ["Sum", "Mean", "Average", "Max", "Min", "Product", "sum"])
def test_a_reduction_in_any_case(name: str) -> None:
    assert getattr(op, name) is op[name.upper()]


def test_a_reduction_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match=r"no member 'PROD'; choose.* \(write ReduceOp.PROD"):
        _ = op.PROD
    with pytest.raises(AttributeError, match="ReduceOp has no member 'MEDIAN'; choose from SUM"):
        _ = op.Median
    assert not hasattr(op, "_nothing")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("total", [10_000, 3, 0])
def test_the_samples_of_a_partitioner_by_their_other_name(size: int, total: int) -> None:
    typed = partitioner(total_samples=total, world_size=size)
    cuts = np.array_split(np.arange(total), size)
    assert [typed.get_indices(r).tolist() for r in range(size)] == [c.tolist() for c in cuts]


def test_error_feedback_is_the_second_argument_of_a_compressor() -> None:
    gradient = np.array([4.0, 1.0, 1.0, 1.0], np.float32)
    for feedback in (True, False):
        each = compressor(potluck.TopK(0.25), feedback)
        each.compress(gradient)
        residual = each.residual()
        assert (residual is not None) == feedback
    for wrong in ("yes", 1, None):
        with pytest.raises(TypeError, match=r"error_feedback is .*; it must be True or False"):
            compressor(potluck.TopK(0.1), wrong)


@pytest.mark.parametrize("size", SIZES)
def test_a_parameter_server_as_ml_core_types_it(size: int) -> None:
    """The loop of its second example, with updates by the script."""

    def work(ctx: DistributedContext) -> tuple[Any, int]:
        with ParameterServer(ctx, Synchronous(automatic=False)) as server:
            server.set_parameters("model", {"w": np.zeros(2)})
            for _ in range(3):
                parameters, version = server.get_parameters("model")
                gradient = {"w": parameters["w"] - 2.0 * (ctx.rank + 1)}
                server.accumulate_gradient("model", gradient, ctx.rank)
                if server.ready():
                    server.apply_gradients("model", 0.5)
            found, version = server.get_parameters("model")
            return found["w"][0], version

    goal = 2.0 * (size + 1) / 2  # the mean of the ranks' targets
    for found, version in run_world(size, work):
        assert (found, version) == (goal * (1 - 0.5**3), 3)


@pytest.mark.parametrize("mode", [Synchronous(), Asynchronous()])
def test_updates_by_hand_are_refused_where_the_server_makes_them(mode: Any) -> None:
    def work(ctx: DistributedContext) -> None:
        with ParameterServer(ctx, mode, optimizer=SGD(0.25)) as server:
            server.set_parameters("model", {"w": np.zeros(2)})
            server.get_parameters("model")
            calls: list[Callable[[], Any]] = [
                lambda: server.ready("model"),
                server.ready,
                lambda: server.apply_gradients("model", 0.01),
            ]
            for call in calls:
                words = r"mode=Synchronous\(automatic=False\).* by SGD\(learning_rate=0.25"
                with pytest.raises(ValueError, match=words):
                    call()

    run_world(2, work)


def test_mistakes_with_a_parameter_server() -> None:
    server: Any = ParameterServer
    with pytest.raises(TypeError, match=r"'world_size'; ParameterServer\(ctx\), on every worker"):
        server(world_size=8)

    def work(ctx: DistributedContext) -> None:
        with ParameterServer(ctx, Synchronous(automatic=False)) as own:
            with pytest.raises(TypeError, match=r"a dict of arrays by name, such as {'w': array}"):
                own.set_parameters("model", np.zeros(3))  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="ready of which model"):
                own.ready()

    run_world(1, work)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array(["a"]), "dtype str32 can't be .*; text goes by ctx.send_message, or as numbers"),
        (np.array([b"a"]), "dtype bytes8 can't be .*; text goes by ctx.send_message"),
        (np.array([None, 1]), "dtype object can't be .*nothing is pickled"),
        (np.array(["2026-01-01"], "M8[s]"), r"dtype datetime64.*; send array.view\(np.int64\)"),
        (np.ones(1, np.longdouble), "can't be communicated; supported: float16"),
    ],
)
def test_arrays_of_what_is_no_number(array: Any, words: str) -> None:
    def work(ctx: DistributedContext) -> None:
        calls = (ctx.broadcast, ctx.all_gather, ctx.gather, lambda each: ctx.send(each, 0))
        for call in calls:
            with pytest.raises(TypeError, match=words):
                call(array)

    run_world(2, work)


ROWS = np.random.default_rng(0).normal(size=(40, 3))


needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


network: Any = potluck.DistributedNeuralNetTrainer if find_spec("torch") else None
kmeans: Any = potluck.DistributedKMeansTrainer if find_spec("sklearn") else None
forest: Any = potluck.DistributedRandomForestTrainer if find_spec("sklearn") else None
needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


def trainer(ctx: DistributedContext, strategy: Any = None) -> Any:
    return potluck.DistributedNeuralNetTrainer(
        ctx,
        strategy or potluck.TrainingStrategy.DATA_PARALLEL,
        input_dim=3,
        hidden_dims=[5],
        output_dim=2,
    )


@needs_torch
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", ["DATA_PARALLEL", "MODEL_PARALLEL"])
def test_a_trainers_parameters_as_one_vector(size: int, strategy: str) -> None:
    def work(ctx: DistributedContext) -> None:
        one = trainer(ctx, potluck.TrainingStrategy[strategy])
        named = one.get_parameters()
        flat = np.concatenate([each.ravel() for each in named.values()])
        one.set_parameters(flat * 2)
        for name, each in one.get_parameters().items():
            np.testing.assert_array_equal(each, named[name] * 2)
        for wrong, words in (
            (flat[:-1], "as one vector they are 32 numbers, in the order of get_parameters"),
            (flat.reshape(2, -1), "the parameters have shape"),
            ("model", "parameters are a dict by name"),
            (None, "parameters are a dict by name"),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                one.set_parameters(wrong)

    run_world(size, work)


def test_parameters_of_estimators_as_one_vector() -> None:
    pytest.importorskip("sklearn")

    def work(ctx: DistributedContext) -> None:
        means = potluck.DistributedKMeansTrainer(ctx, 2, random_state=0)
        with pytest.raises(TypeError, match="a dict by name"):
            means.set_parameters(np.zeros(6))
        means.train_epoch(ROWS)
        means.set_parameters(np.arange(6.0))
        np.testing.assert_array_equal(means.get_centroids(), np.arange(6.0).reshape(2, 3))
        forest = potluck.DistributedRandomForestTrainer(ctx, 2)
        forest.train_epoch(ROWS, ROWS[:, 0] > 0)
        with pytest.raises(TypeError, match="a dict by name"):
            forest.set_parameters(np.zeros(6))

    run_world(1, work)


@needs_torch
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_aggregated_as_a_vector_and_by_ml_cores_method(size: int) -> None:
    def work(ctx: DistributedContext) -> None:
        one, method = trainer(ctx), potluck.AggregationMethod
        mine = np.full(4, ctx.rank + 1.0)
        for chosen in ("mean", method.SYNCHRONOUS):
            found = one.aggregate_gradients(mine, chosen)
            assert (found == (size + 1) / 2).all()
            assert (mine == ctx.rank + 1).all()
            assert (one.aggregate_gradients({"w": mine}, chosen)["w"] == (size + 1) / 2).all()
        assert (one.aggregate_gradients(list(mine), "sum") == size * (size + 1) / 2).all()
        for wrong in (method.ASYNCHRONOUS, method.ELASTIC_AVERAGING, "median"):
            with pytest.raises(ValueError, match=r"potluck.ParameterServer\(ctx, AggregationMet"):
                one.aggregate_gradients(mine, wrong)

    run_world(size, work)


@needs_torch
@pytest.mark.parametrize(
    "name", ["set_mixed_precision", "set_loss_scaling", "enable_dynamic_batching"]
)
def test_the_setters_of_a_trainer_are_arguments_of_its_constructor(name: str) -> None:
    def work(ctx: DistributedContext) -> None:
        with pytest.raises(AttributeError) as caught:
            getattr(trainer(ctx), name)
        hint = hints.NETWORK[name.replace("_", "")]
        assert str(caught.value).endswith(f"has no attribute {name!r}; write {hint}")
        with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
            _ = trainer(ctx).nonsense

    run_world(1, work)


def test_the_threshold_of_dynamic_batching() -> None:
    from potluck.training.policy import NoiseBatching

    made: Any = NoiseBatching
    with pytest.raises(TypeError, match=r"'variance_threshold'; threshold=: the batch size stays"):
        made(min_batch=32, max_batch=512, variance_threshold=0.01)
    assert made(min_batch=32, max_batch=512).clamp(1000) == 512


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: potluck.InProcessBackend.world("2"), "world_size is '2'; it must be a whole num"),  # type: ignore[arg-type]
        (lambda: potluck.balance_workload([1.0], "2"), "num_workers is '2'; it must be a whole"),  # type: ignore[arg-type]
        (lambda: partitioner("10", 2), "total_size is '10'; it must be a whole number"),
    ],
)
def test_text_for_a_number(call: Callable[[], Any], error: str) -> None:
    with pytest.raises(TypeError, match=re.escape(error)):
        call()


@pytest.mark.parametrize("name", ["rank", "world_size", "is_master", "local_rank", "epoch"])
def test_a_property_that_is_called_is_named(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print(ctx.{name}())\n")
    with potluck.init("local") as ctx, pytest.raises(TypeError) as caught:
        exec(compile(script.read_text(), str(script), "exec"), {"ctx": ctx})
    told = f"{name} is a property: write it without parentheses"
    assert hints.of_end(caught.value) == told


@pytest.mark.parametrize("inside", [True, False])
def test_a_property_that_is_called_gets_a_line(inside: bool, tmp_path: Path) -> None:
    start = (
        "with potluck.init('local') as ctx:\n    " if inside else "ctx = potluck.init('local')\n"
    )
    script = tmp_path / "script.py"
    script.write_text(f"import potluck\n{start}print(ctx.world_size())\n")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    told = "potluck: world_size is a property: write it without parentheses\n"
    assert run.stderr.count(told) == 1, run.stderr


@needs_torch
def test_the_module_of_a_ddp_that_is_called_gets_a_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import potluck, torch\nworld = potluck.init('local')\n"
        "model = potluck.torch.DDP(torch.nn.Linear(2, 1), world)\n"
        "torch.save(model.module().state_dict(), 'checkpoint.pt')\n"
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.endswith("\npotluck: module is a property: write it without parentheses\n")


def test_another_call_of_what_is_none_gets_no_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import potluck\nctx = potluck.init('local')\nrank = ctx.rank\nrank()\n")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "potluck:" not in run.stderr


def test_a_rank_reports_metrics_of_its_own(tmp_path: Path) -> None:
    def work(ctx: DistributedContext) -> bytes:
        before = ctx.waited_s
        ctx.barrier()
        assert ctx.waited_s >= before
        ctx.report("training_loss", np.float32(0.5 + ctx.rank), {"phase": "main"})
        ctx.report("seen", 3, labels={"phase": "main"})
        ctx.report(step=3, loss=0.5)  # facts, as before
        with pytest.raises(TypeError, match=r"report\('loss', value, labels\) has no \['step'\]"):
            ctx.report("loss", 0.5, step=3)
        with pytest.raises(ValueError, match="can't be the name of a metric"):
            ctx.report("training loss", 0.5)
        return ctx.metrics_text()

    for rank, text in enumerate(run_world(2, work)):
        told = text.decode()
        assert re.search(rf'training_loss{{.*phase="main".*}} {rank}\.5\n', told), told
        assert re.search(r'seen{.*phase="main".*} 3\.0\n', told), told
        assert "TYPE training_loss gauge" in told


@needs_torch
@pytest.mark.parametrize("size", SIZES)
def test_a_network_in_ml_cores_order_of_arguments(size: int) -> None:
    """By position, and by its names of the samples; as with ours."""

    def work(given: DistributedContext) -> None:
        ctx: Any = given
        labels = (ROWS[:, 0] > 0).astype(int)
        start, end = potluck.DataPartitioner(40, size).get_partition(ctx.rank)
        strategy: Any = potluck.TrainingStrategy
        one = network(ctx, strategy.DATA_PARALLEL, 3, [5], 2, 0.02)
        two = network(ctx, strategy.Data_Parallel, input_size=3, hidden_sizes=[5], output_size=2)
        assert (one.learning_rate, two.learning_rate) == (0.02, 0.01)
        three = network(ctx, input_dim=3, hidden_dims=[5], output_dim=2, lr=0.02)
        loss = one.train_epoch(ROWS[start:end].tolist(), labels[start:end].tolist())
        same = three.train_epoch(local_data=ROWS[start:end], local_labels=labels[start:end])
        assert loss == same == three.get_global_loss()
        one.synchronize_model(root_rank=size - 1)
        mine = np.full(3, ctx.rank + 1.0)
        for method in ("average", potluck.ReduceOp.AVERAGE, op.Mean):
            found = one.aggregate_gradients(local_gradient=mine, method=method)
            assert (found == (size + 1) / 2).all()
        total = one.aggregate_gradients(mine, potluck.ReduceOp.SUM)
        assert (total == size * (size + 1) / 2).all()

    run_world(size, work)


@pytest.mark.parametrize("kind", [potluck.TrainingStrategy, potluck.AggregationMethod])
def test_members_of_ml_cores_enumerations_in_any_case(kind: Any) -> None:
    for name, member in kind.__members__.items():
        assert getattr(kind, name.title()) is getattr(kind, name.lower()) is member
    with pytest.raises(AttributeError, match=rf"{kind.__name__} has no member 'HYBRID'; choose"):
        _ = kind.HYBRID


LAYERS = {"input_dim": 3, "hidden_dims": [5], "output_dim": 2}
CONTEXT_FIRST = r"the context comes first: DistributedNeuralNetTrainer\(ctx, potluck.Training"


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ctx": None}, r"NetTrainer takes a context, ctx = potluck.init\(\), not None"),
        ({"strategy": "DATA_PARALLEL"}, "such as TrainingStrategy.DATA_PARALLEL; there are"),
        ({"input_dim": "3"}, "input_dim is '3'; it must be a whole number"),
        ({"hidden_dims": 5}, r"hidden_dims is 5; it must be a list, such as \[128, 64\]"),
        ({"hidden_dims": [5.0]}, "a number of hidden_dims is 5.0; it must be a whole number"),
        ({"seed": "a"}, "seed is 'a'; it must be a whole number"),
        ({"loss": "mse"}, "loss is 'mse'; it must be a function"),
        ({"callbacks": print}, "callbacks is a builtin_function_or_method; pass a list"),
        ({"loss_scaling": 1024.0}, r"loss_scaling is 1024.0: pass potluck.torch.LossScale\(scale="),
        ({"dynamic_batching": (32, 512)}, "pass a NoiseBatching of potluck.torch, such as"),
        ({"compression": potluck.TopK(0.1)}, "'compression'; potluck.torch.DDP"),
        ({"checkpoint": "x"}, "'checkpoint'; potluck.torch.ElasticLoop"),
        ({"epochs": 3}, r"'epochs'; trainer.train\(X, y, epochs\)"),
        ({"width": 3}, CONTEXT_FIRST),
    ],
)
def test_mistakes_where_a_network_is_made(arguments: dict[str, Any], words: str) -> None:
    def work(ctx: DistributedContext) -> None:
        with pytest.raises(TypeError, match=words):
            network(**{"ctx": ctx, **LAYERS, **arguments})

    run_world(1, work)


@needs_torch
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.train_epoch(ROWS, [0] * 40, epochs=3), r"'epochs'; train\(X, y, epochs\)"),
        (lambda t: t.train(ROWS, [0] * 40, batch_size=8), "'batch_size'; batch_size= where"),
        (lambda t: t.train(ROWS, [0] * 40, "3"), "epochs is '3'; it must be a whole number"),
        (lambda t: t.predict(ROWS[:, :2]), r"X has shape \(40, 2\).* or \(3,\) for one sample"),
        (lambda t: t.predict([]), r"X has shape \(0,\); with input_dim=3"),
        (lambda t: t.predict(1.0), r"X has shape \(\); with input_dim=3"),
        (lambda t: t.predict("text"), r"samples are numbers, not <U4; .*np.searchsorted"),
        (lambda t: t.train(ROWS, ["a", "b"] * 20), r"numbers, not <U1; .*np.searchsorted"),
        (lambda t: t.fit(ROWS, [0] * 40), r"write trainer.train\(X, y, epochs\)"),
        (lambda t: t.get_loss(), r"write trainer.get_global_loss\(\)"),
        (lambda t: t.save_checkpoint("x"), r"write np.savez\(path, \*\*trainer.get_parameters"),
        (lambda t: t.set_parameters({"w": ROWS}), r"parameters are \['w'\]; \['0.bias', '0.wei"),
    ],
)
def test_mistakes_with_a_network(call: Callable[[Any], Any], words: str) -> None:
    def work(ctx: DistributedContext) -> None:
        with pytest.raises((TypeError, ValueError, AttributeError), match=words):
            call(trainer(ctx))

    run_world(1, work)


@needs_torch
def test_a_trainers_parameters_are_saved_and_loaded_as_its_hint_says(tmp_path: Path) -> None:
    def work(ctx: DistributedContext) -> None:
        one, path = trainer(ctx), tmp_path / "parameters.npz"
        np.savez(path, **one.get_parameters())
        two = network(ctx, **LAYERS, seed=5)
        assert not np.array_equal(two.predict(ROWS), one.predict(ROWS))
        two.set_parameters(dict(np.load(path)))
        np.testing.assert_array_equal(two.predict(ROWS), one.predict(ROWS))

    run_world(1, work)


@needs_sklearn
def test_mistakes_with_the_trainers_of_estimators() -> None:
    def work(ctx: DistributedContext) -> None:
        clusters, trees = kmeans(ctx, k=2, max_iter=5, random_state=0), forest(ctx, 2)
        for call in (
            clusters.get_centroids,
            clusters.get_parameters,
            lambda: clusters.predict(ROWS),
            trees.get_parameters,
            lambda: trees.predict(ROWS),
        ):
            with pytest.raises(
                ValueError, match="is not trained yet: call train_epoch, or set_par"
            ):
                call()
        with pytest.raises(ValueError, match=r"parameters are \['w'\]; \['centroids'\] are need"):
            clusters.set_parameters({"w": ROWS})
        with pytest.raises(ValueError, match=r"are needed"):
            trees.set_parameters({"features": np.array([3]), "classes": np.arange(2)})
        with pytest.raises(AttributeError, match=r"write trainer.train_epoch\(X, y\), once for"):
            clusters.fit(ROWS)
        with pytest.raises(AttributeError, match=r"'set_mixed_precision'$"):  # has none to write
            clusters.set_mixed_precision(True)
        with pytest.raises(TypeError, match=r"DistributedKMeansTrainer\(ctx, n_clusters, max_iter"):
            kmeans(ctx, potluck.TrainingStrategy.DATA_PARALLEL, 2, 5)
        clusters.train_epoch(local_data=ROWS)
        assert clusters.get_centroids().shape == (2, 3)

    run_world(1, work)


@pytest.mark.parametrize("size", SIZES)
def test_scatter_and_gather_by_ml_cores_names_or_the_order_to_write(size: int) -> None:
    def work(given: DistributedContext) -> None:
        ctx: Any = given
        flat, last = np.arange(4.0 * size), size - 1
        parts = flat.reshape(size, 4) if ctx.rank == last else None
        mine = np.empty(4)
        ctx.scatter(send_data=parts, recv_data=mine, root_rank=last)
        np.testing.assert_array_equal(mine, 4 * ctx.rank + np.arange(4.0))
        rows = np.empty((size, 4))
        ctx.gather(send_data=mine, recv_data=rows, root_rank=last)
        if ctx.rank == last:
            np.testing.assert_array_equal(rows.ravel(), flat)
        with pytest.raises(TypeError, match=r"gather\(array, root=0, out=rows\)"):
            ctx.gather(mine, rows, 0)
        with pytest.raises(TypeError, match=r"gather\(array, root=0, out=rows\)"):
            ctx.gather(mine, rows, root_rank=0)
        if ctx.rank == 0:
            for output, sent in ((flat, np.empty(4)), (mine, flat), (mine.astype("f4"), flat)):
                with pytest.raises(ValueError, match=r"must have shape .*: scatter\(output, parts"):
                    ctx.scatter(output, sent, root_rank=0)

    run_world(size, work)


def test_messages_by_ml_cores_names() -> None:
    def work(given: DistributedContext) -> None:
        ctx: Any = given
        if ctx.rank == 0:
            ctx.send_message({"loss": 0.5}, dest_rank=1)
        else:
            assert ctx.recv_message(source_rank=0).payload == {"loss": 0.5}
        mistakes: list[tuple[Callable[[], Any], str]] = [
            (lambda: ctx.send({"loss": 0.5}, 0), "got dict; .*values go by ctx.send_message"),
            (lambda: ctx.receive(0), r"write ctx.recv_message\(src\), of what ctx.send_message"),
            (lambda: message("x", 0), r"send by ctx.send_message\(payload, dst\)"),
            (lambda: ctx.get_communication_stats(), '"bytes_sent" and "messages_sent"'),
        ]
        for call, words in mistakes:
            with pytest.raises((TypeError, AttributeError), match=words):
                call()

    message: Any = potluck.Message
    run_world(2, work)


@pytest.mark.parametrize("costs", [[1.0, "2"], 3, [[1.0]], "123", None])
def test_costs_that_are_no_numbers(costs: Any) -> None:
    with pytest.raises(TypeError, match=r"task_costs is .*; it must be a list of numbers"):
        potluck.balance_workload(costs, 2)


def test_a_workload_by_ml_cores_name_of_the_workers() -> None:
    balance: Any = potluck.balance_workload
    assert balance(task_costs=np.array([3, 1, 2]), world_size=2) == [[0], [1, 2]]
    with pytest.raises(TypeError, match=r"speeds is .*; it must be a list of numbers"):
        balance([1.0], 2, ["fast", "slow"])


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_server_takes_what_can_mean_one_thing(size: int) -> None:
    server: Any = ParameterServer

    def work(ctx: DistributedContext) -> None:
        by_hand = Synchronous(automatic=False)
        with server(ctx, aggregation=by_hand) as own:
            own.set_parameters("model", {"w": np.arange(3.0)})
            pulled = own.get_parameters("model")
            np.testing.assert_array_equal(pulled["w"], np.arange(3.0))
            assert (pulled[0] is pulled.parameters, pulled[1]) == (True, 0)
            parameters, version = pulled
            assert (list(parameters), version) == (["w"], 0)
            with pytest.raises(
                ValueError, match=r"worker_rank is '0', but the rank of this worker"
            ):
                own.accumulate_gradient("model", {"w": np.ones(3)}, "0")
            own.accumulate_gradient("model", {"w": np.ones(3)}, ctx.rank)
            for rate, error in (("a", TypeError), (-0.1, ValueError), (np.nan, ValueError)):
                with pytest.raises(error, match=r"learning_rate is .*; it must be"):
                    own.apply_gradients("model", rate)
            ctx.barrier()
            own.apply_gradients("model", np.float64(1.0))
            np.testing.assert_array_equal(own.get_parameters("model")["w"], np.arange(3.0) - 1)

    run_world(size, work)
    with pytest.raises(TypeError, match=r"learning_rate is '0.1'; it must be a number"):
        SGD("0.1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ParameterServer\(ctx\), on every worker, with ctx = pot"):
        server()


def test_a_parameter_server_that_the_first_worker_does_not_make() -> None:
    def work(ctx: DistributedContext) -> None:
        if ctx.rank == 1:
            words = (
                "worker 0, which is to keep .* server 'other' within 1 s: every worker makes one"
            )
            ctx.set_timeout(1)
            with pytest.raises(UnknownService, match=words):
                ParameterServer(ctx, name="other")
        ctx.barrier(timeout=30)

    run_world(2, work)


def test_numbers_of_numpy_are_labels() -> None:
    def work(ctx: DistributedContext) -> bytes:
        ctx.report("loss", 0.5, {"epoch": np.int64(3), "rate": np.float32(0.5)})
        return ctx.metrics_text()

    [text] = run_world(1, work)
    assert re.search(rb'loss{.*epoch="3".*rate="0.5"} 0.5\n', text)


@needs_torch
def test_the_steps_of_a_round_by_other_names() -> None:
    rounds: Any = potluck.torch
    assert rounds.DiLoCo(sync_every=20) == rounds.DiLoCo(every=20)
    assert rounds.LocalSGD(period=4) == rounds.LocalSGD(every=4)
    for call, words in (
        (lambda: rounds.DiLoCo(20), r"too many positional arguments; DiLoCo\(every=100\)"),
        (lambda: rounds.LocalSGD(4), r"too many positional arguments; LocalSGD\(every=8\)"),
        (lambda: rounds.LocalSGD(outer=None), r"'outer'; DiLoCo\(every=..., outer=...\)"),
        (lambda: rounds.LossScale(8.0), r"positional arguments; potluck.torch.LossScale\(scale="),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    assert rounds.LossScale(init_scale=8.0) == rounds.LossScale(scale=8.0)


def test_metrics_are_reported_by_the_context() -> None:
    words = r"cannot import name 'metrics' from 'potluck'; write ctx.report\(name, value, labels\)"
    with pytest.raises(ImportError, match=words):
        from potluck import metrics  # type: ignore[attr-defined]  # noqa: F401
