"""Shares by speed and batches by noise: what changes, and what must not."""

from __future__ import annotations

import copy
import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import run_world
from potluck.torch import DDP, ElasticLoop, NoiseBatching, Policy, ProportionalShares
from potluck.training import elastic
from potluck.training.noise import NoiseEstimate, unbiased
from potluck.training.progress import Progress
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule
from potluck.training.shares import Cost

SHARES = Policy(hash_every=1, adapt_every=2, shares=ProportionalShares(), recovery_s=30)
BATCHES = Policy(
    hash_every=1,
    adapt_every=2,
    batching=NoiseBatching(min_batch=4, max_batch=40, smoothing=0.5),
    recovery_s=30,
)
BOTH = replace(BATCHES, shares=ProportionalShares())
GENERATOR = torch.Generator().manual_seed(6)
X = torch.randn(90, 5, generator=GENERATOR, dtype=torch.float64)
Y = X @ torch.randn(5, 1, generator=GENERATOR, dtype=torch.float64)
Y += torch.randn(90, 1, generator=GENERATOR, dtype=torch.float64)
_START = nn.Linear(5, 1).double()


class Training:
    """A regression. ``pretended`` are hours per sample that each worker seems to need: so long that
    no pause of this machine shows beside them."""

    def __init__(
        self,
        ctx: DistributedContext,
        policy: Policy,
        *,
        pretended: dict[str, float] | None = None,
        **options: Any,
    ) -> None:
        self.ctx = ctx
        self.pretended = pretended or {}
        self.model = DDP(copy.deepcopy(_START), ctx)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.counts: list[int] = []
        self.sizes: list[int] = []
        self.seen = np.zeros(len(X), np.int64)
        self.job = ElasticLoop(
            self.model,
            self.optimizer,
            (X, Y, torch.arange(len(X))),
            batch_size=options.pop("batch_size", 24),
            epochs=options.pop("epochs", 4),
            policy=policy,
            **options,
        )

    def run(self) -> Training:
        core = self.job
        for x, y, index in self.job:
            with self.job.step():
                share, batch = core._share, core._batch
                assert share is not None
                assert batch is not None
                self.optimizer.zero_grad()
                loss = F.mse_loss(self.model(x), y)
                loss.backward()
                mine = np.zeros(len(X), np.int64)
                mine[index[: share.num_samples]] = 1
                self.ctx.all_reduce(mine)
                if self.pretended:
                    # As if it had begun so much earlier, and computed since.
                    pretended = self.pretended[self.ctx.members[self.ctx.rank].worker]
                    core._began -= 3600 * pretended * share.num_samples
                self.job.log(loss=loss)
                self.optimizer.step()
                self.seen += mine
                self.counts.append(share.num_samples)
                self.sizes.append(batch.size)
        return self


# ---------------------------------------------------------------- shares


def test_shares_follow_speeds_and_the_losses_stay_those_of_one_process() -> None:
    with DistributedContext(LocalBackend()) as ctx:
        expected = Training(ctx, Policy()).run()
    pretended = {"0": 1.0, "1": 1.0, "2": 4.0}
    results = run_world(3, lambda ctx: Training(ctx, SHARES, pretended=pretended).run())
    for training in results:
        assert training.job.losses == pytest.approx(expected.job.losses, rel=1e-9)
        assert (training.seen == 4).all()
        for mine, right in zip(
            training.model.parameters(), expected.model.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-12)
        assert training.job.shares == results[0].job.shares
    assert [training.counts[0] for training in results] == [8, 8, 8]
    for step in (9, 13):
        # 24 samples at 4:4:1 are 10.67, 10.67 and 2.67.
        dealt = [training.counts[step] for training in results]
        assert sum(dealt) == 24
        assert dealt[2] in (2, 3)
        assert abs(dealt[0] - dealt[1]) <= 1


def test_what_changes_is_told_once_by_the_master() -> None:
    def work(ctx: DistributedContext) -> list[str]:
        told: list[str] = []
        real = ctx.report

        def report(**facts: Any) -> None:
            told.extend([facts["event"]] if "event" in facts else [])
            real(**facts)

        ctx.report = report  # type: ignore[method-assign]
        Training(ctx, SHARES, pretended={"0": 1.0, "1": 3.0}).run()
        return told

    assert run_world(2, work) == [["shares 18:6 make steps 2.00 times as fast"], []]


