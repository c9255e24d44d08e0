"""Samples that are loaded ahead, and data in shards: the same training, whoever comes or goes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.checkpoint.store import CheckpointStore
from potluck.data import ParquetFiles, ShardedDataset
from potluck.errors import ConfigurationError, DataError, RemoteError
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, ElasticLoop
from potluck.torch.loading import _as_tensor
from potluck.training.elastic import Policy
from potluck.training.strategies import LocalSGD

NUM_SAMPLES = 60


class Numbers(Dataset[tuple[int, int]]):
    """Sample ``i`` is (i, the process that loaded it)."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class Shards(ShardedDataset):
    """The same in shards of 1 to 14 samples; notes which ones are read."""

    def __init__(self, **options: Any) -> None:
        super().__init__([1, 14, 5, 10, 10, 7, 13], **options)
        self.reads: list[int] = []

    def read(self, shard: int) -> dict[str, Any]:
        self.reads.append(shard)
        start = sum(self.sizes[:shard])
        return {"index": np.arange(start, start + self.sizes[shard])}


class Counts:
    """How often each sample was committed: a part of the training's state."""

    def __init__(self) -> None:
        self.counts = np.zeros(NUM_SAMPLES)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts[:] = state["counts"]


class Training:
    """Counts the samples of every committed step."""

    def __init__(self, ctx: DistributedContext, dataset: Any, **options: Any) -> None:
        self.ctx = ctx
        self.seen = Counts()
        self.pids: set[int] = set()
        self.orders: list[list[int]] = []
        model = DDP(nn.Linear(1, 1).double(), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.job = ElasticLoop(
            model,
            optimizer,
            dataset,
            batch_size=8,
            epochs=options.pop("epochs", 2),
            seed=5,
            also={"seen": self.seen},
            policy=Policy(hash_every=1, save_every=3, recovery_s=60),
            **options,
        )

    def run(self, on_step: Callable[[Training], None] = lambda training: None) -> Training:
        for batch in self.job:
            with self.job.step():
                indices = batch["index"] if isinstance(batch, dict) else batch[0]
                if not isinstance(batch, dict):
                    self.pids |= set(batch[1].tolist())
                on_step(self)
                mine = np.zeros(NUM_SAMPLES)
                if self.job._share is not None and self.job._share.weight:
                    mine[indices.numpy()] += 1
                self.ctx.all_reduce(mine)
                self.job.commit()
                self.seen.counts += mine
                self.orders.append(indices.tolist())
        return self


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers, Shards])
def test_a_loop_that_is_iterated_again_after_a_break_has_its_loader(
    dataset: Any, num_workers: int
) -> None:
    with DistributedContext(LocalBackend()) as ctx:
        training = Training(ctx, dataset(), num_workers=num_workers)
        job = training.job
        for _ in job:
            with job.step():
                job.commit()
            break
        training.run()
        assert job.done
        assert job.committed == 2 * NUM_SAMPLES
        assert len(training.orders) == job.step_number - 1
        if num_workers and training.pids:
            assert os.getpid() not in training.pids


def test_arrays_of_another_byte_order_are_tensors() -> None:
    column = np.arange(6, dtype=">f4").reshape(3, 2)
    np.testing.assert_array_equal(_as_tensor(column).numpy(), column)
    assert _as_tensor(column[::2, ::-1]).tolist() == [[1, 0], [5, 4]]


def alone(dataset: Any, **options: Any) -> Training:
    with DistributedContext(LocalBackend()) as ctx:
        return Training(ctx, dataset, **options).run()


@pytest.mark.parametrize("dataset", [Numbers, Shards])
def test_workers_load_the_samples_that_the_loop_would_load(dataset: Any) -> None:
    here, ahead = alone(dataset()), alone(dataset(), num_workers=2, prefetch=3)
    assert here.orders == ahead.orders
    assert set(here.seen.counts) == set(ahead.seen.counts) == {2}
    if dataset is Numbers:
        assert here.pids == {os.getpid()}
        assert len(ahead.pids) == 2
        assert os.getpid() not in ahead.pids


