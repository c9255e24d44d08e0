"""Schedules of ranks that have samples of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from potluck.errors import ConfigurationError
from potluck.training.sampler import Batch, Holding, OwnSchedule, Schedule, describe_change


def world(sizes: list[int], batch_size: int, epochs: int = 1) -> list[OwnSchedule]:
    """The schedules of the ranks of a group with these numbers of samples."""
    held = [Holding(size) for size in sizes]
    found = []
    for own in held:
        schedule = OwnSchedule(max(own.num, 1), batch_size, epochs, holding=own)
        agreed = schedule.for_group(held, afresh=True)
        assert isinstance(agreed, OwnSchedule)
        found.append(agreed)
    return found


def epoch_of(ranks: list[OwnSchedule], start: int = 0) -> list[list[int]]:
    """The samples of each rank in the rest of an epoch; checks each step on the way."""
    taken: list[list[int]] = [[] for _ in ranks]
    at = start
    while at < ranks[0].num_samples:
        [batch] = {schedule.batch(at) for schedule in ranks}
        shares = [each.share(batch, rank, len(ranks)) for rank, each in enumerate(ranks)]
        assert sum(share.weight for share in shares) == pytest.approx(1)
        total = sum(share.num_samples for share in shares)
        counts = ranks[0].counts([(batch.start, batch.start + batch.size)], len(ranks))
        assert counts == tuple(share.num_samples for share in shares)
        for share, mine, schedule in zip(shares, taken, ranks, strict=True):
            assert share.weight == pytest.approx(share.num_samples / total)
            assert len(share.indices) == max(share.num_samples, min(1, schedule.num_stored))
            mine += share.indices[: share.num_samples].tolist()
        at += batch.size
    return taken


@pytest.mark.parametrize(
    ("sizes", "batch_size"),
    [([350] * 4, 64), ([10, 0, 3, 100], 16), ([1, 1, 1], 1), ([7], 3), ([5, 4], 100), ([0, 2], 1)],
)
def test_each_sample_counts_once_per_epoch_whatever_the_sizes(
    sizes: list[int], batch_size: int
) -> None:
    taken = epoch_of(world(sizes, batch_size))
    assert [sorted(mine) for mine in taken] == [list(range(size)) for size in sizes]


def test_equal_parts_make_steps_of_exactly_the_batch_size() -> None:
    ranks = world([320] * 4, 64)
    assert ranks[0].counts([(64, 128)], 4) == (16, 16, 16, 16)
    assert [ranks[0].batch(at).size for at in (0, 1216)] == [64, 64]


def test_one_rank_has_the_order_of_a_plain_schedule() -> None:
    [alone] = world([23], 5, epochs=2)
    plain = Schedule(23, 5, 2)
    for at in range(0, 46, 5):
        batch = plain.batch(at)
        assert alone.batch(at) == batch
        np.testing.assert_array_equal(
            alone.share(batch, 0, 1).indices, plain.share(batch, 0, 1).indices
        )


def test_the_others_go_on_where_they_were_when_a_rank_leaves_or_comes() -> None:
    before = world([40, 25, 7], 9)
    at, taken = 0, [[], []]  # type: ignore[var-annotated]
    while at < 27:
        batch = before[0].batch(at)
        for place, rank in enumerate((0, 2)):
            share = before[rank].share(batch, rank, 3)
            taken[place] += share.indices[: share.num_samples].tolist()
        at += batch.size
    held = [Holding(40), Holding(7)]
    after = [before[rank].for_group(held, afresh=False) for rank in (0, 2)]
    rest = epoch_of([each for each in after if isinstance(each, OwnSchedule)], at)
    assert sorted(taken[0] + rest[0]) == list(range(40))
    assert sorted(taken[1] + rest[1]) == list(range(7))
    newcomer = replace(before[0], holding=Holding(12), held=(40, 7, 12))
    share = newcomer.share(Batch(0, at, 72 - at), 2, 3)
    assert share.num_samples == 12 - 12 * at // 72, "the part of the epoch that is left"


def test_groups_that_can_not_train_together_are_refused_with_the_rank() -> None:
    own = OwnSchedule(5, 2, holding=Holding(5, 1, 77, "float32 [3], int64 []"))
    with pytest.raises(ConfigurationError, match='rank 1 has samples="all", this rank has'):
        own.for_group([Holding(5), Holding()], afresh=True)
    with pytest.raises(ConfigurationError, match='rank 0 has samples="own", this rank has'):
        Schedule(5, 2).for_group([Holding(5), Holding()], afresh=True)
    with pytest.raises(ValueError, match="no worker has a sample"):
        own.for_group([Holding(0), Holding(0)], afresh=True)
    with pytest.raises(ValueError, match=r"of rank 1 are of another shape .* float32 \[3\], int64"):
        own.for_group([own.holding, Holding(5, 1, 78)], afresh=True)
    assert own.for_group([own.holding, Holding(0)], afresh=True).num_samples == 5


def test_a_change_of_the_samples_is_told() -> None:
    assert describe_change([4, 3], [4, 3]) == ""
    assert describe_change([4, 3, 5], [4, 3]) == (
        "5 samples left with a lost worker: training goes on with 7 samples of 2 workers"
    )
    assert describe_change([4], [4, 3]).startswith("3 samples came with a worker")
