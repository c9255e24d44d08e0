"""The order of samples in shards: complete, stable, and kind to whoever reads the shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.training.sampler import Schedule
from potluck.training.shard_order import ShardOrder


def test_an_order_is_what_it_was_on_the_day_it_was_written_down() -> None:
    """Machines with different NumPy versions must agree, so the values are pinned."""
    order = ShardOrder((4, 4, 3, 5), lanes=2)
    assert order.indices(0, 0, 0, 16).tolist() == PINNED


PINNED = [7, 4, 5, 6, 3, 2, 0, 1, 10, 8, 9, 15, 11, 14, 12, 13]


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any),
    lanes=st.integers(1, 6),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=8),
    epoch=st.integers(0, 2),
)
def test_each_sample_of_an_epoch_is_in_one_share_whatever_batches_and_worlds(
    sizes: list[int], lanes: int, worlds: list[tuple[int, int]], epoch: int
) -> None:
    order = ShardOrder(tuple(sizes), lanes)
    schedule = Schedule(order.num_samples, 8, epoch + 1, seed=3, shards=order)
    committed, seen, step = epoch * order.num_samples, [], 0
    while committed < schedule.total:
        size, world_size = worlds[step % len(worlds)]
        batch = schedule.batch(committed, size)
        for rank in range(world_size):
            share = schedule.share(batch, rank, world_size)
            seen += share.indices.tolist() if share.weight else []
        committed += batch.size
        step += 1
    assert sorted(seen) == list(range(order.num_samples))


def test_epochs_and_seeds_have_different_orders() -> None:
    order = ShardOrder((16, 16, 16), lanes=2)
    orders = {tuple(order.indices(s, e, 0, 48)) for s in range(3) for e in range(3)}
    assert len(orders) == 9


def test_a_batch_mixes_as_many_shards_as_there_are_lanes_and_a_rank_reads_its_own() -> None:
    order = ShardOrder((100,) * 16, lanes=4)
    schedule = Schedule(1600, 40, seed=1, shards=order)
    read: list[set[int]] = [set(), set()]
    for committed in range(0, 1600, 40):
        batch = schedule.batch(committed)
        shards = schedule.indices(batch) // 100
        assert len(set(shards.tolist())) == 4
        for rank in range(2):
            read[rank] |= set((schedule.share(batch, rank, 2).indices // 100).tolist())
    assert read[0].isdisjoint(read[1])
    assert len(read[0]) == len(read[1]) == 8


def test_the_samples_of_a_shard_are_shuffled() -> None:
    order = ShardOrder((1000,), lanes=1)
    found = np.concatenate([order.indices(0, 0, start, 10) for start in range(0, 1000, 10)])
    assert abs(np.corrcoef(found, np.arange(1000))[0, 1]) < 0.1


def test_a_large_order_takes_no_memory_for_its_samples() -> None:
    """A permutation of 10^12 samples could not be held."""
    order = ShardOrder((10**9,) * 1000, lanes=8)
    found = order.indices(0, 0, 10**11, 64)
    assert len(set(found.tolist())) == 64
    assert found.max() < 10**12


def test_without_shuffle_the_shards_keep_their_order() -> None:
    order = ShardOrder((2, 3), lanes=2)
    schedule = Schedule(5, 5, shuffle=False, shards=order)
    assert schedule.indices(schedule.batch(0)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sizes", "lanes", "why"),
    [((), 1, "empty"), ((0, 0), 1, "empty"), ((3, -1), 1, "empty"), ((3,), 0, "at least 1")],
)
def test_orders_that_can_not_be(sizes: tuple[int, ...], lanes: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ShardOrder(sizes, lanes)


def test_a_schedule_of_other_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="num_samples is 4, but the shards have 3"):
        Schedule(4, 2, shards=ShardOrder((1, 2)))