@pytest.mark.parametrize(("dataset", "num_workers"), [(Numbers, 2), (Shards, 0), (Shards, 1)])
def test_a_death_and_a_join_leave_each_sample_counted_once(dataset: Any, num_workers: int) -> None:
    """What was loaded ahead for the old group is thrown away."""
    world: ElasticWorld[Training]
    all_are_there = threading.Barrier(3)

    def work(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if training.job.step_number == 5 and ctx.world_size == 3:
                all_are_there.wait(60)
                if ctx.backend.worker == "1":
                    ctx.die()
            if training.job.step_number == 8 and ctx.backend.worker == "0":
                world.join()

        return Training(ctx, dataset(), num_workers=num_workers).run(on_step)

    world = ElasticWorld(3, work)
    results = world.run()
    assert sorted(results) == ["0", "2", "3"]
    for training in results.values():
        assert set(training.seen.counts) == {2}


def test_steps_of_a_round_are_loaded_ahead_too() -> None:
    def trained(num_workers: int) -> list[list[int]]:
        with DistributedContext(LocalBackend()) as ctx:
            model = DDP(nn.Linear(1, 1).double(), ctx)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            options: dict[str, Any] = {"batch_size": 8, "num_workers": num_workers}
            job = ElasticLoop(model, optimizer, Shards(), strategy=LocalSGD(every=3), **options)
            orders = []
            for batch in job:
                with job.step():
                    orders.append(batch["index"].tolist())
                    model(torch.ones(1, 1).double()).sum().backward()
                    optimizer.step()
            return orders

    here = trained(0)
    assert here == trained(1)
    assert sorted(index for batch in here for index in batch) == list(range(NUM_SAMPLES))


def test_each_rank_reads_the_shards_of_its_own_lanes() -> None:
    datasets = [Even(lanes=2), Even(lanes=2)]
    run_world(2, lambda ctx: Training(ctx, datasets[ctx.rank], epochs=1).run())
    assert sorted([*datasets[0].reads, *datasets[1].reads]) == list(range(6))


class Even(Shards):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        ShardedDataset.__init__(self, [10] * 6, **options)


def test_a_sample_that_can_not_be_loaded_ends_the_training_on_all_ranks() -> None:
    class Torn(Shards):
        def read(self, shard: int) -> dict[str, Any]:
            if shard == 3:
                raise OSError("bad sector 17")
            return super().read(shard)

    with pytest.raises(WorldError) as raised:
        run_world(2, lambda ctx: Training(ctx, Torn()).run())
    errors = list(raised.value.errors.values())
    assert any(isinstance(each, DataError) for each in errors)
    for error in errors:
        assert isinstance(error, DataError | RemoteError)
        assert "shard 3 of Torn can't be read: OSError: bad sector 17" in str(error)


def test_an_error_in_a_worker_says_where_it_was_raised() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> tuple[int, int]:
            if index == 30:
                raise ValueError("sample 30 has no label")
            return super().__getitem__(index)

    with pytest.raises(ValueError, match="sample 30 has no label"):
        alone(Broken(), num_workers=2)


def test_a_training_resumes_in_its_shards_and_not_in_others(tmp_path: Path) -> None:
    def stopped(training: Training) -> None:
        if training.job.step_number == 6:
            training.job.stop()

    with DistributedContext(LocalBackend()) as ctx:
        Training(ctx, Shards(), checkpoint=CheckpointStore(tmp_path / "a")).run(stopped)
    with pytest.raises(ConfigurationError, match=r"shuffled with seed 5, in shards \(fingerprint"):
        alone(Even(), checkpoint=CheckpointStore(tmp_path / "a"))
    with pytest.raises(
        ConfigurationError, match=r"this training is on 60 samples shuffled with seed 5: pass"
    ):
        alone(Numbers(), checkpoint=CheckpointStore(tmp_path / "a"))


def test_a_transform_runs_in_the_workers(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pa.table({"index": pa.array(range(NUM_SAMPLES))})
    parquet.write_table(rows, tmp_path / "a.parquet", row_group_size=7)
    data = ParquetFiles(tmp_path, transform=lambda row: (row["index"], os.getpid()))
    found = alone(data, num_workers=2)
    assert set(found.seen.counts) == {2}
    assert os.getpid() not in found.pids


def test_data_sets_of_hugging_face_are_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # a thread that stays
    datasets.Dataset.from_dict({"index": list(range(NUM_SAMPLES))}).save_to_disk(tmp_path)
    data = datasets.load_from_disk(tmp_path).with_format("torch")
    assert set(alone(data, num_workers=1).seen.counts) == {2}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_workers": -1}, "num_workers is -1; it must be a whole number from 0 on"),
        ({"num_workers": 1.5}, "num_workers is 1.5"),
        ({"num_workers": 2, "prefetch": 0}, "prefetch is 0; it must be a whole number from 1 on"),
    ],
)
def test_options_that_can_not_be(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        alone(Numbers(), **options)
