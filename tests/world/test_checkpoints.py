"""Checkpoints of groups: all of the state, in one file or in parts, read by any number of ranks."""

from __future__ import annotations

import copy
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from potluck.backends.local import LocalBackend
from potluck.checkpoint import files as files_module
from potluck.checkpoint import fingerprint
from potluck.checkpoint.store import CheckpointStore
from potluck.context import DistributedContext
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import run_world
from potluck.torch import DDP, ElasticLoop, Policy
from potluck.training.sampler import Schedule

EVERY_STEP = Policy(hash_every=1, save_every=100, recovery_s=30)
GENERATOR = torch.Generator().manual_seed(8)
X = torch.randn(50, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (50,), generator=GENERATOR)
_START = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
EPOCHS, BATCH, SEED = 3, 8, 2
KINDS = [{}, {"sharded": True}, {"asynchronous": True}, {"sharded": True, "asynchronous": True}]


class Training:
    def __init__(
        self,
        ctx: DistributedContext,
        store: CheckpointStore | None,
        *,
        stop: int = -1,
        inner: nn.Module = _START,
        policy: Policy = EVERY_STEP,
        on_step: Any = lambda training: None,
        always: bool = False,
    ) -> None:
        self.ctx = ctx
        self.store = store
        self.stop = stop
        self.on_step = on_step
        self.model = DDP(copy.deepcopy(inner), ctx)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.scheduler = StepLR(self.optimizer, step_size=4, gamma=0.5)
        self.always = always
        self.drawn: list[float] = []
        self.taken: dict[int, list[int]] = {}
        self.job = ElasticLoop(
            self.model,
            self.optimizer,
            (X, Y, torch.arange(len(X))),
            batch_size=BATCH,
            epochs=EPOCHS,
            seed=SEED,
            also={"scheduler": self.scheduler},
            checkpoint=store,
            policy=policy,
            ctx=ctx,
        )

    def run(self) -> Training:
        """Up to step ``stop``, where it saves; to the end without one."""
        for x, y, index in self.job:
            with self.job.step():
                self.on_step(self)
                step = self.job.step_number
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.job.log(loss=loss)
                self.optimizer.step()
                self.scheduler.step()
                share = self.job._core.share
                assert share is not None
                self.taken[step] = index[: share.num_samples].tolist()
            if self.always:
                self.job.save()
            if self.job.step_number == self.stop:
                self.job.save()
                break
        if self.store is not None:
            self.store.close()
        return self


