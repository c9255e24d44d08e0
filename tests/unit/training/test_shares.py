"""Who computes how much: the fastest split there is, and only when it pays to change it."""

from __future__ import annotations

import itertools
import random

import pytest

from potluck.training.policy import ProportionalShares
from potluck.training.shares import (
    EQUAL,
    Cost,
    apportion,
    fit,
    replan,
)


def speeds(*samples_per_s: float) -> list[Cost]:
    return [Cost(0.0, 1 / speed) for speed in samples_per_s]


def every_split(size: int, parts: int) -> itertools.product[int]:
    ways = itertools.product(range(size + 1), repeat=parts)
    return (way for way in ways if sum(way) == size)  # type: ignore[return-value]


# ---------------------------------------------------------------- dealing out


def test_equal_speeds_give_equal_shares_and_the_first_ranks_one_more() -> None:
    assert apportion(10, [EQUAL] * 4) == (3, 3, 2, 2)
    assert apportion(3, speeds(*[7.0] * 5)) == (1, 1, 1, 0, 0)
    assert apportion(0, speeds(1.0, 2.0)) == (0, 0)


def test_shares_are_proportional_to_speed() -> None:
    assert apportion(64, speeds(300.0, 100.0)) == (48, 16)
    assert apportion(70, speeds(4.0, 2.0, 1.0)) == (40, 20, 10)


def test_whoever_has_a_fixed_cost_gets_less() -> None:
    """Both need 10 ms a sample; the second 200 ms before the first one: 20 samples' worth."""
    assert apportion(100, [Cost(0.0, 0.01), Cost(0.2, 0.01)]) == (60, 40)


def test_no_other_split_ends_sooner(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(80):
        costs = [
            Cost(chance.choice([0.0, chance.uniform(0, 3)]), chance.uniform(0.2, 5))
            for _ in range(chance.randint(1, 4))
        ]
        size = chance.randint(len(costs), 9)
        counts = apportion(size, costs)
        assert sum(counts) == size
        assert min(counts) >= 1
        mine = max(cost.seconds(count) for count, cost in zip(counts, costs, strict=True))
        best = min(
            max(cost.seconds(count) for count, cost in zip(way, costs, strict=True))
            for way in every_split(size, len(costs))
            if min(way) >= 1
        )
        assert mine == pytest.approx(best)


def test_a_large_batch_over_many_ranks_is_dealt_out_at_once() -> None:
    counts = apportion(10**9, [Cost(0.1 * rank, 1e-6 * (1 + rank % 7)) for rank in range(500)])
    assert sum(counts) == 10**9
    assert min(counts) >= 1


def test_a_rank_that_is_a_thousand_times_slower_still_shows_its_speed() -> None:
    assert apportion(64, speeds(1000.0, 1.0, 1000.0)) == (32, 1, 31)
    assert apportion(64, [Cost(0.0, 0.001), Cost(900.0, 1.0)]) == (63, 1)


@pytest.mark.parametrize(
    "costs",
    [[], [Cost(0.0, 0.0)], [Cost(-1.0, 1.0)], [Cost(0.0, float("nan"))], [Cost(0, float("inf"))]],
)
def test_impossible_costs_are_refused(costs: list[Cost]) -> None:
    with pytest.raises(ValueError, match="can't be split by the costs"):
        apportion(8, costs)


# ---------------------------------------------------------------- measuring


def test_steps_of_one_size_show_a_speed_and_a_few_odd_ones_do_not_count() -> None:
    cost = fit([(10, 2.0), (10, 2.2), (10, 1.8), (10, 90.0), (11, 2.2)])
    assert cost == Cost(0.0, 0.2)
    assert fit([]) is None


def test_steps_of_two_sizes_show_the_fixed_part() -> None:
    cost = fit([(n, 0.3 + 0.01 * n) for n in (128, 128, 52, 52, 52)])
    assert cost is not None
    assert (cost.fixed_s, cost.sample_s) == (pytest.approx(0.3), pytest.approx(0.01))


def test_a_line_that_no_machine_has_is_bent_to_one_that_is_possible() -> None:
    """Slower with fewer samples (its speed changed meanwhile), or faster than nothing at none."""
    falling = fit([(100, 1.0), (50, 3.0)])
    assert falling is not None
    assert falling.sample_s > 0
    steep = fit([(100, 4.0), (50, 1.0)])
    assert steep is not None
    assert steep.fixed_s == 0


# ---------------------------------------------------------------- planning


def test_a_plan_changes_only_when_steps_become_shorter_by_the_threshold() -> None:
    assert replan(None, speeds(104.0, 100.0), 64, 0.05) == (
        (EQUAL, EQUAL),
        "new shares would gain 1%",
    )
    changed, reason = replan(None, speeds(300.0, 100.0), 64, 0.05)
    assert changed == tuple(speeds(300.0, 100.0))
    assert reason == "shares 48:16 make steps 2.00 times as fast"
    kept, _ = replan(changed, speeds(310.0, 98.0), 64, 0.05)
    assert kept == tuple(speeds(300.0, 100.0))
    equal, _ = replan(changed, speeds(100.0, 100.0), 64, 0.05)
    assert equal == tuple(speeds(100.0, 100.0))


def test_without_measurements_shares_stay_and_a_newcomer_counts_as_the_median() -> None:
    assert replan(None, [None, None], 8, 0.05) == (None, "")
    fast, slow, middle = speeds(400.0, 100.0, 200.0)
    plan, _ = replan(None, [fast, None, slow, middle], 70, 0.05)
    assert plan == (fast, middle, slow, middle)


@pytest.mark.parametrize("size", [90, 256])
def test_the_second_plan_is_the_best_where_a_step_has_a_fixed_cost(size: int) -> None:
    """Rank 1 needs half as long for a sample, and 200 ms for each step whatever its share."""
    costs = [Cost(0.0, 0.010), Cost(0.2, 0.005)]
    steps: list[list[tuple[int, float]]] = [[], []]
    plan: tuple[Cost, ...] | None = None
    for _ in range(3):
        counts = apportion(size, plan or (EQUAL, EQUAL))
        for rank, count in enumerate(counts):
            steps[rank] += [(count, costs[rank].seconds(count))] * 3
        plan, _ = replan(plan, [fit(mine) for mine in steps], size, 0.0)
    assert counts == pytest.approx(apportion(size, costs), abs=1)


def test_a_speed_that_changes_shows_once_it_lasts() -> None:
    """The window's median: a third of odd steps changes nothing, two thirds are the new speed."""
    old, new = [(64, 1.0)] * 12, [(64, 3.0)] * 12
    assert fit([*old[:8], *new[:4]]) == fit(old)
    assert fit([*old[:4], *new[:8]]) == fit(new)


def test_options_must_make_sense() -> None:
    with pytest.raises(ValueError, match="window"):
        ProportionalShares(window=0)
    with pytest.raises(ValueError, match="threshold"):
        ProportionalShares(threshold=-1)
