"""The trainers: one interface over loops and estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.exceptions import NotFittedError

import potluck
from potluck._core.context import DistributedContext
from potluck.errors import CallbackError, RemoteError
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import LossScale, NoiseBatching
from potluck.training.trainer import DistributedTrainer, TrainingStrategy

X, Y = load_digits(return_X_y=True)
X = X / 16


def shard(ctx: DistributedContext) -> tuple[Any, Any]:
    part = potluck.DataPartitioner(len(X), ctx.world_size, "strided").get_indices(ctx.rank)
    return X[part], Y[part]


def net(ctx: DistributedContext, **options: Any) -> Any:
    sizes = {"input_dim": 64, "hidden_dims": [32, 16], "output_dim": 10}
    options = {"samples": "all"} | options
    return potluck.DistributedNeuralNetTrainer(
        ctx, TrainingStrategy.DATA_PARALLEL, **sizes, **options
    )


def test_a_network_learns_the_digits_and_all_ranks_have_its_weights() -> None:
    def train(ctx: DistributedContext) -> Any:
        told: list[tuple[int, float]] = []
        trainer = net(ctx, callbacks=[lambda epoch, loss: told.append((epoch, loss))])
        losses = [trainer.train_epoch(X, Y) for _ in range(2)]
        losses.append(trainer.train(X, Y, epochs=2))
        assert [epoch for epoch, _ in told] == list(range(4))
        assert losses[-1] == pytest.approx(told[-1][1], rel=1e-5)
        assert trainer.get_global_loss() == losses[-1] < 0.3 * losses[0]
        assert trainer.epochs == 4
        accuracy = float((trainer.predict(X).argmax(axis=1) == Y).mean())
        return accuracy, trainer.get_parameters()

    (accuracy, mine), (_, theirs) = run_world(2, train)
    assert accuracy > 0.95
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_two_ranks_have_the_losses_of_one() -> None:
    def losses(ctx: DistributedContext) -> list[float]:
        trainer = net(ctx)
        return [trainer.train_epoch(X, Y) for _ in range(2)]

    [alone] = run_world(1, losses)
    for found in run_world(2, losses):
        assert found == pytest.approx(alone, rel=1e-4)


def test_a_network_survives_a_worker_that_is_killed() -> None:
    def train(ctx: MortalContext) -> float:
        return float(net(ctx).train(X, Y, epochs=2))

    alone = ElasticWorld(1, train).run()["0"]
    world = ElasticWorld(3, train, dies=lambda worker, _, moment: (worker, moment) == ("1", 101))
    survivors = world.run()
    assert set(survivors) == {"0", "2"}
    assert survivors["0"] == pytest.approx(alone, rel=0.1)


def test_a_network_in_mixed_precision_with_loss_scaling_and_dynamic_batches() -> None:
    def train(ctx: DistributedContext) -> None:
        trainer = net(
            ctx,
            mixed_precision=torch.bfloat16,
            loss_scaling=LossScale(scale=8.0),
            dynamic_batching=NoiseBatching(min_batch=32, max_batch=256),
        )
        losses = [trainer.train_epoch(X, Y) for _ in range(3)]
        assert losses[-1] < losses[0]
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}

    run_world(2, train)


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        *((each, torch.bfloat16) for each in TrainingStrategy),
        (TrainingStrategy.DATA_PARALLEL, torch.float16),
        (TrainingStrategy.FEDERATED, torch.float16),
    ],
)
def test_a_network_computes_in_half_precision_by_every_strategy(
    strategy: TrainingStrategy, dtype: torch.dtype
) -> None:
    """The first steps in float16 overflow at this loss scale, and make no update."""
    seen: set[torch.dtype] = set()

    def note(module: Any, inputs: Any, outputs: torch.Tensor) -> None:
        seen.add(outputs.dtype)

    def train(ctx: DistributedContext) -> None:
        scale = LossScale(scale=2.0**40) if dtype is torch.float16 else None
        with potluck.DistributedNeuralNetTrainer(
            ctx, strategy, mixed_precision=dtype, loss_scaling=scale, **SIZES
        ) as trainer:
            for module in trainer.model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(note)
            mine = shard(ctx)
            first = trainer.train_epoch(*mine)
            assert trainer.train(*mine, epochs=2) < first
            assert all(each.dtype == np.float32 for each in trainer.get_parameters().values())

    run_world(2, train)
    assert dtype in seen


def test_the_parameter_server_of_a_trainer_ends_with_it() -> None:
    def train(ctx: DistributedContext) -> int:
        strategy = TrainingStrategy.PARAMETER_SERVER
        with potluck.DistributedNeuralNetTrainer(ctx, strategy, **ALL):
            pass  # nothing was trained: there is no server
        with potluck.DistributedNeuralNetTrainer(ctx, strategy, **ALL) as trainer:
            trainer.train_epoch(X[:200], Y[:200])
        trainer.close()
        assert trainer.predict(X).shape == (len(X), 10)
        with pytest.raises(RuntimeError, match="'trainer 0' was closed by this worker"):
            trainer.train_epoch(X[:200], Y[:200])
        return ctx.rank

    assert run_world(2, train) == [0, 1]


def test_a_network_learns_values() -> None:
    values, targets = load_diabetes(return_X_y=True)
    targets = targets.astype(np.float32) / 100

    def train(ctx: DistributedContext) -> None:
        trainer = potluck.DistributedNeuralNetTrainer(
            ctx, input_dim=10, hidden_dims=[16], output_dim=1, samples="all"
        )
        first = trainer.train_epoch(values, targets)
        assert trainer.train(values, targets, epochs=5) < first
        assert trainer.predict(values).shape == (len(values), 1)

    run_world(2, train)


def test_k_means_goes_on_from_its_centroids() -> None:
    def train(ctx: DistributedContext) -> Any:
        told: list[float] = []
        mine, _ = shard(ctx)
        trainer = potluck.DistributedKMeansTrainer(ctx, 10, max_iterations=2, random_state=0)
        with pytest.raises(NotFittedError):
            trainer.get_centroids()
        trainer.register_callback(lambda epoch, loss: told.append(loss))
        first = trainer.train_epoch(mine)
        second = trainer.train_epoch(mine, None)
        assert told == [first, second]
        assert second < first
        assert second * len(X) == pytest.approx(trainer.model.inertia_)
        assert trainer.get_local_loss() != second
        assert trainer.predict(X).shape == (len(X),)
        return trainer.get_centroids()

    mine, theirs = run_world(2, train)
    assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_parameters_of_a_forest_make_the_same_forest(task: str) -> None:
    def train(ctx: DistributedContext) -> None:
        options = {"task": task, "random_state": 0, "max_depth": 5}
        trainer = potluck.DistributedRandomForestTrainer(ctx, 6, **options)
        loss = trainer.train_epoch(*shard(ctx))
        assert 0 < loss < (0.5 if task == "classification" else 10)
        copy = potluck.DistributedRandomForestTrainer(ctx, 6, **options)
        copy.set_parameters(trainer.get_parameters())
        assert np.array_equal(copy.predict(X), trainer.predict(X))
        copy.synchronize_model(root=1)
        assert np.array_equal(copy.predict(X), trainer.predict(X))

    run_world(2, train)


def test_centroids_that_are_set_predict_before_any_epoch() -> None:
    def predict(ctx: DistributedContext) -> Any:
        trainer = potluck.DistributedKMeansTrainer(ctx, 3)
        trainer.set_parameters({"centroids": X[: 2 * ctx.rank + 3]})
        trainer.synchronize_model()
        with pytest.raises(ValueError, match="X has 9 features"):
            trainer.predict(X[:, :9])
        return trainer.predict(X[:3])

    assert [each.tolist() for each in run_world(1, predict)] == [[0, 1, 2]]


def test_gradients_are_aggregated_and_models_synchronized() -> None:
    def train(ctx: DistributedContext) -> None:
        trainer = potluck.DistributedKMeansTrainer(ctx, 2)
        gradients = {"w": np.full(3, ctx.rank + 1.0)}
        assert trainer.aggregate_gradients(gradients)["w"].tolist() == [1.5] * 3
        assert trainer.aggregate_gradients(gradients, "sum")["w"].tolist() == [3.0] * 3
        assert gradients["w"].tolist() == [ctx.rank + 1.0] * 3
        with pytest.raises(ValueError, match="method is 'median'"):
            trainer.aggregate_gradients(gradients, "median")
        trainer.set_parameters({"centroids": np.full((2, 4), float(ctx.rank))})
        trainer.synchronize_model(root=1)
        assert trainer.get_centroids().tolist() == [[1.0] * 4] * 2

    run_world(2, train)


SIZES: dict[str, Any] = {"input_dim": 64, "hidden_dims": [32, 16], "output_dim": 10}
ALL: dict[str, Any] = {**SIZES, "samples": "all"}


def trained(ctx: DistributedContext, strategy: TrainingStrategy) -> tuple[float, Any, list[float]]:
    """Accuracy, parameters and losses after four epochs."""
    told: list[tuple[int, float]] = []
    trainer = potluck.DistributedNeuralNetTrainer(ctx, strategy, **SIZES)
    trainer.register_callback(lambda epoch, loss: told.append((epoch, loss)))
    data = shard(ctx)
    trainer.train_epoch(*data)
    loss = trainer.train(*data, epochs=3)
    assert [epoch for epoch, _ in told] == list(range(4))
    assert trainer.epochs == 4
    assert loss == trainer.get_global_loss() == pytest.approx(told[-1][1], rel=0.05)
    found = trainer.predict(X)
    assert found.shape == (len(X), 10)
    parameters = trainer.get_parameters()
    trainer.set_parameters({name: np.zeros_like(each) for name, each in parameters.items()})
    assert not trainer.predict(X).any()
    trainer.set_parameters(parameters)
    np.testing.assert_array_equal(trainer.predict(X), found)
    trainer.synchronize_model(root=1 % ctx.world_size)
    np.testing.assert_array_equal(trainer.predict(X), found)
    accuracy = float((found.argmax(axis=1) == Y).mean())
    return accuracy, parameters, [loss for _, loss in told]


@pytest.fixture(scope="module")
def alone() -> tuple[float, Any, list[float]]:
    """One worker that trains alone."""
    return run_world(1, lambda ctx: trained(ctx, TrainingStrategy.DATA_PARALLEL), timeout_s=120)[0]


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [*((each, 2) for each in TrainingStrategy), (TrainingStrategy.DECENTRALIZED, 4)],
)
def test_a_network_learns_the_digits_by_every_strategy(
    strategy: TrainingStrategy, world_size: int, alone: tuple[float, Any, list[float]]
) -> None:
    """Within two points of one worker that trains alone. Four have neighbours that are not all."""
    serial, shapes, _ = alone
    results = run_world(world_size, lambda ctx: trained(ctx, strategy), timeout_s=120)
    for accuracy, parameters, losses in results:
        assert accuracy > serial - 0.02 > 0.9
        assert losses[-1] < losses[0] / 3
        assert parameters.keys() == shapes.keys()
        for name, each in parameters.items():
            np.testing.assert_array_equal(each, results[0][1][name])


@pytest.mark.parametrize("epochs", [0, 1], ids=["before training", "after an epoch"])
def test_what_a_rank_sets_is_its_own_until_all_train_and_then_the_servers(epochs: int) -> None:
    """From weights of zero only the last bias moves: ReLU passes no gradient on."""

    def train(ctx: DistributedContext) -> Any:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, TrainingStrategy.PARAMETER_SERVER, **ALL)
        if epochs:
            trainer.train_epoch(X[:200], Y[:200])
        before = trainer.predict(X)
        if ctx.rank == 1:
            trainer.set_parameters({n: 0 * each for n, each in trainer.get_parameters().items()})
            assert not trainer.predict(X).any()
        ctx.barrier()
        if ctx.rank == 0:
            np.testing.assert_array_equal(trainer.predict(X), before)
        trainer.train_epoch(X[:200], Y[:200])
        return trainer.get_parameters()

    one, two = run_world(2, train)
    assert not one["0.weight"].any()
    assert one["4.bias"].any()
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_network_cut_by_layers_is_the_network_of_one_worker(world_size: int) -> None:
    """The same batches and the same Adam; only sums are in another order."""

    def train(ctx: DistributedContext) -> Any:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, TrainingStrategy.MODEL_PARALLEL, **ALL)
        trainer.train(X[:500], Y[:500], epochs=2)
        return trainer.get_parameters()

    [alone] = run_world(1, train)
    for found in run_world(world_size, train):
        for name, each in found.items():
            np.testing.assert_allclose(each, alone[name], atol=1e-4)


def test_a_federated_network_goes_on_without_a_worker_that_is_killed() -> None:
    def train(ctx: MortalContext) -> float:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, TrainingStrategy.FEDERATED, **SIZES)
        return trainer.train(*shard(ctx), epochs=3)

    world = ElasticWorld(3, train, dies=lambda worker, _, moment: (worker, moment) == ("1", 9))
    assert set(world.run()) == {"0", "2"}


def test_a_federated_mean_is_weighted_by_samples_and_an_empty_rank_counts_nothing() -> None:
    def train(ctx: DistributedContext) -> Any:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, TrainingStrategy.FEDERATED, **SIZES)
        mine = slice(0, 500 if ctx.rank == 0 else 0)
        loss = trainer.train_epoch(X[mine], Y[mine])
        assert loss == pytest.approx(trainer.get_global_loss())
        assert np.isnan(trainer.get_local_loss()) == (ctx.rank == 1)
        return trainer.get_parameters()

    one, two = run_world(2, train)
    assert all(np.array_equal(one[name], two[name]) for name in one)


LOOPS = (
    TrainingStrategy.DATA_PARALLEL,
    TrainingStrategy.DECENTRALIZED,
    TrainingStrategy.FEDERATED,
)


@pytest.mark.parametrize("strategy", LOOPS)
def test_a_rank_whose_samples_have_nan_is_named_to_all(strategy: TrainingStrategy) -> None:
    def train(ctx: DistributedContext) -> None:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, strategy, **ALL)
        mine = X[:100] if ctx.rank == 0 else np.full((100, 64), np.nan)
        trainer.train_epoch(mine, Y[:100])

    with pytest.raises(WorldError) as caught:
        run_world(2, train)
    assert isinstance(caught.value.errors[1], ValueError)
    assert isinstance(caught.value.errors[0], RemoteError)
    assert all("X of rank 1 has NaN" in str(each) for each in caught.value.errors.values())


@pytest.mark.parametrize("strategy", [*LOOPS[:2], TrainingStrategy.MODEL_PARALLEL])
def test_a_loss_that_is_nan_on_one_rank_is_told_to_all_with_its_step(
    strategy: TrainingStrategy,
) -> None:
    def train(ctx: DistributedContext) -> None:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, strategy, **ALL)
        trainer.train_epoch(X[:128], Y[:128])  # two steps
        if ctx.rank == 1:
            trainer.model.register_forward_hook(lambda module, inputs, outputs: outputs * np.nan)
        trainer.train_epoch(X[:128], Y[:128])

    with pytest.raises(WorldError) as caught:
        run_world(2, train)
    assert isinstance(caught.value.errors[1], ValueError)
    assert isinstance(caught.value.errors[0], RemoteError)
    why = "the loss of rank 1 is nan in step 0: look at its samples"
    assert all(why in str(each) for each in caught.value.errors.values())


@pytest.mark.parametrize(
    "strategy", [TrainingStrategy.PARAMETER_SERVER, TrainingStrategy.MODEL_PARALLEL]
)
def test_samples_with_nan_on_one_rank_are_the_same_error_on_all_and_the_group_goes_on(
    strategy: TrainingStrategy,
) -> None:
    def train(ctx: DistributedContext) -> None:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, strategy, **ALL)
        broken = X[:100].copy()
        broken[3] = np.nan
        with pytest.raises(ValueError, match=r"the samples of rank 1.*: X of rank 1 has NaN"):
            trainer.train_epoch(broken if ctx.rank == 1 else X[:100], Y[:100])
        assert np.isfinite(trainer.train_epoch(X[:100], Y[:100]))

    run_world(2, train)


@pytest.mark.parametrize("strategy", TrainingStrategy)
def test_batch_sizes_and_learning_rates_that_cant_be_meant_are_refused_at_once(
    strategy: TrainingStrategy,
) -> None:
    def make(ctx: DistributedContext) -> None:
        for batch_size in (0, -3, 2.5, "64", None, True):
            with pytest.raises(ValueError, match=f"batch_size is {batch_size!r}; it must be a"):
                potluck.DistributedNeuralNetTrainer(
                    ctx,
                    strategy,
                    batch_size=batch_size,  # type: ignore[arg-type]
                    **ALL,
                )
        for rate in (0, -0.1, float("nan"), float("inf"), "0.1", None):
            with pytest.raises(ValueError, match=f"learning_rate is {rate!r}; it must be a"):
                potluck.DistributedNeuralNetTrainer(
                    ctx,
                    strategy,
                    learning_rate=rate,  # type: ignore[arg-type]
                    **ALL,
                )
        potluck.DistributedNeuralNetTrainer(
            ctx,
            strategy,
            batch_size=np.int64(8),  # type: ignore[arg-type]
            learning_rate=np.float32(0.1),  # type: ignore[arg-type]
            **ALL,
        )

    run_world(2, make)


def test_mistakes_with_strategies_are_named() -> None:
    def ask(ctx: DistributedContext) -> None:
        kinds = TrainingStrategy
        with pytest.raises(ValueError, match="DATA_PARALLEL, not FEDERATED: its model comes from"):
            potluck.DistributedKMeansTrainer(ctx, strategy=kinds.FEDERATED)
        with pytest.raises(TypeError, match=r"pass a potluck\.TrainingStrategy"):
            potluck.DistributedKMeansTrainer(ctx, strategy="ring")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="every layer needs at least 1"):
            potluck.DistributedNeuralNetTrainer(ctx, input_dim=4, hidden_dims=[0], output_dim=1)
        sizes: dict[str, Any] = {"input_dim": 64, "hidden_dims": [], "output_dim": 10}
        sizes["samples"] = "all"
        trainer = potluck.DistributedNeuralNetTrainer(ctx, kinds.PARAMETER_SERVER, **sizes)
        with pytest.raises(ValueError, match="epochs is 0"):
            trainer.train(X, Y, epochs=0)
        for samples, targets, why in (
            (X[:, :5], Y, r"X has shape .*, 5.; with input_dim=64 it must be .n, 64."),
            (X * np.nan, Y, "X of rank . has NaN"),
            (
                X,
                Y.astype(float),
                r"floats are values, 10 .output_dim. for each sample; give classes",
            ),
            (X, Y + 5, r"from 0 to 9 .output_dim - 1.; .* and values from 5 to 14"),
            (X, Y[:7], "samples in X, and 7 targets in y"),
        ):
            other = potluck.DistributedNeuralNetTrainer(ctx, kinds.PARAMETER_SERVER, **sizes)
            with pytest.raises(ValueError, match=why):
                other.train_epoch(samples, targets)
        batching = NoiseBatching(min_batch=32, max_batch=256)
        refused: list[tuple[TrainingStrategy, dict[str, Any], type[Exception], str]] = [
            (kinds.PARAMETER_SERVER, {"loss_scaling": LossScale()}, ValueError, "no loss scaling"),
            (kinds.MODEL_PARALLEL, {"mixed_precision": torch.float16}, ValueError, "no loss sca"),
            (kinds.DECENTRALIZED, {"dynamic_batching": batching}, ValueError, "no dynamic batch"),
            (kinds.DATA_PARALLEL, {"dynamic_batching": True}, TypeError, "pass a NoiseBatching"),
            (kinds.DATA_PARALLEL, {"mixed_precision": True}, TypeError, "pass torch.bfloat16"),
            (kinds.DATA_PARALLEL, {"loss_scaling": 8.0}, TypeError, "pass potluck.torch.LossSc"),
        ]
        for kind, options, error, why in refused:
            with pytest.raises(error, match=why):
                potluck.DistributedNeuralNetTrainer(ctx, kind, **ALL, **options)
        trainer = potluck.DistributedNeuralNetTrainer(ctx, kinds.MODEL_PARALLEL, **ALL)
        with pytest.raises(ValueError, match="are needed"):
            trainer.set_parameters({"0.weight": np.zeros((32, 64))})
        assert issubclass(potluck.DistributedNeuralNetTrainer, DistributedTrainer)

    run_world(2, ask)


def test_a_callback_that_raises_is_named() -> None:
    def broken(epoch: int, loss: float) -> None:
        raise RuntimeError("out of paper")

    def train(ctx: DistributedContext) -> None:
        trainer = potluck.DistributedKMeansTrainer(ctx, 3)
        trainer.register_callback(broken)
        trainer.train_epoch(shard(ctx)[0])

    with pytest.raises(WorldError, match="out of paper") as caught:
        run_world(2, train)
    assert {type(error) for error in caught.value.errors.values()} == {CallbackError}
