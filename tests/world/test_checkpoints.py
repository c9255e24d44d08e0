"""Checkpoints of groups: all of the state, in one file or in parts, read by any number of ranks."""

from __future__ import annotations

import copy
import logging
import os
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.checkpoint import files as files_module
from potluck.checkpoint import fingerprint
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import CheckpointError, RemoteError
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, ElasticLoop, Policy
from potluck.training import saving
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
        on_backward: Any = lambda training: None,
        always: bool = False,
    ) -> None:
        self.ctx = ctx
        self.store = store
        self.stop = stop
        self.on_step = on_step
        self.on_backward = on_backward
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
                self.on_backward(self)
                self.job.log(loss=loss)
                self.optimizer.step()
                self.scheduler.step()
                share = self.job._share
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
    assert found.facts["versions"]["torch"] == version("torch")
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
@pytest.mark.parametrize("moment", [6, 9, 10, 11, 12, 13, 14, 28])
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


@pytest.mark.parametrize("step", [1, 3])
def test_a_save_after_a_step_that_some_voted_for_and_others_lost_is_one_save(
    tmp_path: Path, step: int
) -> None:
    """Worker 1 dies in a vote. Worker 0 has voted too, and asks the next group about it; worker 2
    has lost its part of the step before, and asks when its script saves."""
    expected = expected_run()
    has_voted = threading.Event()
    vote = 12 + 10 * (step - 1)  # five calls before the first step; in each, one of five

    def dies(worker: str, name: str, number: int) -> bool:
        if worker == "2" or number != vote:
            return False
        assert name == "all_gather"
        if worker == "0":
            has_voted.set()
            return False
        assert has_voted.wait(20)
        return True

    def lose(training: Training) -> None:
        ctx = training.ctx
        is_then = ctx.epoch == 1 and training.job.step_number == step - 1
        if is_then and ctx.members[ctx.rank].worker == "2":
            ctx.recv(np.zeros(1), 1)

    def work(ctx: MortalContext) -> Training:
        return Training(ctx, CheckpointStore(tmp_path), on_backward=lose, always=True).run()

    results = ElasticWorld(3, work, dies=dies).run()
    for training in results.values():
        assert training.job.num_reruns == 1
        for mine, right in zip(
            training.model.parameters(), expected.model.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("then", ["nothing", "average", "save"])
def test_a_newcomer_is_let_in_between_turns_and_not_by_a_save(tmp_path: Path, then: str) -> None:
    """What the script calls after its save, in the same turn, newcomers do not call."""
    has_joined = threading.Event()

    def join(training: Training) -> None:
        is_first = training.ctx.members[training.ctx.rank].worker == "0"
        if is_first and training.job.step_number == 2 and not has_joined.is_set():
            has_joined.set()
            world.join()

    def work(ctx: MortalContext) -> Training:
        training = Training(ctx, CheckpointStore(tmp_path), on_step=join)
        for x, y, _ in training.job:
            with training.job.step():
                training.on_step(training)
                training.optimizer.zero_grad()
                loss = F.cross_entropy(training.model(x), y)
                loss.backward()
                training.optimizer.step()
            training.job.save()
            if then == "average":
                assert training.job.average(one=1.0) == {"one": 1.0}
            elif then == "save":
                training.job.save()
        return training

    world = ElasticWorld(2, work)
    results = world.run()
    assert sorted(results) == ["0", "1", "2"]
    assert all(training.ctx.world_size == 3 for training in results.values())


def test_saving_needs_a_place_and_the_time_between_steps(tmp_path: Path) -> None:
    with DistributedContext(LocalBackend()) as ctx:
        training = Training(ctx, None)
        for _ in training.job:
            with pytest.raises(RuntimeError, match=r"after job.step\(\), not before"):
                training.job.save()
            with training.job.step(), pytest.raises(RuntimeError, match="between steps"):
                training.job.save()
            with pytest.raises(ValueError, match="pass checkpoint=DIRECTORY"):
                training.job.save()
            break


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("options", KINDS[:2], ids=lambda o: "-".join(o) or "plain")
def test_a_save_that_one_rank_could_not_write_raises_on_all_and_names_that_rank(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    def work(ctx: DistributedContext) -> str:
        folder = tmp_path
        if ctx.is_master:
            folder = tmp_path / "file" / "below"
            (tmp_path / "file").write_text("in the way")
        store = CheckpointStore(folder, **options)
        store.load_latest = lambda: None  # type: ignore[method-assign]
        training = Training(ctx, store)
        for _ in training.job:
            with training.job.step():
                pass
            with pytest.raises(CheckpointError) as caught:
                training.job.save()
            break
        ctx.barrier()
        return str(caught.value)

    first, second = run_world(2, work)
    assert "can't be written" in first
    if not options:
        assert second.startswith("rank 0 (")
        assert first in second
    else:  # no number, nothing to write
        assert "rank 0 (" in second


def test_ranks_wait_for_a_slow_disk_longer_than_for_a_collective(tmp_path: Path) -> None:
    patience: list[float | None] = []

    def work(ctx: DistributedContext) -> None:
        real = ctx.all_gather

        def all_gather(array: Any, **options: Any) -> Any:
            patience.append(options.get("timeout"))
            return real(array, **options)

        ctx.all_gather = all_gather  # type: ignore[method-assign]
        assert saving.save(ctx, CheckpointStore(tmp_path), {"w": np.ones(2)}, 1) == ""

    run_world(2, work, timeout_s=20)
    assert patience == [saving.MAX_WRITE_S] * 2


def test_what_a_state_cannot_hold_ends_a_save_on_all_ranks(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"when": {1, 2}}

        def load_state_dict(self, state: Any) -> None: ...

    def work(ctx: DistributedContext) -> None:
        model = DDP(copy.deepcopy(_START), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        also = {"odd": Odd()}
        job = ElasticLoop(model, optimizer, (X, Y), batch_size=8, also=also, checkpoint=tmp_path)
        for _ in job:
            with job.step():
                pass
            job.save()

    with pytest.raises(WorldError) as caught:
        run_world(2, work)
    assert isinstance(caught.value.errors[0], TypeError)
    assert isinstance(caught.value.errors[1], RemoteError)
    for error in caught.value.errors.values():
        assert "replica/also/odd/when is a set" in str(error)


def changed(ctx: DistributedContext, store: CheckpointStore, what: str) -> None:
    """A training that differs in one thing from ``Training``."""
    size = 5 if what == "model" else 3
    inner = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, size)).double()
    model = DDP(inner, ctx)
    optimizers = [torch.optim.Adam(model.parameters())]
    if what == "optimizers":
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    name = "plan" if what == "also" else "scheduler"
    job = ElasticLoop(
        model,
        optimizers,
        (X[:40], Y[:40]) if what == "data" else (X, Y),
        batch_size=BATCH,
        seed=SEED + (what == "seed"),
        shuffle=what != "order",
        also={name: StepLR(optimizers[0], step_size=4)},
        checkpoint=store,
    )
    for _ in job:
        break


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("model", "'2.bias' is of shape .3,. in the state, of shape .5,. in this model"),
        ("optimizers", "has 1 optimizers, this training has 2"),
        ("also", r"holds also=\['scheduler'\], this training has also=\['plan'\]"),
        ("data", "50 samples shuffled with seed 2; this training is on 40 samples"),
        ("seed", "shuffled with seed 2; this training is on 50 samples shuffled with seed 3"),
        ("order", "shuffled with seed 2; this training is on 50 samples in their own order"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_and_the_difference_named(
    tmp_path: Path, what: str, text: str
) -> None:
    run_world(1, lambda ctx: Training(ctx, CheckpointStore(tmp_path), stop=2).run())
    with pytest.raises(WorldError, match=text):
        run_world(1, lambda ctx: changed(ctx, CheckpointStore(tmp_path), what))