def expected_run() -> Training:
    with DistributedContext(LocalBackend()) as ctx:
        return Training(ctx, None).run()


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(o) or "plain")
def test_a_training_over_four_two_and_three_ranks_is_one_training(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    expected = expected_run()
    phases = [(4, 5), (2, 13), (3, -1)]
    losses: list[float] = []
    taken: dict[int, list[int]] = {}
    for world_size, stop in phases:
        results = run_world(
            world_size,
            lambda ctx, stop=stop: Training(
                ctx, CheckpointStore(tmp_path, **options), stop=stop
            ).run(),
        )
        losses += results[0].job.losses
        for step in results[0].taken:
            taken[step] = [index for training in results for index in training.taken[step]]
    assert losses == pytest.approx(expected.job.losses, rel=1e-9)
    for mine, right in zip(results[0].model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-12)
    # The samples themselves, in order: not one left out, repeated or moved.
    schedule, committed = Schedule(len(X), BATCH, EPOCHS, SEED), 0
    for step in range(len(taken)):
        batch = schedule.batch(committed)
        assert taken[step] == schedule.indices(batch).tolist()
        committed += batch.size
    assert committed == schedule.total
    assert results[0].scheduler.last_epoch == expected.scheduler.last_epoch


def test_one_call_saves_everything_and_where_it_comes_from(tmp_path: Path) -> None:
    run_world(3, lambda ctx: Training(ctx, CheckpointStore(tmp_path, sharded=True), stop=4).run())
    found = CheckpointStore(tmp_path).load_latest()
    assert found is not None
    assert (found.step, found.state["committed"]) == (4, 32)
    assert list(found.state["replica"]["model"]) == list(_START.state_dict())
    assert found.state["replica"]["optimizers"][0]["state"][0]["exp_avg"].dtype == torch.float64
    assert found.state["replica"]["also"]["scheduler"]["last_epoch"] == 4
    assert len(found.state["own"]) == 3
    assert {"torch", "python", "numpy"} <= found.state["own"][2].keys()
    assert found.facts["world_size"] == 3
    assert found.facts["workers"] == ["0", "1", "2"]
    assert found.facts["versions"]["torch"] == torch.__version__
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "000001-step-4.json",
        *(f"000001-step-4.part-{part}-of-3.safetensors" for part in (1, 2, 3)),
    ]
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert max(sizes) < 0.6 * sum(sizes)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = copy.deepcopy(_START)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(F.dropout(x, 0.3, self.training))


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    """Dropout from torch's generator, and draws from Python's and NumPy's, bit by bit."""
    import random

    def draw(training: Training) -> None:
        training.drawn += [random.random(), float(np.random.rand())]

    def seeded() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    def train(store: CheckpointStore | None, stop: int = -1) -> Training:
        with DistributedContext(LocalBackend()) as ctx:
            return Training(ctx, store, stop=stop, inner=Dropping(), on_step=draw).run()

    seeded()
    expected = train(None)
    seeded()
    first = train(CheckpointStore(tmp_path), stop=7)
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    second = train(CheckpointStore(tmp_path))
    assert first.job.losses + second.job.losses == expected.job.losses
    assert first.drawn + second.drawn == expected.drawn
    assert second.job.parameter_hash() == expected.job.parameter_hash()


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs from the first checkpoint on until five more steps are committed.

    What is then on the disk is the state of step 7, in which nothing of later steps shows.
    """
    opened = threading.Event()
    real = os.fsync
    hashes: dict[int, str] = {}

    def held(fd: int) -> None:
        assert opened.wait(30)
        real(fd)

    monkeypatch.setattr(files_module.os, "fsync", held)

    def work(ctx: DistributedContext) -> Training:
        def on_step(training: Training) -> None:
            hashes[training.job.step_number] = fingerprint(training.model.state_dict())
            if training.job.step_number == 12:
                assert not list(tmp_path.glob("*.json")), "nothing is on the disk yet"
                opened.set()

        store = CheckpointStore(tmp_path, asynchronous=True)
        return Training(ctx, store, policy=Policy(save_every=7), on_step=on_step).run()

    run_world(1, work)
    steps = sorted(path.stem for path in tmp_path.glob("*.json"))
    assert steps == ["000001-step-7", "000002-step-14", "000003-step-21"]
    for path in tmp_path.glob("000003*"):
        path.unlink()
    for step, number in ((14, 2), (7, 1)):
        found = CheckpointStore(tmp_path).load_latest()
        assert found is not None
        assert found.step == found.state["step"] == step
        assert fingerprint(found.state["replica"]["model"]) == hashes[step]
        for path in tmp_path.glob(f"00000{number}*"):
            path.unlink()


@pytest.mark.parametrize("options", KINDS[:3], ids=lambda o: "-".join(o) or "plain")
def test_a_disk_that_fails_does_not_stop_training_and_is_told(
    tmp_path: Path,
    options: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.os, "fsync", full)

    def work(ctx: DistributedContext) -> Training:
        store = CheckpointStore(tmp_path, parts_timeout_s=0.1, **options)
        return Training(ctx, store, policy=Policy(hash_every=1, save_every=10)).run()

    with caplog.at_level(logging.ERROR):
        results = run_world(2, work)
    assert all(training.job.step_number == 21 for training in results)
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("asked", [False, True], ids=["by-policy", "by-the-script"])
@pytest.mark.parametrize("moment", [5, 8, 9, 10, 11, 12, 13, 27])
def test_a_death_at_any_moment_around_a_sharded_save_leaves_a_checkpoint_that_can_be_read(
    tmp_path: Path, moment: int, asked: bool
) -> None:
    """Saves after every step or second step, so that deaths fall into and between the saves."""
    expected = expected_run()

    def work(ctx: MortalContext) -> Training:
        store = CheckpointStore(tmp_path, sharded=True, asynchronous=True, parts_timeout_s=20)
        policy = Policy(hash_every=1, save_every=1000 if asked else 2, recovery_s=30)
        try:
            return Training(ctx, store, policy=policy, always=asked).run()
        finally:
            store.give_up()
            store._writer._end()

    results = ElasticWorld(
        3, work, dies=lambda worker, name, number: worker == "1" and number == moment
    ).run()
    assert sorted(results) == ["0", "2"]
    for training in results.values():
        for mine, right in zip(
            training.model.parameters(), expected.model.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-11)
    found = CheckpointStore(tmp_path).load_latest()
    assert found is not None
    assert found.step == 21


def test_saving_needs_a_place_and_the_time_between_steps(tmp_path: Path) -> None:
    with DistributedContext(LocalBackend()) as ctx:
        training = Training(ctx, None)
        for _ in training.job:
            with training.job.step(), pytest.raises(RuntimeError, match="between steps"):
                training.job.save()
            with pytest.raises(ValueError, match="pass checkpoint=DIRECTORY"):
                training.job.save()
            break
