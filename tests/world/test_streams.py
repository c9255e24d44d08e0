"""Streams without a length: the training of one rank on their items, whoever comes or goes."""

from __future__ import annotations

import gc
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.errors import ConfigurationError, DataError, RemoteError
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, ElasticLoop, NoiseBatching, Policy, ProportionalShares
from potluck.training.strategies import LocalSGD

NUM = 61
SIZE = 8


class Numbers(IterableDataset[int]):
    """Begins again, and can't seek. Its worker processes would share its items."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(NUM)[slice(None) if info is None else slice(info.id, None, 2)]


class Stateful(IterableDataset[int]):
    """Can seek, as torchdata's loader wants it."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:  # a hint, as some have
        return NUM

    def __iter__(self) -> Iterator[int]:
        while self.at < NUM:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def from_position(position: int) -> Iterator[int]:
    return iter(range(position, NUM))


class Counts:
    """How often each item was committed: a part of the training's state."""

    def __init__(self) -> None:
        self.counts = np.zeros(NUM)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts[:] = state["counts"]


class Training:
    """A regression whose sample is a number; counts those of every committed step."""

    def __init__(self, ctx: DistributedContext, stream: Any, **options: Any) -> None:
        self.ctx = ctx
        self.seen = Counts()
        self.epochs_ended: list[int] = []
        model = nn.Linear(2, 1).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        self.model = DDP(model, ctx)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if not {"epochs", "max_steps"} & options.keys():
            options["epochs"] = 2
        self.job = ElasticLoop(
            self.model,
            self.optimizer,
            stream,
            batch_size=options.pop("batch_size", SIZE),
            also={"seen": self.seen},
            policy=options.pop("policy", Policy(hash_every=1, save_every=3, recovery_s=60)),
            callbacks=[lambda epoch, loss: self.epochs_ended.append(epoch)],
            **options,
        )

    def run(self, on_step: Callable[[Training], None] = lambda training: None) -> Training:
        for items in self.job:
            with self.job.step():
                on_step(self)
                self.optimizer.zero_grad()
                loss = loss_of(self.model, items)
                loss.backward()
                mine = np.zeros(NUM)
                if self.job.num_samples:
                    mine[items.numpy()] += 1
                self.ctx.all_reduce(mine)
                self.job.log(loss=loss)
                self.optimizer.step()
                self.seen.counts += mine
        return self


def loss_of(model: nn.Module, items: torch.Tensor) -> torch.Tensor:
    x = torch.stack([torch.sin(items.double()), torch.cos(3.0 * items)], 1).double()
    return (model(x)[:, 0] - items / NUM).square().mean()


def plain_torch(epochs: int = 2, size: int = SIZE) -> tuple[list[float], nn.Module]:
    """The same training, without a line of potluck."""
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(epochs):
        for items in torch.arange(NUM).split(size):
            optimizer.zero_grad()
            loss = loss_of(model, items)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


def alone(stream: Any, **options: Any) -> Training:
    with DistributedContext(LocalBackend()) as ctx:
        return Training(ctx, stream, **options).run()


def events_of(world_size: int, work: Callable[[DistributedContext], Any]) -> list[str]:
    """The events that the ranks of a world report."""
    events: list[str] = []

    def run(ctx: DistributedContext) -> None:
        report = ctx.report
        ctx.report = lambda *args, **facts: (  # type: ignore[method-assign]
            events.append(facts["event"]) if "event" in facts else None,
            report(*args, **facts),
        )[1]
        work(ctx)

    run_world(world_size, run)
    return events


