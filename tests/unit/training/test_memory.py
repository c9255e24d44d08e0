"""What runs out of memory, and how much is computed at once afterwards."""

from __future__ import annotations

import math

import numpy as np
import pytest

from potluck.training.memory import Cap, Parts, is_out_of_memory, release
from potluck.training.sampler import Schedule, Share
from potluck.training.shares import EQUAL, Cost, apportion, capped, num_parts, replan


def bounded(*most: int) -> list[Cost]:
    return [Cost(0.0, 1.0, each) for each in most]


def test_no_rank_gets_more_than_its_bound_and_the_others_compute_the_rest() -> None:
    assert apportion(30, bounded(0, 4, 0)) == (13, 4, 13)
    assert apportion(30, bounded(20, 4, 6)) == (20, 4, 6)
    fast = [Cost(0.0, 0.1, 12), Cost(0.0, 1.0), Cost(0.0, 1.0)]
    assert apportion(32, fast) == (12, 10, 10)


def test_a_batch_that_does_not_fit_gives_each_rank_a_multiple_of_its_bound() -> None:
    assert num_parts(64, bounded(12, 7, 5)) == 3
    counts = apportion(64, bounded(12, 7, 5))
    assert sum(counts) == 64
    assert all(count <= 3 * most for count, most in zip(counts, (12, 7, 5), strict=True))
    assert num_parts(24, bounded(12, 7, 5)) == num_parts(64, bounded(12, 0, 5)) == 1
    assert apportion(5, bounded(1)) == (5,)


def test_no_other_split_within_the_bounds_ends_sooner() -> None:
    costs = [Cost(0.0, 1.0, 3), Cost(1.5, 0.5, 4), Cost(0.2, 2.0, 0)]
    for size in range(3, 13):
        counts = apportion(size, costs)
        assert sum(counts) == size
        assert counts[0] <= 3
        assert counts[1] <= 4
        ends = [
            max(cost.seconds(count) for cost, count in zip(costs, way, strict=True))
            for first in range(1, 4)
            for second in range(1, 5)
            for way in [(first, second, size - first - second)]
            if way[2] >= 1
        ]
        mine = max(cost.seconds(count) for cost, count in zip(costs, counts, strict=True))
        assert mine == pytest.approx(min(ends))


def test_bounds_hold_for_equal_shares_and_for_those_by_speed() -> None:
    assert capped(None, ()) is None
    assert capped(None, (0, 0)) is None
    assert capped(None, (0, 3)) == (EQUAL, Cost(0.0, 1.0, 3))
    plan, reason = replan(None, [Cost(0.0, 0.1), Cost(0.0, 1.0)], 22, 0.05, (15, 0))
    assert plan == (Cost(0.0, 0.1, 15), Cost(0.0, 1.0, 0))
    assert reason.startswith("shares 15:7 ")


def test_a_share_in_parts_has_each_sample_once_and_its_weight_in_all() -> None:
    share = Schedule(40, 20).share(Schedule(40, 20).batch(0), 0, 2)
    parts = share.parts(4)
    assert [len(part.indices) for part in parts] == [3, 3, 4]
    assert np.concatenate([part.indices for part in parts]).tolist() == share.indices.tolist()
    assert math.fsum(part.weight for part in parts) == pytest.approx(share.weight, abs=1e-15)
    assert share.parts(0) == share.parts(10) == [share]
    idle = Share(0, np.zeros(1, np.int64), 0.0)
    assert idle.parts(1) == [idle]


def test_the_loss_of_a_step_is_the_mean_over_the_samples_of_its_parts() -> None:
    parts = Parts(Share(0, np.arange(5), 0.5), 2)
    for number, part in enumerate(parts):
        assert (parts.is_first, parts.is_last) == (number == 0, number == 2)
        mean = parts.mean("", float(len(part.indices)))
        assert math.isnan(parts.mean("never", math.nan))
        parts.mean("once", math.nan if number else 7.0)
    assert mean == pytest.approx((1 + 2 * 2 + 2 * 2) / 5)
    assert parts.mean("once", math.nan) == 7.0
    whole = Parts(Share(0, np.arange(3), 0.5))
    assert [whole.mean("", 0.1) for _ in whole] == [0.1]


def test_a_cap_falls_to_what_has_fitted_or_to_half_and_never_below_one() -> None:
    cap = Cap()
    assert cap.ran_out(16)
    assert cap.most == 8
    cap.fits(6)
    cap.fits(5)
    assert cap.ran_out(8)
    assert cap.most == 6
    assert cap.ran_out(6)
    assert cap.most == 3
    cap.fits(3)
    assert cap.ran_out(3), "another program takes memory: what has fitted fits no more"
    assert cap.most == 1
    assert not cap.ran_out(1)


def test_a_cap_falls_to_what_is_predicted_to_fit() -> None:
    cap = Cap()
    assert cap.ran_out(16, 13)
    assert cap.most == 13
    assert cap.ran_out(13, 20), "the prediction was wrong"
    assert cap.most == 6


def test_each_shortage_lowers_the_cap() -> None:
    for fitted in range(20):
        cap, steps, at_once = Cap(fitted=fitted), 0, 19
        while cap.ran_out(at_once):
            assert 1 <= cap.most < at_once
            at_once, steps = cap.most, steps + 1
        assert steps <= 6


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate"),
            False,
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("the label 'out of memory' is unknown"), False),
    ],
)
def test_which_errors_say_that_no_memory_was_left(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_an_error_of_a_library_that_was_raised_from_one() -> None:
    error = ValueError("no batch")
    assert not is_out_of_memory(error)
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)
    error.__cause__.__cause__ = error
    assert not is_out_of_memory(KeyError())


def test_what_a_failed_step_held_is_released() -> None:
    class Large:
        alive = 0

        def __init__(self) -> None:
            Large.alive += 1

        def __del__(self) -> None:
            Large.alive -= 1

    def compute() -> None:
        held = Large()
        raise MemoryError(str(held))

    try:
        compute()
    except MemoryError as error:
        assert Large.alive == 1
        release(error)
        assert Large.alive == 0
