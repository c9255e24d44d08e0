"""The trainers: one interface over loops and estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

import torch
from sklearn.datasets import load_diabetes, load_digits

import potluck
from potluck.context import DistributedContext
from potluck.errors import CallbackError
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
        trainer = net(ctx)
        trainer.set_mixed_precision()
        trainer.set_loss_scaling(LossScale(scale=8.0))
        trainer.enable_dynamic_batching(NoiseBatching(min_batch=32, max_batch=256))
        losses = [trainer.train_epoch(X, Y) for _ in range(3)]
        assert losses[-1] < losses[0]
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}

    run_world(2, train)


def test_a_network_learns_values() -> None:
    values, targets = load_diabetes(return_X_y=True)
    targets = targets.astype(np.float32) / 100

    def train(ctx: DistributedContext) -> None:
        trainer = potluck.DistributedNeuralNetTrainer(
            ctx, input_dim=10, hidden_dims=[16], output_dim=1
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

    run_world(2, train)


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


def test_other_strategies_say_what_there_is() -> None:
    def ask(ctx: DistributedContext) -> None:
        with pytest.raises(ValueError, match="DATA_PARALLEL, not FEDERATED: it does not exist yet"):
            potluck.DistributedKMeansTrainer(ctx, strategy=TrainingStrategy.FEDERATED)
        with pytest.raises(ValueError, match=r"not MODEL_PARALLEL: .* docs/parallelism\.md"):
            potluck.DistributedKMeansTrainer(ctx, strategy=TrainingStrategy.MODEL_PARALLEL)
        with pytest.raises(TypeError, match=r"pass a potluck\.TrainingStrategy"):
            potluck.DistributedKMeansTrainer(ctx, strategy="ring")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="every layer needs at least 1"):
            potluck.DistributedNeuralNetTrainer(ctx, input_dim=4, hidden_dims=[0], output_dim=1)
        assert issubclass(potluck.DistributedNeuralNetTrainer, DistributedTrainer)

    run_world(1, ask)


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