SOURCES = [Numbers, Stateful, lambda: from_position, lambda: lambda: iter(range(NUM))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
@pytest.mark.parametrize("source", SOURCES)
def test_many_workers_train_as_one_on_all_items(world_size: int, source: Any) -> None:
    """The last batch of an epoch has 5 items, so among nine ranks some have none."""
    losses, right = plain_torch()
    for training in run_world(world_size, lambda ctx: Training(ctx, source()).run()):
        assert training.job.losses == pytest.approx(losses, rel=1e-9)
        assert training.epochs_ended == [0, 1]
        assert set(training.seen.counts) == {2}
        assert training.job.committed == training.job.schedule.total == 2 * NUM
        for mine, expected in zip(training.model.parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def test_a_batch_that_ends_with_the_stream_is_the_last_of_its_epoch() -> None:
    training = alone(lambda: iter(range(NUM)[:16]), epochs=3)
    assert training.epochs_ended == [0, 1, 2]
    assert training.job.step_number == 6


@pytest.mark.parametrize("source", [Numbers, Stateful])
def test_worker_processes_have_each_item_once(source: Any) -> None:
    """The stream is read by the training's process; workers collate."""
    for training in run_world(2, lambda ctx: Training(ctx, source(), num_workers=2).run()):
        assert set(training.seen.counts) == {2}


def test_worker_processes_collate_ahead_and_start_once_an_epoch() -> None:
    with DistributedContext(LocalBackend()) as ctx:
        training = Training(ctx, Numbers(), num_workers=1, prefetch=3)
        starts = 0
        restart = training.job._loader._restart

        def counted(shares: Any) -> None:
            nonlocal starts
            starts += 1
            restart(shares)

        training.job._loader._restart = counted  # type: ignore[method-assign]
        training.run()
    assert set(training.seen.counts) == {2}
    assert starts == 2  # one for each epoch


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("source", SOURCES)
def test_a_death_and_a_join_leave_each_item_counted_once(source: Any, num_workers: int) -> None:
    """A dead worker's items are held by the others. All these sources begin again alike."""
    losses, _ = plain_torch()
    world: ElasticWorld[Training]
    all_are_there = threading.Barrier(3)

    def work(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if training.job.step_number == 5 and ctx.world_size == 3:
                all_are_there.wait(60)
                if ctx.backend.worker == "1":
                    ctx.die()
            if training.job.step_number == 10 and ctx.backend.worker == "0":
                world.join()

        return Training(ctx, source(), num_workers=num_workers).run(on_step)

    world = ElasticWorld(3, work)
    results = world.run()
    assert sorted(results) == ["0", "2", "3"]
    for training in results.values():
        assert set(training.seen.counts) == {2}
        told = training.job.losses
        assert told == pytest.approx(losses[-len(told) :], rel=1e-9)
    assert results["0"].job.num_reruns == 1
    assert len(results["3"].job.losses) < 16


@pytest.mark.parametrize("moment", range(3, 60, 4))
def test_a_death_anywhere_leaves_each_item_counted_once(moment: int) -> None:
    results = ElasticWorld(
        3,
        lambda ctx: Training(ctx, iter(range(NUM)), epochs=1).run(),
        dies=lambda worker, name, number: worker == "2" and number == moment,
    ).run()
    for training in results.values():
        assert set(training.seen.counts) == {1}
        assert training.epochs_ended == [0]


def test_shares_by_speed_are_parts_of_the_batch() -> None:
    def work(ctx: DistributedContext) -> Training:
        def slow(training: Training) -> None:  # hours, beside which no pause shows
            training.job._began -= 3600 * training.job.num_samples * (1 + 4 * ctx.rank)

        policy = Policy(shares=ProportionalShares(window=2), adapt_every=2)
        return Training(ctx, Numbers(), policy=policy, epochs=3).run(slow)

    losses, _ = plain_torch(epochs=3)
    results = run_world(2, work)
    for training in results:
        assert set(training.seen.counts) == {3}
        assert training.job.losses == pytest.approx(losses, rel=1e-9)
    fast, slow = results[0].job.shares
    assert fast > slow


def test_a_batch_that_grows_takes_the_next_items() -> None:
    """Not all of them were read ahead."""

    def work(ctx: DistributedContext) -> Training:
        def grow(training: Training) -> None:
            training.job._training.progress.batch_size = 4 + 3 * training.job.step_number

        policy = Policy(batching=NoiseBatching(min_batch=4, max_batch=30), adapt_every=100)
        return Training(ctx, Stateful(), policy=policy, batch_size=4, num_workers=1).run(grow)

    for training in run_world(2, work):
        assert set(training.seen.counts) == {2}
        assert training.job.step_number < 12


def test_the_epoch_ends_for_all_where_the_shortest_stream_does() -> None:
    results: list[Training] = []

    def work(ctx: DistributedContext) -> None:
        num = 20 if ctx.rank == 1 else NUM
        results.append(Training(ctx, lambda: iter(range(num)), epochs=2).run())

    events = events_of(3, work)
    assert {training.job.committed for training in results} == {40}
    assert {len(training.job.losses) for training in results} == {6}
    assert len(events) == 3
    for event in events:
        assert "rank 1" in event
        assert "ends after 20 items, so the epoch ends for all: give all ranks the same" in event


def test_a_stream_that_is_split_by_rank_is_named() -> None:
    def work(ctx: DistributedContext) -> None:
        items = range(NUM)[ctx.rank :: ctx.world_size]
        Training(ctx, lambda: iter(items), epochs=1).run()

    events = events_of(2, work)
    named = [event for event in events if "has another item 0, so some are never trained" in event]
    assert len(named) == 2
    assert "give all ranks the same stream in the same order, not split by rank" in named[0]


def test_an_empty_stream_is_an_error_on_all_ranks() -> None:
    with pytest.raises(WorldError) as raised:
        run_world(2, lambda ctx: Training(ctx, lambda: iter(())).run())
    for error in raised.value.errors.values():
        assert "the stream has no item 0 in epoch 0: it is empty" in str(error)


def test_an_iterator_has_one_epoch() -> None:
    assert set(alone(iter(range(NUM)), epochs=1).seen.counts) == {1}
    with pytest.raises(DataError, match=r"no item 0 in epoch 1.* \(pass a function that returns"):
        alone(iter(range(NUM)))


def test_a_stream_that_raises_on_one_rank_ends_the_training_on_all() -> None:
    def torn() -> Iterator[int]:
        yield from range(30)
        raise OSError("connection reset")

    with pytest.raises(WorldError) as raised:
        run_world(3, lambda ctx: Training(ctx, torn if ctx.rank == 1 else Numbers()).run())
    errors = raised.value.errors
    assert isinstance(errors[1], DataError)
    assert isinstance(errors[0], RemoteError)
    for error in errors.values():
        assert "item 30 of the stream can't be read: OSError: connection reset" in str(error)


def test_an_endless_stream_trains_for_max_steps_and_goes_on_later(tmp_path: Path) -> None:
    opened: list[int] = []

    def endless(position: int) -> Iterator[int]:
        opened.append(position)
        return (each % NUM for each in itertools.count(position))

    folder = str(tmp_path)
    first = alone(endless, max_steps=7, checkpoint=folder)
    assert (first.job.step_number, first.job.committed) == (7, 56)
    assert first.job.schedule.aim == 0
    again = alone(endless, max_steps=7, checkpoint=folder)
    assert not again.job.losses
    later = alone(endless, max_steps=10, checkpoint=folder)
    assert len(later.job.losses) == 3
    assert later.seen.counts.sum() == 80
    assert opened == [0, 56]
    with pytest.raises(ConfigurationError, match="a training on a stream; this training is on 8 "):
        alone(list(range(8)), checkpoint=folder)
    alone(list(range(8)), checkpoint=str(tmp_path / "b"))
    with pytest.raises(ConfigurationError, match=r"on 8 samples.*; this training is on a stream:"):
        alone(endless, max_steps=10, checkpoint=str(tmp_path / "b"))


def test_steps_can_be_bounded_with_any_data_set() -> None:
    job = alone(list(range(NUM)), max_steps=3).job
    assert (job.step_number, job.committed, job.done) == (3, 24, True)


@pytest.mark.parametrize("stop", [3, 8, 11])
@pytest.mark.parametrize("source", SOURCES)
def test_a_training_resumes_at_the_counted_item(tmp_path: Path, source: Any, stop: int) -> None:
    """Step 8 is the last of the first epoch."""
    folder = str(tmp_path)
    run_world(2, lambda ctx: Training(ctx, source(), max_steps=stop, checkpoint=folder).run())
    results: list[Training] = []

    def resumed(ctx: DistributedContext) -> None:
        results.append(Training(ctx, source(), epochs=2, checkpoint=folder).run())

    events = events_of(3, resumed)
    for training in results:
        assert set(training.seen.counts) == {2}
        assert len(training.job.losses) == 16 - stop
    said = [event for event in events if "its first" in event]
    can_seek = source is Stateful or source() is from_position
    assert len(said) == (0 if can_seek or stop == 8 else 3)


def test_streams_of_hugging_face_seek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those with a shuffle buffer, which is not in their state: these are read again."""
    datasets = pytest.importorskip("datasets", reason="pip install 'potluck[ecosystem]'")
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # a thread that stays
    for part in range(3):
        rows = [json.dumps({"item": item}) for item in range(NUM)[part::3]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(rows))
    files = {"data_files": str(tmp_path / "*.jsonl"), "cache_dir": str(tmp_path / "cache")}

    def stream() -> Any:
        return datasets.load_dataset("json", split="train", streaming=True, **files)

    def trained(make: Callable[[], Any], folder: str) -> list[str]:
        events: list[str] = []
        for last in ({"max_steps": 5}, {"max_steps": 11}, {"epochs": 2}):

            def work(ctx: DistributedContext, last: Any = last) -> None:
                checkpoint = str(tmp_path / folder)
                training = Training(ctx, make(), collate=items, checkpoint=checkpoint, **last).run()
                assert "epochs" not in last or set(training.seen.counts) == {2}

            events += events_of(1, work)
        gc.collect()  # the memory that a stream shares with torch's workers
        return [event for event in events if event.startswith("the stream")]

    def items(rows: list[dict[str, int]]) -> torch.Tensor:
        return torch.tensor([row["item"] for row in rows])

    assert trained(stream, "plain") == []
    again = trained(lambda: lambda: stream().shuffle(seed=1, buffer_size=20), "again")
    assert len(again) == 2
    assert "the stream can't seek" in again[0]


@pytest.mark.parametrize(
    ("source", "options", "error", "why"),
    [
        (Numbers(), {}, ValueError, "pass max_steps=, the number of steps .* or epochs=1 if"),
        (Numbers(), {"epochs": 1, "samples": "own"}, ValueError, "leave samples='own' out"),
        (
            Numbers(),
            {"epochs": 1, "strategy": LocalSGD(every=2)},
            ValueError,
            "leave strategy= out",
        ),
        (
            (torch.arange(9),),
            {"max_steps": 2, "strategy": LocalSGD(every=2)},
            ValueError,
            "leave strat",
        ),
        (Numbers(), {"max_steps": 0}, ValueError, "max_steps is 0; it must be at least 1"),
        (Numbers(), {"max_steps": 1.5}, TypeError, "max_steps is 1.5; it must be a whole number"),
        (
            Numbers,
            {"epochs": 1},
            TypeError,
            "type is no map-style data set|ABCMeta is no map-style",
        ),
        ({"train": Numbers()}, {"epochs": 1}, TypeError, "of a dict of data sets, pass one"),
    ],
)
def test_what_is_refused(source: Any, options: dict[str, Any], error: Any, why: str) -> None:
    with DistributedContext(LocalBackend()) as ctx, pytest.raises(error, match=why):
        model = DDP(nn.Linear(2, 1), ctx)
        ElasticLoop(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            source,
            batch_size=4,
            **options,
        )
