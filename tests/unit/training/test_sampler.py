"""The order of samples: stable, complete, and independent of who computes it."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.training import sampler
from potluck.training.sampler import STREAM, Batch, Schedule, StreamSchedule, order, shares
from potluck.training.shares import Cost


def test_an_order_is_what_it_was_on_the_day_it_was_written_down() -> None:
    """Machines with different NumPy versions must agree, so the values are pinned."""
    assert order(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert order(7, 3, 8).tolist() == [2, 5, 7, 3, 0, 6, 4, 1]


def test_epochs_and_seeds_have_different_orders() -> None:
    assert len({tuple(order(s, e, 50)) for s in range(4) for e in range(4)}) == 16


def test_every_sample_is_in_the_order_once() -> None:
    for num_samples in (0, 1, 2, 1797):
        assert sorted(order(5, 2, num_samples)) == list(range(num_samples))


def test_the_samples_of_a_huge_data_set_are_shuffled_without_a_list_of_them() -> None:
    """3e9 samples: an array of them would take 22 GiB, on each rank."""
    schedule = Schedule(3 * 10**9, 4096, epochs=2, seed=7)
    tracemalloc.start()
    first, last = (schedule.indices(schedule.batch(at)) for at in (0, 3 * 10**9 - 4096))
    second = schedule.indices(schedule.batch(3 * 10**9))
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    for found in (first, last, second):
        assert len(set(found.tolist())) == 4096
        assert 0 <= found.min() < 10**7
        assert 3 * 10**9 - 10**7 < found.max() < 3 * 10**9
    assert not set(first) & set(last)
    assert len(set(first) & set(second)) < 10
    # Machines must agree, so the values are pinned; a share is a part of them.
    assert first[:4].tolist() == [2438229690, 463873483, 2320608823, 2322260761]
    np.testing.assert_array_equal(schedule.share(schedule.batch(0), 1, 4).indices, first[1024:2048])


@settings(max_examples=20)
@given(size=st.integers(1, 3000), seed=st.integers(0, 5), batch=st.integers(1, 200))
def test_every_sample_is_drawn_once_also_where_the_order_is_not_sorted(
    size: int, seed: int, batch: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "MAX_SORTED", 0)
        schedule = Schedule(size, batch, seed=seed)
        found = [schedule.indices(schedule.batch(at)) for at in range(0, size, batch)]
    assert sorted(np.concatenate(found)) == list(range(size))


def test_an_order_cannot_be_changed_by_mistake() -> None:
    with pytest.raises(ValueError, match="read-only"):
        order(0, 0, 5)[0] = 1


def test_shares_are_contiguous_and_near_equal() -> None:
    assert shares(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert shares(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_a_rank_with_nothing_left_gets_one_sample_of_weight_zero() -> None:
    schedule = Schedule(num_samples=5, batch_size=3, seed=1)
    last = schedule.batch(3)
    assert (last.start, last.size) == (3, 2)
    whole = schedule.indices(last)
    parts = [schedule.share(last, rank, 4) for rank in range(4)]
    assert [part.weight for part in parts] == [0.5, 0.5, 0.0, 0.0]
    assert [part.num_samples for part in parts] == [1, 1, 0, 0]
    assert parts[3].indices.tolist() == whole[:1].tolist()


def test_without_shuffle_samples_keep_their_order() -> None:
    schedule = Schedule(num_samples=5, batch_size=2, epochs=2, shuffle=False)
    assert schedule.indices(schedule.batch(7)).tolist() == [2, 3]


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    epochs=st.integers(1, 3),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=20),
)
def test_over_any_losses_and_joins_every_sample_is_committed_exactly_once_per_epoch(
    num_samples: int, batch_size: int, epochs: int, worlds: list[tuple[int, bool]]
) -> None:
    """``worlds``: the world size of each step in turn, and whether that step is interrupted."""
    schedule = Schedule(num_samples, batch_size, epochs, seed=3)
    seen = [np.zeros(num_samples, int) for _ in range(epochs)]
    committed = 0
    steps = iter(worlds)
    while committed < schedule.total:
        world_size, interrupted = next(steps, (3, False))
        batch = schedule.batch(committed)
        if interrupted:
            continue
        parts = [schedule.share(batch, rank, world_size) for rank in range(world_size)]
        assert sum(part.weight for part in parts) == pytest.approx(1)
        for part in parts:
            seen[batch.epoch][part.indices[: part.num_samples]] += 1
        committed += batch.size
    assert all((count == 1).all() for count in seen)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"num_samples": 0, "batch_size": 1}, "empty"),
        ({"num_samples": 1, "batch_size": 0}, "batch_size"),
        ({"num_samples": 1, "batch_size": 1, "seed": -1}, "negative"),
    ],
)
def test_impossible_schedules_are_refused(arguments: dict[str, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Schedule(**arguments)


def test_a_stream_has_an_end_once_it_is_known() -> None:
    schedule = StreamSchedule(STREAM, 8, 2, shuffle=False)
    assert (schedule.total, schedule.aim) == (sys.maxsize, 0)
    schedule = schedule.after(0, 17, has_ended=False)
    assert schedule.batch(0) == Batch(0, 0, 8)
    assert [schedule.knows(at, 8) for at in (0, 8, 9, 10)] == [True, True, True, False]
    schedule = schedule.after(8, 12, has_ended=True)
    assert schedule.batch(16) == Batch(0, 16, 4)
    assert [schedule.find(at) for at in (0, 19, 20, 25)] == [(0, 0), (0, 19), (1, 0), (1, 5)]
    assert [schedule.knows(at, 8) for at in (16, 19, 20)] == [True, True, False]
    again = StreamSchedule(STREAM, 8, 2, shuffle=False).resumed(STREAM, schedule.ends)
    assert again.find(25) == (1, 5)
    assert isinstance(again, StreamSchedule)
    again = again.after(20, 3, has_ended=True)
    assert (again.total, again.aim) == (23, 23)
    assert again.after(16, 4, has_ended=True).ends == (20,)  # an end that was not agreed on
    assert StreamSchedule(STREAM, 8, 0, shuffle=False).total == 0


def test_a_share_of_a_stream_is_a_part_of_the_batch_in_rank_order() -> None:
    schedule = StreamSchedule(STREAM, 8, shuffle=False).after(0, 9, has_ended=True)
    parts = [schedule.share(schedule.batch(0), rank, 3).indices.tolist() for rank in range(3)]
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7]]
    costs = (Cost(0.0, 1.0), Cost(0.0, 3.0))
    fast, slow = (schedule.share(schedule.batch(0), rank, 2, costs) for rank in range(2))
    assert (fast.indices.tolist(), fast.weight) == ([0, 1, 2, 3, 4, 5], 0.75)
    assert slow.indices.tolist() == [6, 7]
    last = [schedule.share(schedule.batch(8), rank, 2) for rank in range(2)]
    assert [(each.indices.tolist(), each.weight) for each in last] == [([8], 1.0), ([8], 0.0)]
