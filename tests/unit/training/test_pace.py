"""Pace: when ranks exchange what they measured, and what they compute from it."""

from __future__ import annotations

from potluck.context import DistributedContext
from potluck.testing.world import run_world
from potluck.training.noise import NoiseBatching
from potluck.training.pace import Pace
from potluck.training.policy import Policy
from potluck.training.progress import Progress
from potluck.training.sampler import Schedule

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
