"""What callbacks are told, metrics over ranks, the progress bar, and TensorBoard's files."""

from __future__ import annotations

import copy
import io
import math
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck._core.context import DistributedContext
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import CallbackError, MissingDependency, RemoteError
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, ElasticLoop, Policy, ProgressBar, TensorBoardLogger
from potluck.training import average, saving

GENERATOR = torch.Generator().manual_seed(2)
X = torch.randn(20, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(20, 1, generator=GENERATOR, dtype=torch.float64)
_START = nn.Linear(3, 1).double()


def train(ctx: DistributedContext, *callbacks: object, **options: Any) -> ElasticLoop:
    model = DDP(copy.deepcopy(_START), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = ElasticLoop(
        model,
        optimizer,
        (X, Y),
        batch_size=8,
        epochs=options.pop("epochs", 2),
        callbacks=callbacks,
        policy=Policy(hash_every=1, recovery_s=30),
        **options,
    )
    for x, y in job:
        with job.step():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            job.log(loss=loss)
            optimizer.step()
    return job


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.job: Any = None

    def on_train_begin(self, job: Any) -> None:
        self.job = job
        self.events.append(("begin", job.step_number))

    def on_step_end(self, step: int, loss: float) -> None:
        assert loss == self.job.last_loss
        self.events.append(("step", step))

    def on_epoch_end(self, epoch: int, loss: float) -> None:
        self.events.append(("epoch", epoch, loss))

    def on_group_change(self, world_size: int) -> None:
        self.events.append(("group", world_size))

    def on_train_end(self, job: Any) -> None:
        self.events.append(("end", job.step_number))


def test_every_rank_is_told_every_step_and_the_mean_loss_of_every_epoch() -> None:
    def work(ctx: DistributedContext) -> tuple[list[Any], list[float]]:
        recorder = Recorder()
        job = train(ctx, recorder)
        assert recorder.job is job
        return recorder.events, job.losses

    results = run_world(3, work)
    events, losses = results[0]
    # Batches of 8, 8 and 4 samples.
    means = [(2 * sum(losses[i : i + 2]) + losses[i + 2]) / 5 for i in (0, 3)]
    assert events == [
        ("begin", 0),
        *(("step", step) for step in (1, 2, 3)),
        ("epoch", 0, pytest.approx(means[0])),
        *(("step", step) for step in (4, 5, 6)),
        ("epoch", 1, pytest.approx(means[1])),
        ("end", 6),
    ]
    assert all(result[0] == events for result in results)


def test_a_step_that_is_run_again_is_told_once_and_so_is_the_new_group() -> None:
    together = threading.Barrier(3)
    recorders: dict[str, Recorder] = {}

    class Fate:
        def __init__(self, ctx: MortalContext) -> None:
            self.ctx = ctx

        def on_step_end(self, step: int, loss: float) -> None:
            if step == 4 and self.ctx.world_size == 3:
                together.wait(30)
                if self.ctx.backend.worker == "1":
                    self.ctx.die()

    def work(ctx: MortalContext) -> None:
        recorders[ctx.backend.worker] = recorder = Recorder()
        train(ctx, recorder, Fate(ctx), epochs=3)

    ElasticWorld(3, work).run()
    for worker in ("0", "2"):
        events = recorders[worker].events
        assert [event[1] for event in events if event[0] == "step"] == list(range(1, 10))
        assert [event[1] for event in events if event[0] == "group"] == [2]


def test_a_function_is_called_with_epoch_and_loss_at_the_end_of_each_epoch() -> None:
    def work(ctx: DistributedContext) -> tuple[list[Any], list[Any]]:
        told: list[Any] = []
        recorder = Recorder()
        train(ctx, recorder, lambda epoch, loss: told.append((epoch, loss)))
        return told, recorder.events

    for told, events in run_world(2, work):
        assert [epoch for epoch, _ in told] == [0, 1]
        assert told == [event[1:] for event in events if event[0] == "epoch"]


def test_an_error_in_a_function_names_it() -> None:
    def report(epoch: int, loss: float) -> None:
        raise KeyError("accuracy")

    with pytest.raises(WorldError, match=r"report raised KeyError: 'accuracy'") as caught:
        run_world(1, lambda ctx: train(ctx, report))
    assert isinstance(caught.value.errors[0], CallbackError)


def test_an_error_in_one_ranks_callback_names_it_on_all_ranks() -> None:
    class Broken:
        def __init__(self, ctx: DistributedContext) -> None:
            self.ctx = ctx

        def on_epoch_end(self, epoch: int, loss: float) -> None:
            if self.ctx.rank == 1:
                raise KeyError("accuracy")

    with pytest.raises(WorldError) as caught:
        run_world(3, lambda ctx: train(ctx, Broken(ctx)))
    errors = caught.value.errors
    assert isinstance(errors[1], CallbackError)
    for error in errors.values():
        assert "Broken.on_epoch_end raised KeyError: 'accuracy'" in str(error)
    assert all(isinstance(errors[rank], RemoteError) for rank in (0, 2))
    assert "rank 1" in str(errors[0])


def test_a_callback_may_communicate() -> None:
    found: list[float] = []

    class Evaluate:
        def __init__(self, ctx: DistributedContext) -> None:
            self.ctx = ctx

        def on_epoch_end(self, epoch: int, loss: float) -> None:
            found.append(average(self.ctx, {"rank": self.ctx.rank})["rank"])

    run_world(3, lambda ctx: train(ctx, Evaluate(ctx)))
    assert found == [1.0] * 6


# ---------------------------------------------------------------- metrics


def test_callbacks_that_communicate_end_early_on_all_ranks_when_one_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 dies before it averages. Worker 0 has saved by then, and is lost where it averages;
    worker 2 is lost in the save, so that it stands at its average in the next group already."""

    class Saver:
        def on_train_begin(self, job: Any) -> None:
            self.job = job

        def on_step_end(self, step: int, loss: float) -> None:
            self.job.save()

    class Averager(Saver):
        def __init__(self, ctx: MortalContext) -> None:
            self.ctx = ctx

        def on_step_end(self, step: int, loss: float) -> None:
            if step == 3 and self.ctx.epoch == 1 and self.ctx.backend.worker == "1":
                self.ctx.die()
            self.job.average(one=1.0)

    save = saving.save

    def lose(ctx: MortalContext, store: Any, state: Any, step: int, known: Any) -> str:
        result = save(ctx, store, state, step, known)
        if step == 3 and ctx.epoch == 1 and ctx.backend.worker == "2":
            ctx.recv(np.zeros(1), 1)  # as if its part of the save's last call had never come
        return result

    monkeypatch.setattr(saving, "save", lose)
    results = ElasticWorld(
        3, lambda ctx: train(ctx, Saver(), Averager(ctx), checkpoint=CheckpointStore(tmp_path))
    ).run()
    assert sorted(results) == ["0", "2"]
    assert all(job.step_number == 6 for job in results.values())


def test_metrics_are_averaged_by_weight_and_what_is_unknown_is_left_out() -> None:
    def work(ctx: DistributedContext) -> dict[str, float]:
        mine: dict[str, Any] = {
            "accuracy": torch.tensor(float(ctx.rank)),
            "some": math.nan if ctx.rank == 0 else np.float32(ctx.rank),
            "nobody": math.nan,
        }
        if ctx.rank == 1:
            mine = dict(reversed(mine.items()))
        return average(ctx, mine, weight=ctx.rank)

    for means in run_world(3, work):
        assert means["accuracy"] == pytest.approx((1 * 1 + 2 * 2) / 3)
        assert means["some"] == pytest.approx(5 / 3)
        assert math.isnan(means["nobody"])


def test_metrics_of_different_names_are_not_added_up() -> None:
    def work(ctx: DistributedContext) -> None:
        with pytest.raises(
            ValueError, match=r"different names; those of rank \d .* are (f1|recall)"
        ):
            average(ctx, {"recall" if ctx.rank else "f1": 1.0})

    run_world(3, work)


def test_in_a_step_metrics_are_those_of_the_batch() -> None:
    def work(ctx: DistributedContext) -> list[float]:
        model = DDP(copy.deepcopy(_START), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        means = []
        job = ElasticLoop(model, optimizer, (X, Y), batch_size=7, shuffle=False)
        for x, _ in job:
            with job.step():
                means.append(job.average(x=x.mean())["x"])
        return means

    for means in run_world(3, work):
        assert means == pytest.approx([X[i : i + 7].mean().item() for i in (0, 7, 14)])


# ---------------------------------------------------------------- the terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_is_the_masters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def work(ctx: DistributedContext) -> str:
        terminal = Terminal()
        train(ctx, ProgressBar(terminal))
        return terminal.getvalue()

    first, *others = run_world(3, work)
    assert "100%" in first
    assert "epoch 2/2" in first
    assert first.rstrip().endswith("\x1b[?25h"), "the cursor is back"
    assert "loss" in first
    assert others == ["", ""]


def test_without_a_terminal_there_is_a_line_per_epoch() -> None:
    def work(ctx: DistributedContext) -> str:
        file = io.StringIO()
        train(ctx, ProgressBar(file))
        return file.getvalue()

    first, *others = run_world(2, work)
    assert [line.split(": loss")[0] for line in first.splitlines()] == ["epoch 1/2", "epoch 2/2"]
    assert others == [""]


# ---------------------------------------------------------------- TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, read from event files as TensorBoard reads them."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_gets_the_losses_from_the_master_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="pip install 'potluck[tensorboard]'")
    job = run_world(3, lambda ctx: train(ctx, TensorBoardLogger(tmp_path)))[0]
    assert len(list(tmp_path.iterdir())) == 1
    found = scalars(tmp_path)
    assert [step for step, _ in found["loss/step"]] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in found["loss/step"]] == pytest.approx(job.losses, rel=1e-6)
    assert [step for step, _ in found["loss/epoch"]] == [3, 6]
    assert found["world_size"][0] == (1, 3.0)
    assert "noise_scale" not in found, "what is not known is not written"


def test_without_tensorboard_one_sentence_names_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Missing:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.split(".")[0] == "tensorboardX":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(MissingDependency, match=r"pip install 'potluck\[tensorboard\]'"):
        TensorBoardLogger(tmp_path)
