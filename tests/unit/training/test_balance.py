"""Tasks of unlike cost among workers: each done once, and the last worker ends within the bound."""

from __future__ import annotations

from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import potluck

COSTS = st.lists(st.integers(0, 30), max_size=7)


def last_end(costs: list[int], tasks: list[list[int]], speeds: list[int]) -> float:
    pairs = zip(tasks, speeds, strict=True)
    return max(sum(costs[task] for task in mine) / speed for mine, speed in pairs)


def best_end(costs: list[int], speeds: list[int]) -> float:
    """Of all assignments the one whose last worker ends first."""
    workers = range(len(speeds))
    return min(
        last_end(
            costs, [[t for t, w in enumerate(chosen) if w == each] for each in workers], speeds
        )
        for chosen in product(workers, repeat=len(costs))
    )


@given(costs=COSTS, num_workers=st.integers(1, 3))
def test_equal_workers_end_within_grahams_bound_of_the_best(
    costs: list[int], num_workers: int
) -> None:
    tasks = potluck.balance_workload(costs, num_workers)
    assert sorted(chain(*tasks)) == list(range(len(costs)))
    speeds = [1] * num_workers
    bound = 4 / 3 - 1 / (3 * num_workers)
    assert last_end(costs, tasks, speeds) <= bound * best_end(costs, speeds) + 1e-9


@given(costs=COSTS, speeds=st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_unequal_workers_end_within_their_bound_of_the_best(
    costs: list[int], speeds: list[int]
) -> None:
    tasks = potluck.balance_workload(costs, len(speeds), speeds)
    assert sorted(chain(*tasks)) == list(range(len(costs)))
    bound = 2 - 2 / (len(speeds) + 1)
    assert last_end(costs, tasks, speeds) <= bound * best_end(costs, speeds) + 1e-9


def test_a_worker_of_twice_the_speed_gets_twice_the_work() -> None:
    assert potluck.balance_workload([1.0] * 6, 2, speeds=[2, 1]) == [[0, 1, 3, 4], [2, 5]]


@pytest.mark.parametrize(
    ("costs", "num_workers", "speeds", "message"),
    [
        ([1], 0, None, "num_workers is 0"),
        ([1, -2], 2, None, "the cost of task 1 is -2"),
        ([float("nan")], 2, None, "the cost of task 0 is nan"),
        ([1], 2, [1], "1 speeds for 2 workers"),
        ([1], 2, [1, 0], "positive and finite"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    costs: list[float], num_workers: int, speeds: list[float] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        potluck.balance_workload(costs, num_workers, speeds)