def test_when_speeds_change_shares_are_dealt_again() -> None:
    def work(ctx: DistributedContext) -> Training:
        class Swap:
            def on_step_end(self, step: int, loss: float) -> None:
                if step == 12:
                    training.pretended = {"0": 3.0, "1": 1.0}

        slow = {"0": 1.0, "1": 3.0}
        training = Training(ctx, SHARES, pretended=slow, epochs=8, callbacks=[Swap()])
        return training.run()

    first, second = run_world(2, work)
    assert (first.counts[10], second.counts[10]) == (18, 6)
    assert first.counts[28] == pytest.approx(6, abs=1)
    assert first.job.losses == second.job.losses


def test_a_new_group_begins_with_equal_shares_and_deals_again() -> None:
    together = threading.Barrier(3)
    pretended = {"0": 1.0, "1": 1.0, "2": 4.0}

    def work(ctx: MortalContext) -> Training:
        class Death:
            def on_step_end(self, step: int, loss: float) -> None:
                if step == 10 and ctx.world_size == 3:
                    together.wait(30)
                    if ctx.backend.worker == "1":
                        ctx.die()

        options = {"epochs": 6, "callbacks": [Death()]}
        return Training(ctx, SHARES, pretended=pretended, **options).run()

    results = ElasticWorld(3, work).run()
    assert sorted(results) == ["0", "2"]
    fast, slow = results["0"], results["2"]
    assert (fast.seen == 6).all()
    assert fast.job.shares == slow.job.shares
    assert len(fast.job.shares) == 2
    # 24 samples at 4:1.
    assert fast.counts[17] == pytest.approx(19, abs=1)
    assert fast.counts[17] + slow.counts[17] == 24


def test_waiting_for_others_is_no_work_and_applying_the_step_is() -> None:
    """A rank that waits in every all_reduce for a slow one must not seem slow itself."""

    def work(ctx: DistributedContext) -> float:
        schedule = Schedule(16, 4, epochs=1)
        job = elastic.ElasticLoop(ctx, schedule, StateReplica(lambda: {}, lambda state: None))
        gate = threading.Event()
        computed: list[float] = []
        job._training.pace.add_time = lambda num, seconds: computed.append(seconds)  # type: ignore[method-assign]
        for _ in job:
            with job.step():
                if ctx.rank == 1:
                    gate.wait(0.2)  # slow on purpose: nobody sets it
                ctx.all_reduce(np.zeros(1))
                work = ctx.all_reduce(np.zeros(1), async_op=True)
                work.wait()
                job.commit()
                if ctx.rank == 2:
                    gate.wait(0.2)  # slow in its optimizer, as it were
        return min(computed)

    fast, *slow = run_world(3, work)
    assert min(slow) >= 0.2
    assert fast < 0.15


# ---------------------------------------------------------------- batches


def test_the_batch_follows_the_noise_and_every_sample_is_still_committed_once_per_epoch() -> None:
    results = run_world(3, lambda ctx: Training(ctx, BATCHES, batch_size=6, epochs=5).run())
    for training in results:
        assert (training.seen == 5).all()
        assert training.sizes == results[0].sizes
        assert training.job.noise_scale == results[0].job.noise_scale
        assert 4 <= training.job.batch_size <= 40
    assert len(set(results[0].sizes)) > 2
    assert max(results[0].sizes) <= 40


def test_what_the_loop_measures_is_the_papers_estimate() -> None:
    """Against per-sample gradients computed by hand, at the first step."""

    def work(ctx: DistributedContext) -> tuple[float, float, int]:
        training = Training(ctx, BATCHES, batch_size=12, epochs=1)
        told: list[tuple[float, float]] = []
        training.job.add_noise = lambda *pair: told.append(pair)  # type: ignore[method-assign]
        training.run()
        return (*told[0], ctx.rank)

    schedule = Schedule(len(X), 12)
    batch = schedule.batch(0)

    def gradient(indices: Any) -> torch.Tensor:
        model = copy.deepcopy(_START)
        F.mse_loss(model(X[indices]), Y[indices]).backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

    whole = gradient(schedule.indices(batch).tolist())
    for signal, noise, rank in run_world(3, work):
        own = gradient(schedule.share(batch, rank, 3).indices.tolist())
        right = unbiased(float(own @ own), 4, float(whole @ whole), 12)
        assert (signal, noise) == pytest.approx(right, rel=1e-9)


