"""Who computes how much: the fastest split there is, and only when it pays to change it."""

from __future__ import annotations

import itertools
import random

import pytest

from potluck.training.shares import Plan, ProportionalShares, Speed, apportion, replan


def every_split(size: int, parts: int) -> itertools.product[int]:
    ways = itertools.product(range(size + 1), repeat=parts)
    return (way for way in ways if sum(way) == size)  # type: ignore[return-value]


def test_equal_speeds_give_equal_shares_and_the_first_ranks_one_more() -> None:
    assert apportion(10, [1.0] * 4) == (3, 3, 2, 2)
    assert apportion(3, [7.0] * 5) == (1, 1, 1, 0, 0)
    assert apportion(0, [1.0, 2.0]) == (0, 0)


def test_shares_are_proportional_to_speed() -> None:
    assert apportion(64, [300.0, 100.0]) == (48, 16)
    assert apportion(70, [4.0, 2.0, 1.0]) == (40, 20, 10)


def test_no_other_split_ends_sooner(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        speeds = [chance.uniform(0.2, 5) for _ in range(chance.randint(1, 4))]
        size = chance.randint(len(speeds), 9)
        counts = apportion(size, speeds)
        assert sum(counts) == size
        assert min(counts) >= 1
        mine = max(count / speed for count, speed in zip(counts, speeds, strict=True))
        best = min(
            max(count / speed for count, speed in zip(way, speeds, strict=True))
            for way in every_split(size, len(speeds))
            if min(way) >= 1
        )
        assert mine == pytest.approx(best)


def test_a_rank_that_is_a_thousand_times_slower_still_shows_its_speed() -> None:
    assert apportion(64, [1000.0, 1.0, 1000.0]) == (31, 1, 32)


@pytest.mark.parametrize("speeds", [[], [0.0, 1.0], [-1.0], [float("nan")], [float("inf")]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(ValueError, match="can't be dealt out"):
        apportion(8, speeds)


def test_speed_is_samples_over_seconds_and_forgets_slowly() -> None:
    speed = Speed().after(10, 2.0, 0.5)
    assert speed.samples_per_s == 5
    speed = speed.after(10, 1.0, 0.5)
    assert speed.samples_per_s == pytest.approx(10 / 1.5)
    assert speed.after(0, 1.0, 0.5) == speed, "a step without samples says nothing"


def test_a_plan_changes_only_when_steps_become_shorter_by_the_threshold() -> None:
    equal = Plan((1.0, 1.0))
    assert replan(equal, [104.0, 100.0], 64, 0.05).speeds == equal.speeds
    changed = replan(equal, [300.0, 100.0], 64, 0.05)
    assert changed.speeds == (300.0, 100.0)
    assert changed.reason == "shares 48:16 make steps 2.00 times as fast"
    assert replan(changed, [310.0, 98.0], 64, 0.05).speeds == changed.speeds
    assert replan(changed, [100.0, 100.0], 64, 0.05).speeds == (100.0, 100.0)


def test_without_measurements_shares_stay_and_a_newcomer_counts_as_the_median() -> None:
    assert replan(None, [0.0, 0.0], 8, 0.05).speeds == (1.0, 1.0)
    plan = replan(None, [400.0, 0.0, 100.0, 200.0], 70, 0.05)
    assert plan.speeds == (400.0, 200.0, 100.0, 200.0)


def test_with_a_fixed_cost_per_step_repeated_planning_makes_all_ranks_take_equally_long() -> None:
    """Rank 0 needs 10 ms a sample, rank 1 5 ms and 200 ms for each step whatever its share."""
    costs = [(0.0, 0.010), (0.2, 0.005)]
    plan: Plan | None = None
    counts: tuple[int, ...] = ()
    for _ in range(20):
        counts = apportion(90, plan.speeds if plan else (1.0, 1.0))
        times = [a + b * n for (a, b), n in zip(costs, counts, strict=True)]
        measured = [n / t for n, t in zip(counts, times, strict=True)]
        plan = replan(plan, measured, 90, 0.02)
    times = [a + b * n for (a, b), n in zip(costs, counts, strict=True)]
    assert times[0] == pytest.approx(times[1], rel=0.05)


def test_options_must_make_sense() -> None:
    with pytest.raises(ValueError, match="smoothing"):
        ProportionalShares(smoothing=0)
    with pytest.raises(ValueError, match="threshold"):
        ProportionalShares(threshold=-1)
