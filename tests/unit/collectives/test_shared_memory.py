"""What ranks that share memory choose, from what waiting and reading cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck._core.engine.shm.channel import MODEL, Costs, credible, small_bytes, spin_s


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
def test_both_ways_of_reducing_cost_the_same_at_the_threshold(world_size: int, cores: int) -> None:
    costs = Costs(wait_s=1e-6, turn_s=5e-6, wake_s=2e-5, byte_s=1e-10)
    w, n = world_size, small_bytes(world_size, cores, costs)
    turns = -(-w // cores)
    one_wait = costs.turn_s * turns if turns > 1 else costs.wait_s * w
    at_once = one_wait + turns * costs.byte_s * n * (1 + w)
    copied = n * (w - 1) / w
    in_slices = 2 * one_wait + turns * costs.byte_s * (copied + n + n / w + copied)
    assert at_once == pytest.approx(in_slices, rel=1e-3)


def test_dear_waits_and_cheap_bytes_favour_doing_all_at_once() -> None:
    plain = small_bytes(4, 2)
    dear = replace(MODEL, turn_s=3 * MODEL.turn_s)
    cheap = replace(MODEL, byte_s=MODEL.byte_s / 3)
    assert small_bytes(4, 2, dear) == pytest.approx(3 * plain, rel=1e-3)
    assert small_bytes(4, 2, cheap) == pytest.approx(3 * plain, rel=1e-3)


def test_ranks_spin_only_where_each_has_a_core() -> None:
    slow = replace(MODEL, wake_s=1e-3)
    assert spin_s(3, 2) == 0
    assert MODEL.wake_s < spin_s(2, 2) < spin_s(2, 2, slow) <= 50e-6


def test_what_a_busy_machine_measures_is_not_believed() -> None:
    assert credible(Costs(0, 0, 0, 0)) == MODEL
    assert credible(Costs(1.0, 1e-9, 2.0, float("nan"))) == MODEL
    measured = Costs(MODEL.wait_s / 2, MODEL.turn_s * 3, MODEL.wake_s / 3, MODEL.byte_s / 4)
    assert credible(measured) == measured
    disturbed = replace(measured, wait_s=1e-3)
    assert credible(disturbed) == replace(measured, wait_s=MODEL.wait_s)
