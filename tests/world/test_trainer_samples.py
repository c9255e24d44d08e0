"""Trainers on each worker's own samples: values against one process, and what goes wrong."""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn.datasets import load_digits

import potluck
from potluck import AggregationMethod, TrainingStrategy
from potluck._core.context import DistributedContext
from potluck.data import NumpyFiles, ParquetFiles
from potluck.errors import RemoteError
from potluck.parameter_server import Asynchronous, ElasticAveraging, Synchronous
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.training.sampler import order

X, Y = load_digits(return_X_y=True)
X = X / 16
SIZES: dict[str, Any] = {"input_dim": 64, "hidden_dims": [32, 16], "output_dim": 10}
KINDS = TrainingStrategy

UNEQUAL = [[57], [40, 17], [13, 0, 5, 39]]
"""The numbers of samples of the ranks of three worlds."""


def part(sizes: list[int], rank: int) -> tuple[Any, Any]:
    start = sum(sizes[:rank])
    here = slice(start, start + sizes[rank])
    return X[here], Y[here]


def own_model(bias: float = 0.0) -> nn.Module:
    """A model of the user's own in float64, the same on every call but for ``bias``."""
    random = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 7), nn.Tanh(), nn.Linear(7, 10)).double()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=random, dtype=torch.float64) / 5 + bias)
    return model


def in_batches(total: int) -> list[tuple[int, int]]:
    return [(at, min(at + 16, total)) for at in range(0, total, 16)]


