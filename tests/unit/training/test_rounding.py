"""The distance of two states in units of what rounding explains, and hashes that ignore it."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.training.rounding import distance, nearly_equal, tolerant_hash

DTYPES = ["float16", "float32", "float64", "bfloat16"]


def normal(dtype: Any, size: int = 1000) -> Any:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.random.default_rng(0).standard_normal(size).astype(kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_units_in_the_last_place_are_rounding(dtype: str) -> None:
    mine = {"w": normal(dtype)}
    signs = np.random.default_rng(1).integers(-4, 5, 1000)
    apart = mine["w"].astype(np.float64) * (1 + signs * float(ml_dtypes.finfo(mine["w"].dtype).eps))
    found = distance({"w": apart.astype(mine["w"].dtype)}, mine, num_steps=1)
    assert 0 < found.excess < 1
    assert found.where == "w"
    assert "apart, where the largest value is" in found.what


@pytest.mark.parametrize(("dtype", "moved"), [("float64", 1e-9), ("float32", 0.02)])
def test_an_update_of_ones_own_is_not(dtype: str, moved: float) -> None:
    mine = normal(dtype)
    theirs = mine.copy()
    theirs[7] += moved
    assert distance([mine], [theirs], num_steps=50).excess > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_never_explains_a_quarter(dtype: str) -> None:
    mine = normal(dtype)
    theirs = mine.copy()
    theirs[7] += np.abs(mine.astype(np.float64)).max() / 3
    assert distance([mine], [theirs], num_steps=10**12).excess > 1


def test_more_steps_explain_more() -> None:
    mine, theirs = normal("float32"), normal("float32")
    theirs[3] += 1e-4
    found = [distance([mine], [theirs], num_steps).excess for num_steps in (0, 1, 100, 10_000)]
    assert found[0] == found[1] == pytest.approx(10 * found[2]) == pytest.approx(100 * found[3])


def test_of_several_tensors_the_farthest_apart_is_named() -> None:
    mine = {"a": [normal("float32"), normal("float32")], "b": normal("float32")}
    theirs = {"a": [mine["a"][0], mine["a"][1] * 1.001], "b": mine["b"] * 1.0001}
    assert distance(mine, theirs, 1).where == "a/1"


def test_equal_values_that_are_not_finite_are_equal() -> None:
    mine = np.array([math.nan, math.inf, -math.inf, 1.0], np.float32)
    theirs = mine.copy()
    theirs.view(np.int32)[0] ^= 1  # another NaN
    assert distance([mine], [theirs], 1).excess == 0
    theirs[3] = np.nextafter(np.float32(1), np.float32(2))
    assert 0 < distance([mine], [theirs], 1).excess < 1
    for value in (math.nan, math.inf, -math.inf):
        theirs[3] = value
        found = distance([mine], [theirs], 1)
        assert (found.excess, found.what) == (math.inf, "NaN or inf in one of them")


def test_a_zero_may_be_what_another_machine_rounds_down_to_it() -> None:
    tiny = np.full(4, 1e-45, np.float32)
    assert distance([tiny], [np.zeros(4, np.float32)], 1).excess < 1


def test_rates_may_differ_in_their_last_bits_only() -> None:
    rate = 0.05 * (1 + math.cos(0.3))
    near = {"lr": math.nextafter(rate, 1), "foo": math.nan}
    found = distance({"lr": rate, "foo": math.nan}, near, 1)
    assert 0 < found.excess < 1e-6
    assert (found.where, found.what) == ("lr", f"{rate!r}, not {near['lr']!r}")
    assert distance({"lr": math.inf}, {"lr": math.inf}, 1).excess == 0
    assert distance({"lr": 0.0}, {"lr": 1e-30}, 1).excess == math.inf
    found = distance({"lr": rate}, {"lr": rate * 1.001}, 1)
    assert (found.excess, found.where) == (math.inf, "lr")
    assert repr(rate) in found.what


@pytest.mark.parametrize(
    ("mine", "theirs", "what"),
    [
        ({"a": 1}, {"a": 2}, "1, not 2"),
        ({"a": 1}, {"a": 1.0}, "1, not 1.0"),
        ({"a": True}, {"a": 1}, "True, not 1"),
        ({"a": None}, {"b": None}, "missing in one of them"),
        ({"a": [1.0]}, {"a": [1.0, 2.0]}, "missing in one of them"),
        ({"a": normal("float32")}, {"a": 1.0}, "not 1.0"),
        ({"a": normal("float32")}, {"a": normal("float64")}, "of another dtype or shape"),
        ({"a": normal("float32", 3)}, {"a": normal("float32", 4)}, "of another dtype or shape"),
        ({"a": np.array([1, 2])}, {"a": np.array([1, 3])}, "unequal, and of dtype int64"),
    ],
)
def test_what_is_no_rounding(mine: Any, theirs: Any, what: str) -> None:
    found = distance(mine, theirs, 1)
    assert found.excess == math.inf
    assert what in found.what


# ------------------------------------------------------------ tolerant hashes


@given(st.floats(1e-300, 1e300), st.integers(-200, 200))
@example(1.0, -1)  # the floats below a power of two lie closer together
@example(0.5, -200)
def test_neighbours_of_a_number_are_nearly_equal(number: float, steps: int) -> None:
    other = float((np.float64(number).view(np.int64) + steps).view(np.float64))
    for value, near in ((number, other), (-number, -other)):
        assert nearly_equal(tolerant_hash({"lr": value}), tolerant_hash({"lr": near}))


@pytest.mark.parametrize("left", [2, 10, 50, 5000])
def test_the_last_rates_of_a_schedule_by_two_libraries_are_nearly_equal(left: int) -> None:
    """Of the few bits that 1 + cos(x) keeps there, the last one is the library's."""
    found = []
    for neighbour in (-2.0, 1.0):
        cos = math.nextafter(math.cos(math.pi * (10_000 - left) / 10_000), neighbour)
        found.append({"lr": 0.1 * (1 + cos) / 2, "initial_lr": 0.1})
    assert nearly_equal(*map(tolerant_hash, found))
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
def test_values_that_differ_by_more_are_not_nearly_equal(one: object, other: object) -> None:
    assert not nearly_equal(tolerant_hash(one), tolerant_hash(other))
    assert nearly_equal(tolerant_hash(one), tolerant_hash(one))


def test_a_tensor_is_its_numbers() -> None:
    assert tolerant_hash(np.array([0.1, 0.2])) == tolerant_hash([0.1, 0.2])
    assert tolerant_hash([math.nan]) == tolerant_hash([math.nan])


def test_hyperparameters_that_one_release_does_not_know_do_not_count() -> None:
    mine = {"hyperparameters": [[{"lr": 0.1, "decoupled": False, "betas": (0.9, 0.99)}]]}
    theirs = {"hyperparameters": [[{"lr": 0.1, "betas": (0.9, 0.99), "fused": None}]]}
    assert distance(mine, theirs, 1).excess == 0
    theirs["hyperparameters"][0][0]["lr"] = 0.2
    assert distance(mine, theirs, 1).where == "hyperparameters/0/0/lr"
    two = {"hyperparameters": [[*mine["hyperparameters"][0], {"lr": 0.1}]]}
    assert distance(mine, two, 1).where == "hyperparameters/0/1/lr"
    assert distance({"w": 1.0}, {"v": 1.0}, 1).what == "missing in one of them"