def test_the_loops_noise_scale_is_that_of_the_data_on_unequal_shares() -> None:
    """A loss whose gradient is the mean of the samples: its G and Sigma are those of the data."""
    rows = torch.randn(1200, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = 2 * rows + torch.tensor([1.0, -0.5, 0.0, 0.5], dtype=torch.float64)
    signal = float(rows.mean(0).square().sum())
    noise = float(rows.var(0).sum())

    class Unequal:
        """Shares of 5, 5 and 2."""

        def on_train_begin(self, job: ElasticLoop) -> None:
            job._training.pace.costs = (Cost(0.0, 1.0), Cost(0.0, 1.0), Cost(0.0, 2.5))

    def work(ctx: DistributedContext) -> ElasticLoop:
        model = DDP(nn.Linear(4, 1, bias=False).double(), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        # Every estimate weighs the same; the batch itself stays.
        batching = NoiseBatching(min_batch=12, max_batch=12, smoothing=1e-3)
        job = ElasticLoop(
            model,
            optimizer,
            (rows,),
            batch_size=12,
            epochs=2,
            policy=Policy(adapt_every=4, batching=batching),
            callbacks=[Unequal()],
        )
        for (x,) in job:
            with job.step():
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        return job

    for job in run_world(3, work):
        assert job.shares == (5, 5, 2)
        estimate = job._training.progress.noise
        # 200 steps: standard errors of about 0.15 and 0.7.
        assert estimate.signal == pytest.approx(signal, abs=0.3)
        assert estimate.noise == pytest.approx(noise, abs=1.4)
        assert job.noise_scale == pytest.approx(noise / signal, rel=0.2)


@pytest.mark.parametrize("round_", range(12))
def test_over_deaths_and_joins_with_everything_on_samples_are_committed_exactly_once(
    round_: int, seed: int
) -> None:
    chance = random.Random(seed)
    world_size = chance.randint(2, 4)
    fate = {str(worker): chance.randint(5, 60) for worker in range(1, 6) if chance.random() < 0.6}
    joins = sorted(chance.randint(0, 12) for _ in range(chance.randint(0, 2)))
    lock = threading.Lock()
    world: ElasticWorld[Training]

    class Joins:
        def on_step_end(self, step: int, loss: float) -> None:
            with lock:
                due = [joins.pop(0) for at in list(joins) if step >= at]
            for _ in due:
                world.join()

    def work(ctx: MortalContext) -> Training:
        pretended = {str(worker): 1.0 + worker % 3 for worker in range(12)}
        return Training(
            ctx, BOTH, pretended=pretended, batch_size=10, epochs=3, callbacks=[Joins()]
        ).run()

    world = ElasticWorld(
        world_size, work, dies=lambda worker, name, number: fate.get(worker) == number
    )
    results = world.run()
    assert "0" in results
    for training in results.values():
        assert training.job.committed == 3 * len(X)
        assert training.job.batch_size == results["0"].job.batch_size
    # Worker 0 was there from the beginning; what it saw committed is everything, once an epoch.
    assert (results["0"].seen == 3).all()
    assert len({training.job.parameter_hash() for training in results.values()}) == 1


def test_the_batch_size_goes_on_from_a_checkpoint_only_if_it_was_adapted(tmp_path: Any) -> None:
    first = run_world(
        2, lambda ctx: Training(ctx, BATCHES, batch_size=6, checkpoint=tmp_path).run()
    )[0]
    assert first.job.batch_size != 6

    def again(ctx: DistributedContext) -> list[int]:
        policy = BATCHES if ctx.world_size == 2 else Policy()
        return Training(ctx, policy, batch_size=6, epochs=5, checkpoint=tmp_path).run().sizes

    (fixed,) = run_world(1, again)
    assert set(fixed) == {6}
    assert sum(fixed) == len(X)


def test_a_group_goes_on_with_the_batch_size_of_a_rank_that_has_the_state() -> None:
    """Its first rank may have none: the sender of the state was lost before all received it."""
    then = Progress(Schedule(90, 24), BATCHES.batching)
    then.count(then.batch(), 0.5, skipped=False)
    then.batch_size, then.noise = 12, NoiseEstimate(2.0, 24.0, 3)

    def work(ctx: DistributedContext) -> Progress:
        progress = Progress(Schedule(90, 24), BATCHES.batching)
        replica = StateReplica(lambda: {}, lambda state: None)
        training = elastic.Training(ctx, progress, replica, None, BATCHES)
        if ctx.rank == 1:
            progress.restore(then.capture())
            training.has_state = True
        training.agree(0)
        training.bring_up_to_date()
        return progress

    assert run_world(3, work) == [then] * 3


def test_a_batch_size_outside_of_the_bounds_is_refused() -> None:
    with (
        DistributedContext(LocalBackend()) as ctx,
        pytest.raises(ValueError, match="batch_size 64 is not between min_batch 4 and max_batch"),
    ):
        Training(ctx, BATCHES, batch_size=64)