def in_parts(most: int) -> Callable[[int], list[tuple[int, int]]]:
    def spans(total: int) -> list[tuple[int, int]]:
        num = min(-(-total // 16), most)
        return [(total * k // num, total * (k + 1) // num) for k in range(num)]

    return spans


def smooth(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(found, wanted.long(), label_smoothing=0.1)


CORNERS = [[23], [0, 23], [1, 22], [1, 1, 1], [0, 1, 14], [1, 0, 0, 0], [0, 0, 0, 2], [9, 2, 1, 4]]
"""Ranks without a sample, with one, and with fewer than a step has."""


@pytest.mark.parametrize("sizes", [*UNEQUAL, *CORNERS], ids=str)
@pytest.mark.parametrize("strategy", [KINDS.DATA_PARALLEL, KINDS.PARAMETER_SERVER])
def test_the_gradient_of_a_step_is_the_mean_over_the_samples_of_all_ranks(
    strategy: TrainingStrategy, sizes: list[int]
) -> None:
    """In float64, with a model and a loss of the user's own; rank 0's weights count."""
    epochs = 3

    def train(ctx: DistributedContext) -> Any:
        with potluck.DistributedNeuralNetTrainer(
            *(ctx, strategy),
            model=own_model(bias=float(ctx.rank)),
            loss=smooth,
            batch_size=16,
        ) as trainer:
            losses = [trainer.train_epoch(*part(sizes, ctx.rank)) for _ in range(epochs)]
            assert losses[-1] == trainer.get_global_loss() < losses[0]
            return list(trainer.get_parameters().values())

    # Each call of train_epoch is a training by itself, with the next seed.
    model = own_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    spans = in_batches if strategy is KINDS.DATA_PARALLEL else in_parts(max(sizes))
    total = sum(sizes)
    for epoch in range(epochs):
        for start, stop in spans(total):
            chosen = np.concatenate(
                [
                    sum(sizes[:rank]) + order(epoch, 0, n)[n * start // total : n * stop // total]
                    for rank, n in enumerate(sizes)
                ]
            )
            optimizer.zero_grad()
            smooth(model(torch.from_numpy(X[chosen])), torch.from_numpy(Y[chosen])).backward()
            optimizer.step()
    expected = [each.detach().numpy() for each in model.parameters()]
    for found in run_world(len(sizes), train):
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sizes", [*UNEQUAL, *CORNERS], ids=str)
def test_federated_parameters_are_the_mean_over_samples_of_epochs_at_home(sizes: list[int]) -> None:
    def train(ctx: DistributedContext) -> Any:
        trainer = potluck.DistributedNeuralNetTrainer(
            ctx, KINDS.FEDERATED, model=own_model(), loss=smooth, batch_size=16
        )
        for _ in range(2):
            trainer.train_epoch(*part(sizes, ctx.rank))
        return trainer.get_parameters()

    expected = own_model().state_dict()
    for epoch in range(2):
        mean = {name: torch.zeros_like(each) for name, each in expected.items()}
        for rank, num in enumerate(sizes):
            x, y = map(torch.from_numpy, part(sizes, rank))
            model = own_model()
            model.load_state_dict(expected)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            mixed, size = order(epoch, 0, num), 16 // len(sizes)
            for start in range(0, num, size):
                rows = torch.from_numpy(mixed[start : start + size].copy())
                optimizer.zero_grad()
                smooth(model(x[rows]), y[rows]).backward()
                optimizer.step()
            for name, each in model.state_dict().items():
                mean[name] += each * (num / sum(sizes))
        expected = mean
    for found in run_world(len(sizes), train):
        for name, each in found.items():
            np.testing.assert_allclose(each, expected[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("sizes", CORNERS, ids=str)
@pytest.mark.parametrize("strategy", [KINDS.DECENTRALIZED, KINDS.MODEL_PARALLEL])
def test_corners_of_shards_leave_all_ranks_alike_under_every_strategy(
    strategy: TrainingStrategy, sizes: list[int]
) -> None:
    def train(ctx: DistributedContext) -> Any:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, strategy, batch_size=2, **SIZES)
        losses = [trainer.train_epoch(*part(sizes, ctx.rank)) for _ in range(3)]
        return losses, list(trainer.get_parameters().values())

    found = run_world(len(sizes), train)
    assert found[0][0][-1] < found[0][0][0]
    for losses, parameters in found:
        assert losses == found[0][0]
        assert all(map(np.array_equal, parameters, found[0][1]))


@pytest.mark.parametrize("sizes", UNEQUAL)
def test_a_network_cut_by_layers_learns_from_the_samples_of_all_ranks(sizes: list[int]) -> None:
    """As one worker that has them all, up to float32; four workers have more than its layers."""

    def train(ctx: DistributedContext, sizes: list[int]) -> Any:
        trainer = potluck.DistributedNeuralNetTrainer(
            ctx, KINDS.MODEL_PARALLEL, batch_size=57, **SIZES
        )
        loss = trainer.train(*part(sizes, ctx.rank), epochs=5)
        ctx.barrier()
        if ctx.rank == 0:  # none of these is a collective call
            assert trainer.get_global_loss() == loss
            assert trainer.predict(X[:3]).shape == (3, 10)
            assert np.isnan(trainer.get_local_loss()) == (ctx.world_size > 1)
        return trainer.get_parameters(), trainer.predict(X), loss

    [(alone, outputs, loss)] = run_world(1, lambda ctx: train(ctx, [57]))
    for found, seen, mine in run_world(len(sizes), lambda ctx: train(ctx, sizes)):
        assert mine == pytest.approx(loss, rel=1e-4)
        np.testing.assert_allclose(seen, outputs, atol=1e-3)
        for name, each in found.items():
            np.testing.assert_allclose(each, alone[name], atol=1e-4)


def test_more_workers_than_layers_are_told(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"input_dim": 64, "hidden_dims": [8, 8], "output_dim": 10}

    def train(ctx: DistributedContext) -> None:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, KINDS.MODEL_PARALLEL, **sizes)
        assert (len(trainer.model) > 0) == (ctx.rank < 3)

    with caplog.at_level(logging.WARNING):
        run_world(4, train)
    [said] = [record.message for record in caplog.records if "layers" in record.message]
    assert "a network of 3 layers is cut for 3 of the 4 workers" in said


@pytest.mark.parametrize("strategy", [KINDS.DATA_PARALLEL, KINDS.DECENTRALIZED, KINDS.FEDERATED])
def test_the_documents_first_example_learns_alike_on_one_two_and_four_workers(
    strategy: TrainingStrategy,
) -> None:
    """Each worker passes its partition, and worker 0 asks for the loss alone."""
    mixed = order(3, 0, len(X))
    train_x, train_y, test_x, test_y = (
        each[rows] for rows in (mixed[:1400], mixed[1400:]) for each in (X, Y)
    )

    def train(ctx: DistributedContext) -> tuple[float, float]:
        partitioner = potluck.DataPartitioner(1400, ctx.world_size)
        start, end = partitioner.get_partition(ctx.rank)
        trainer = potluck.DistributedNeuralNetTrainer(
            *(ctx, strategy), input_dim=64, hidden_dims=[128, 64], output_dim=10, seed=1
        )
        loss = float("nan")
        for _ in range(8):
            trainer.train_epoch(train_x[start:end], train_y[start:end])
            if ctx.rank == 0:
                loss = trainer.get_global_loss()
        assert ctx.rank or loss < 0.3
        accuracy = (trainer.predict(test_x).argmax(axis=1) == test_y).mean()
        return float(accuracy), loss

    found = [run_world(size, train)[0][0] for size in (1, 2, 4)]
    assert min(found) > 0.94, found
    assert max(found) - min(found) < 0.025, found


@pytest.mark.parametrize(
    "aggregation",
    [
        AggregationMethod.SYNCHRONOUS,
        AggregationMethod.ASYNCHRONOUS,
        AggregationMethod.ELASTIC_AVERAGING,
        Asynchronous(max_staleness=2),
        ElasticAveraging(0.4, of="parameters"),
    ],
)
def test_a_parameter_server_aggregates_as_it_is_told(aggregation: Any) -> None:
    sizes = [800, 600]
    # Where no worker waits for the other, a busy machine lets one lead by much: more epochs.
    epochs = 6 if aggregation is AggregationMethod.SYNCHRONOUS else 15

    def train(ctx: DistributedContext) -> Any:
        with potluck.DistributedNeuralNetTrainer(
            ctx, KINDS.PARAMETER_SERVER, aggregation=aggregation, **SIZES
        ) as trainer:
            first = trainer.train_epoch(*part(sizes, ctx.rank))
            assert trainer.train(*part(sizes, ctx.rank), epochs=epochs) < first
            accuracy = (trainer.predict(X[1400:]).argmax(axis=1) == Y[1400:]).mean()
            return float(accuracy), trainer.get_parameters()

    (accuracy, mine), (_, theirs) = run_world(2, train)
    # One of ten classes; how far elastic averaging comes depends on who leads by how much.
    assert accuracy > (0.5 if aggregation is AggregationMethod.ELASTIC_AVERAGING else 0.85)
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("samples", ["own", "all"])
def test_equal_samples_on_all_ranks_are_warned_of_unless_they_are_meant(
    strategy: TrainingStrategy, samples: Any
) -> None:
    def train(ctx: DistributedContext) -> None:
        with potluck.DistributedNeuralNetTrainer(
            ctx, strategy, samples=samples, **SIZES
        ) as trainer:
            trainer.train_epoch(X[:60], Y[:60])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(2, train)
    texts = [str(each.message) for each in caught if each.category is UserWarning]
    if samples == "all":
        assert texts == []
    else:
        [text] = texts
        assert "all 2 workers pass the same 60 samples as their own" in text
        assert 'samples="all"' in text


@pytest.mark.parametrize("name", ["kmeans", "classes", "values"])
def test_equal_shards_of_clusters_and_forests_are_warned_of_once(name: str) -> None:
    def train(ctx: DistributedContext, part: int) -> None:
        X_own, Y_own = X[part:][:60], Y[part:][:60]
        trainer: Any
        if name == "kmeans":
            trainer = potluck.DistributedKMeansTrainer(ctx, 4, random_state=0)
        else:
            task = "classification" if name == "classes" else "regression"
            trainer = potluck.DistributedRandomForestTrainer(ctx, 4, task=task, random_state=0)
        for _ in range(2):
            trainer.train_epoch(X_own, Y_own)

    run_world(2, lambda ctx: train(ctx, 60 * ctx.rank))  # warnings are errors
    run_world(1, lambda ctx: train(ctx, 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(2, lambda ctx: train(ctx, 0))
    [text] = [str(each.message) for each in caught if each.category is UserWarning]
    assert "all 2 workers pass the same 60 samples as their own" in text
    assert text.endswith("pass each worker its part (potluck.DataPartitioner)")


def test_parts_that_differ_in_one_label_are_no_equal_samples() -> None:
    def train(ctx: DistributedContext) -> None:
        mine = Y[:60].copy()
        mine[59] = (mine[59] + ctx.rank) % 10
        potluck.DistributedNeuralNetTrainer(ctx, **SIZES).train_epoch(X[:60], mine)

    run_world(2, train)  # warnings are errors


@pytest.mark.parametrize("strategy", KINDS)
def test_ranks_with_other_kinds_of_targets_are_refused_on_all(strategy: TrainingStrategy) -> None:
    def train(ctx: DistributedContext) -> None:
        targets = Y[:60] if ctx.rank == 0 else np.eye(10)[Y[60:120]]
        trainer = potluck.DistributedNeuralNetTrainer(ctx, strategy, **SIZES)
        with pytest.raises(ValueError, match="are of another shape or dtype, or have another kind"):
            trainer.train_epoch(X[60 * ctx.rank :][:60], targets)

    run_world(2, train)


BAD: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "unlike numbers": lambda x, y: (x, y[:-1]),
    "no targets": lambda x, y: (x, None),
    "labels that are NaN": lambda x, y: (x, np.full((len(x), 10), np.nan)),
    "another width": lambda x, y: (x[:, :5], y),
    "text": lambda x, y: (np.full(x.shape, "a"), y),
}


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("bad", BAD)
def test_bad_samples_of_one_worker_end_all_and_none_trains_on_alone(
    strategy: TrainingStrategy, bad: str
) -> None:
    """In a group that goes on without a worker that is lost."""

    def train(ctx: MortalContext) -> None:
        mine = part([60, 60, 60], ctx.rank)
        if ctx.group.me.worker == "1":
            mine = BAD[bad](*mine)
        with potluck.DistributedNeuralNetTrainer(ctx, strategy, **SIZES) as trainer:
            trainer.train(*mine, epochs=3)

    world = ElasticWorld(3, train)
    with pytest.raises((ValueError, TypeError, RemoteError)):
        world.run(limit_s=60)
    assert set(world.errors) == {"0", "1", "2"}
    assert not world.results
    for error in world.errors.values():
        assert isinstance(error, ValueError | TypeError | RemoteError)


def test_a_worker_without_any_sample_takes_part_and_all_empty_is_one_error() -> None:
    def train(ctx: DistributedContext) -> None:
        trainer = potluck.DistributedNeuralNetTrainer(ctx, KINDS.FEDERATED, **SIZES)
        with pytest.raises(ValueError, match="no worker has a sample"):
            trainer.train_epoch(X[:0], Y[:0])

    run_world(2, train)


@pytest.mark.parametrize("strategy", KINDS)
def test_a_loss_that_is_nan_on_one_rank_ends_all_soon(strategy: TrainingStrategy) -> None:
    def broken(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(found, wanted) * float("nan")

    def train(ctx: DistributedContext) -> None:
        loss = broken if ctx.rank == ctx.world_size - 1 else None
        with potluck.DistributedNeuralNetTrainer(ctx, strategy, loss=loss, **SIZES) as trainer:
            trainer.train(*part([200, 200, 200], ctx.rank), epochs=3)

    with pytest.raises(WorldError) as caught:
        run_world(3, train, timeout_s=60)
    errors = caught.value.errors
    assert isinstance(errors[2], ValueError)
    assert all(isinstance(errors[rank], RemoteError) for rank in (0, 1)), errors
    assert all("rank 2" in str(each) for each in errors.values())


def test_the_samples_of_a_lost_worker_leave_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """The survivors end with the parameters of two workers that had only their parts, if the third
    is lost before its first step counts."""
    sizes = [50, 30, 70]

    def train(ctx: MortalContext) -> Any:
        worker = int(ctx.group.me.worker)
        trainer = potluck.DistributedNeuralNetTrainer(ctx, samples="own", **SIZES)
        trainer.train(*part(sizes, worker), epochs=2)
        return trainer.get_parameters(), trainer.get_local_loss()

    with caplog.at_level(logging.WARNING):
        world = ElasticWorld(3, train, dies=lambda worker, _, at: (worker, at) == ("1", 13))
        results = world.run()
    assert set(results) == {"0", "2"}
    assert any("30 samples left with a lost worker" in each.message for each in caplog.records)
    one, two = results["0"][0], results["2"][0]
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("aggregation", AggregationMethod)
@pytest.mark.parametrize("dead", ["0", "2"])
def test_training_by_a_server_goes_on_without_a_worker(
    aggregation: AggregationMethod, dead: str
) -> None:
    """Also without the one that kept the parameters."""
    steps: dict[str, int] = {}

    def train(ctx: MortalContext) -> Any:
        me = ctx.group.me.worker

        def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            steps[me] = steps.get(me, 0) + 1
            if (me, steps[me]) == (dead, 12):
                ctx.die()
            return F.cross_entropy(found, wanted)

        trainer = potluck.DistributedNeuralNetTrainer(
            *(ctx, KINDS.PARAMETER_SERVER), loss=loss, aggregation=aggregation, **SIZES
        )
        value = trainer.train(*part([500, 400, 500], int(me)), epochs=4)
        trainer.close()
        accuracy = (trainer.predict(X[1400:]).argmax(axis=1) == Y[1400:]).mean()
        return value, float(accuracy), trainer.get_parameters()

    results = ElasticWorld(3, train, dies=lambda *_: False).run(limit_s=120)
    assert set(results) == {"0", "1", "2"} - {dead}
    one, two = results.values()
    assert one[0] == two[0]
    assert one[1] > (0.3 if aggregation is AggregationMethod.ELASTIC_AVERAGING else 0.7)
    assert all(np.array_equal(one[2][name], two[2][name]) for name in one[2])


class Normed(nn.Module):
    """Has buffers, and a counter among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize("strategy", [each for each in KINDS if each is not KINDS.MODEL_PARALLEL])
def test_a_model_with_buffers_is_trained_and_predicts_alike_on_all(
    strategy: TrainingStrategy,
) -> None:
    def train(ctx: DistributedContext) -> Any:
        torch.manual_seed(ctx.rank)
        with potluck.DistributedNeuralNetTrainer(ctx, strategy, model=Normed()) as trainer:
            trainer.train(*part([800, 597], ctx.rank), epochs=4)
            assert trainer.model.training
            return trainer.predict(X[1397:])

    one, two = run_world(2, train)
    np.testing.assert_array_equal(one, two)
    assert (one.argmax(axis=1) == Y[1397:]).mean() > 0.85


@pytest.mark.parametrize("strategy", KINDS)
def test_samples_in_files_train_as_those_in_memory(
    strategy: TrainingStrategy, tmp_path: Path
) -> None:
    """Each worker has its own files, which are read in pieces of 50 rows."""
    sizes = [300, 170]

    def train(ctx: DistributedContext) -> Any:
        x, y = part(sizes, ctx.rank)
        folder = tmp_path / strategy.name / str(ctx.rank)
        folder.mkdir(parents=True)
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        files = {"x": folder / "x.npy", "y": folder / "y.npy"}
        source = NumpyFiles(files, rows_per_shard=50)
        with potluck.DistributedNeuralNetTrainer(ctx, strategy, **SIZES) as trainer:
            first = trainer.train_epoch(source)
            assert trainer.train(source, epochs=5) < first / 1.5
        return trainer.get_parameters()

    one, two = run_world(2, train)
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("strategy", KINDS)
def test_files_are_read_ahead_of_the_steps(
    strategy: TrainingStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first step a rank waits for a third shard: it needs one, and has hashed the first."""
    loaded: set[int] = set()
    third = threading.Event()
    waited: list[bool] = []
    load = NumpyFiles.load

    def noted(self: NumpyFiles, shard: int) -> Any:
        found = load(self, shard)
        loaded.add(shard)
        if len(loaded) == 3:
            third.set()
        return found

    def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if not waited:
            waited.append(third.wait(20))
        return F.cross_entropy(found, wanted)

    def train(ctx: DistributedContext) -> None:
        np.save(tmp_path / "x.npy", X[:100])
        np.save(tmp_path / "y.npy", Y[:100])
        files = {"x": tmp_path / "x.npy", "y": tmp_path / "y.npy"}
        source = NumpyFiles(files, rows_per_shard=10, lanes=1)
        with potluck.DistributedNeuralNetTrainer(
            ctx, strategy, batch_size=10, loss=loss, **SIZES
        ) as trainer:
            trainer.train_epoch(source)

    monkeypatch.setattr(NumpyFiles, "load", noted)
    run_world(1, train)
    assert waited == [True]


def test_each_row_of_the_files_is_read_once_per_epoch(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'potluck[data]'")
    from pyarrow import parquet

    seen: dict[int, list[int]] = {0: [], 1: []}

    def train(ctx: DistributedContext) -> None:
        num = (90, 41)[ctx.rank]
        path = tmp_path / f"{ctx.rank}.parquet"
        rows = {"features": list(X[:num]), "label": list(range(num))}
        parquet.write_table(pyarrow.table(rows), path, row_group_size=20)

        def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            seen[ctx.rank] += wanted.tolist()
            return found.square().mean()

        source = ParquetFiles(path, columns=["features", "label"])
        trainer = potluck.DistributedNeuralNetTrainer(
            ctx, batch_size=20, model=nn.Linear(64, 1), loss=loss
        )
        trainer.train_epoch(source)
        with pytest.raises((ValueError, RemoteError), match="leave y out"):
            trainer.train_epoch(source, X[:90])

    run_world(2, train)

    def ask(ctx: DistributedContext) -> None:
        with pytest.raises(ValueError, match="is the columns features, not inputs and targets"):
            other = ParquetFiles(tmp_path / "0.parquet", columns=["features"])
            potluck.DistributedNeuralNetTrainer(ctx, **SIZES).train_epoch(other)

    run_world(1, ask)
    assert sorted(seen[0]) == list(range(90))
    assert sorted(seen[1]) == list(range(41))


def test_what_a_trainer_can_not_mean_is_refused_when_it_is_made() -> None:
    def make(ctx: DistributedContext) -> None:
        refused: list[tuple[TrainingStrategy, dict[str, Any], type[Exception], str]] = [
            (KINDS.DATA_PARALLEL, {}, TypeError, "or model= for one of your own"),
            (KINDS.DATA_PARALLEL, {"model": 3}, TypeError, "must be a torch.nn.Module"),
            (KINDS.DATA_PARALLEL, {"model": Normed(), "input_dim": 3}, ValueError, "not both"),
            (KINDS.MODEL_PARALLEL, {"model": Normed()}, ValueError, "cuts the trainer's own"),
            (KINDS.DATA_PARALLEL, SIZES | {"samples": "mine"}, ValueError, "pass .own. if each"),
            (KINDS.DATA_PARALLEL, SIZES | {"device": "cudaa"}, ValueError, "can't be used on this"),
            (
                KINDS.DATA_PARALLEL,
                SIZES | {"aggregation": Asynchronous()},
                ValueError,
                "aggregation is for PARAMETER_SERVER",
            ),
            (KINDS.PARAMETER_SERVER, SIZES | {"aggregation": "async"}, TypeError, "pass a potluck"),
            (
                KINDS.PARAMETER_SERVER,
                SIZES | {"aggregation": Synchronous(automatic=False)},
                ValueError,
                "leave automatic=False out",
            ),
        ]
        for strategy, options, error, why in refused:
            with pytest.raises(error, match=why):
                potluck.DistributedNeuralNetTrainer(ctx, strategy, **options)
        trainer = potluck.DistributedNeuralNetTrainer(ctx, device="cpu", **SIZES)
        assert trainer.train_epoch(X[:50], Y[:50]) > 0

    run_world(1, make)


def test_one_rank_reads_losses_parameters_and_predictions_alone() -> None:
    """None of these is a collective call, by any strategy."""

    def train(ctx: DistributedContext) -> None:
        for strategy in KINDS:
            with potluck.DistributedNeuralNetTrainer(ctx, strategy, **SIZES) as trainer:
                loss = trainer.train_epoch(*part([100, 80], ctx.rank))
                if ctx.rank == 1:
                    assert trainer.get_global_loss() == loss
                    trainer.get_local_loss()
                    before = copy.deepcopy(trainer.get_parameters())
                    assert trainer.predict(X[:2]).shape == (2, 10)
                    trainer.set_parameters(before)
        clusters = potluck.DistributedKMeansTrainer(ctx, 4, random_state=0)
        clusters.train_epoch(part([100, 80], ctx.rank)[0])
        forest = potluck.DistributedRandomForestTrainer(ctx, 4)
        forest.train_epoch(*part([100, 80], ctx.rank))
        if ctx.rank == 1:
            for each in (clusters, forest):
                assert each.get_global_loss() > 0
                each.get_local_loss()
                each.get_parameters()
                each.predict(X[:2])
            clusters.get_centroids()
        ctx.barrier()

    run_world(2, train)


@pytest.mark.parametrize("strategy", KINDS)
def test_a_worker_without_samples_takes_part_and_counts_nothing(
    strategy: TrainingStrategy,
) -> None:
    """Also rank 0, whose weights all begin with."""
    sizes = [0, 70, 40]

    def train(ctx: DistributedContext) -> Any:
        with potluck.DistributedNeuralNetTrainer(ctx, strategy, **SIZES) as trainer:
            first = trainer.train_epoch(*part(sizes, ctx.rank))
            assert trainer.train(*part(sizes, ctx.rank), epochs=9) < first
            assert ctx.rank or np.isnan(trainer.get_local_loss())
            return trainer.get_global_loss(), trainer.get_parameters()

    found = run_world(3, train)
    for loss, parameters in found:
        assert loss == found[0][0]
        assert all(np.array_equal(parameters[name], found[0][1][name]) for name in parameters)


@pytest.mark.parametrize("strategy", [each for each in KINDS if each is not KINDS.MODEL_PARALLEL])
def test_a_worker_that_joins_brings_its_samples(
    strategy: TrainingStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    joined: list[str] = []

    def train(ctx: MortalContext) -> Any:
        me = int(ctx.group.me.worker)
        steps = 0

        def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            nonlocal steps
            steps += 1
            if (me, steps) == (0, 6):
                joined.append(world.join())
            return F.cross_entropy(found, wanted)

        with potluck.DistributedNeuralNetTrainer(ctx, strategy, loss=loss, **SIZES) as trainer:
            value = trainer.train(*part([400, 300, 200], me), epochs=5)
            return value, steps, trainer.get_parameters()

    with caplog.at_level(logging.WARNING):
        world = ElasticWorld(2, train)
        results = world.run(limit_s=120)
    assert joined == ["2"]
    assert set(results) == {"0", "1", "2"}
    assert any("200 samples came with a worker" in each.message for each in caplog.records)
    for value, steps, parameters in results.values():
        assert value == results["0"][0]
        assert steps > 0
        assert all(np.array_equal(parameters[n], results["0"][2][n]) for n in parameters)
