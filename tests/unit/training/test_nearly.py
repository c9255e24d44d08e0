"""Hashes of numbers that may differ in their last bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.training.distance import distance
from potluck.training.nearly import nearly_equal, two_grids


@given(st.floats(1e-300, 1e300), st.integers(-200, 200))
@example(1.0, -1)  # the floats below a power of two lie closer together
@example(0.5, -200)
def test_neighbours_of_a_number_are_nearly_equal(number: float, steps: int) -> None:
    other = float((np.float64(number).view(np.int64) + steps).view(np.float64))
    for value, near in ((number, other), (-number, -other)):
        assert nearly_equal(two_grids({"lr": value}), two_grids({"lr": near}))


@pytest.mark.parametrize("left", [2, 10, 50, 5000])
def test_the_last_rates_of_a_schedule_by_two_libraries_are_nearly_equal(left: int) -> None:
    """Of the few bits that 1 + cos(x) keeps there, the last one is the library's."""
    found = []
    for neighbour in (-2.0, 1.0):
        cos = math.nextafter(math.cos(math.pi * (10_000 - left) / 10_000), neighbour)
        found.append({"lr": 0.1 * (1 + cos) / 2, "initial_lr": 0.1})
    assert nearly_equal(*map(two_grids, found))
    assert distance(*found, 1).excess < 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.1 * (1 + 1e-8)),
        (0.1, -0.1),
        ({"lr": 0.1}, {"eps": 0.1}),
        ([0.1, 0.2], [0.2, 0.1]),
        ((0.9, 0.999), (0.9, 0.99)),
        (True, False),
        (None, 0.0),
        (math.inf, 1e300),
    ],
)
def test_other_values_are_not(one: object, other: object) -> None:
    assert not nearly_equal(two_grids(one), two_grids(other))
    assert nearly_equal(two_grids(one), two_grids(one))


def test_a_tensor_is_its_numbers() -> None:
    assert two_grids(np.array([0.1, 0.2])) == two_grids([0.1, 0.2])
    assert two_grids([math.nan]) == two_grids([math.nan])
