"""Pace: when ranks exchange what they measured, and what they compute from it."""

from __future__ import annotations

from typing import Any

from potluck.context import DistributedContext
from potluck.testing.world import run_world
from potluck.training.noise import NoiseBatching
from potluck.training.pace import Pace
from potluck.training.policy import Policy
from potluck.training.progress import Progress
from potluck.training.sampler import Schedule
from potluck.training.shares import ProportionalShares

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


def test_exchanges_are_due_also_when_a_round_passes_their_steps() -> None:
    def steps_of(size: int) -> list[int]:
        """The steps at which rank 0 exchanges, with rounds of ``size`` steps."""

        def act(ctx: DistributedContext) -> list[int]:
            progress = Progress(Schedule(num_samples=1000, batch_size=10, epochs=1, seed=0), None)
            pace = Pace(Policy(shares=ProportionalShares(), adapt_every=10))
            counting = Counting(ctx)
            seen = []
            for step in range(0, 45, size):
                progress.step, before = step, counting.num
                pace.exchange(counting, progress)  # type: ignore[arg-type]
                if counting.num > before:
                    seen.append(step)
            return seen

        return run_world(2, act)[0]

    assert steps_of(1) == [0, 2, 5, 10, 20, 30, 40]
    assert steps_of(7) == [0, 7, 14, 21, 35, 42]
    assert steps_of(12) == [0, 12, 24, 36]
