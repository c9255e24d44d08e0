"""Pace: when ranks exchange what they measured, and what they compute from it."""

from __future__ import annotations

from typing import Any

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from potluck.training.pace import Pace
from potluck.training.policy import NoiseBatching, Policy, ProportionalShares
from potluck.training.progress import Progress
from potluck.training.sampler import Schedule
from potluck.training.shares import apportion

BATCHING = NoiseBatching(min_batch=4, max_batch=40, smoothing=1.0)


def exchanges(committed: int) -> list[int]:
    """How often each of two ranks has exchanged its noise at the beginning of a group."""

    def act(ctx: DistributedContext) -> int:
        schedule = Schedule(num_samples=90, batch_size=10, epochs=1, seed=0)
        progress = Progress(schedule, BATCHING, committed=committed)
        pace = Pace(Policy(batching=BATCHING))
        pace.add_noise(1.0, 1000.0)
        pace.new_group()
        pace.exchange(ctx, progress)
        return progress.noise.num

    return run_world(2, act)


def test_a_new_group_exchanges_at_once() -> None:
    assert exchanges(committed=80) == [1, 1]


def test_after_the_last_step_a_group_exchanges_nothing() -> None:
    """Ranks that left before would keep another batch size than those that form one more group."""
    assert exchanges(committed=90) == [0, 0]


class Counting:
    """A context that counts its all_gathers."""

    def __init__(self, ctx: DistributedContext) -> None:
        self._ctx, self.num = ctx, 0

    def all_gather(self, array: Any) -> Any:
        self.num += 1
        return self._ctx.all_gather(array)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def test_exchanges_are_due_early_in_a_group_and_then_every_so_many_steps() -> None:
    def act(ctx: DistributedContext) -> list[int]:
        progress = Progress(Schedule(num_samples=1000, batch_size=10, epochs=1, seed=0), None)
        pace = Pace(Policy(shares=ProportionalShares(), adapt_every=10))
        counting = Counting(ctx)
        seen = []
        for step in range(45):
            progress.step, before = step, counting.num
            pace.exchange(counting, progress)  # type: ignore[arg-type]
            if counting.num > before:
                seen.append(step)
        return seen

    assert run_world(2, act) == [[0, 2, 5, 10, 20, 30, 40]] * 2


def test_shares_follow_the_reports_of_a_groups_last_rounds() -> None:
    def act(ctx: DistributedContext) -> None:
        pace = Pace(Policy(shares=ProportionalShares(window=3)))

        def split() -> tuple[int, ...]:
            return apportion(80, pace.costs or ())

        pace.add_round(ctx, 8, [(40, 4.0), (40, 4.1)])
        assert split() == (40, 40), "less than the threshold would be gained"
        pace.add_round(ctx, 16, [(40, 4.0), (40, 16.0)])
        pace.add_round(ctx, 24, [(40, 4.0), (40, 16.0)])
        assert split() == (64, 16), "the median of three rounds"
        pace.new_group()
        pace.add_round(ctx, 32, [(40, 4.0), (0, 0.0)])
        assert split() == (40, 40), "the rounds of another group are forgotten"

    run_world(2, act)
