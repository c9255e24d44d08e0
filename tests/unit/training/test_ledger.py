"""The ledger of rounds: every sample is dealt, and committed exactly once, whatever is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from potluck.training.ledger import Deal, cut, merged, total
from potluck.training.progress import Progress
from potluck.training.round_part import Arrivals
from potluck.training.sampler import Holding, OwnSchedule, Schedule


def test_a_part_of_a_deal_is_found_by_offsets_through_all_its_spans() -> None:
    deal = Deal(0, ((2, 5), (9, 10), (20, 24)))
    assert deal.size == 8
    assert deal.part(0, 8) == deal.spans
    assert deal.part(2, 5) == ((4, 5), (9, 10), (20, 21))
    assert deal.part(4, 4) == ()
    assert deal.rest([(0, 3), (4, 6)]) == ((9, 10), (22, 24))
    assert deal.rest([]) == deal.spans
    assert deal.rest([(0, 8)]) == ()


def test_samples_that_two_ranks_report_are_refused() -> None:
    deal = Deal(0, ((0, 10),))
    for done in ([(0, 5), (4, 10)], [(0, 11)], [(3, 4), (3, 4)]):
        with pytest.raises(ValueError, match="reported twice"):
            deal.rest(done)


def test_spans_are_merged_and_cut() -> None:
    assert merged([(5, 7), (0, 2), (2, 5), (9, 10)]) == ((0, 7), (9, 10))
    assert cut(3, 13, 3) == [(3, 6), (6, 9), (9, 13)]
    assert cut(3, 5, 4) == [(3, 4), (4, 5)]
    assert cut(3, 3, 4) == []


def test_a_round_is_no_larger_for_samples_that_are_owed_which_come_first() -> None:
    progress = Progress(Schedule(num_samples=30, batch_size=4))
    progress.deal(8)
    progress.settle([(0, 3)], 2, 0.5)
    assert progress.owed == ((3, 8),)
    assert progress.deal(8).spans == ((3, 11),), "five that are owed, and three new ones"
    progress.settle([], 2, 0.5)
    assert progress.deal(6).spans == ((3, 9),)
    assert progress.owed == ((9, 11),)


@pytest.mark.parametrize("case", range(30))
def test_over_random_losses_each_sample_is_committed_once_per_epoch(case: int, seed: int) -> None:
    """Also with two rounds on their way at a time."""
    rng = random.Random(seed)
    schedule = Schedule(rng.randint(1, 50), rng.randint(1, 9), rng.randint(1, 3), seed=4)
    progress = Progress(schedule)
    seen = np.zeros(schedule.num_samples, np.int64)
    while not progress.done:
        progress.deal(rng.randint(1, 20))
        if not progress.is_epoch_dealt and rng.random() < 0.5:
            progress.deal(rng.randint(1, 20))
        while progress.deals:
            size = progress.deals[0].size
            edges = sorted(rng.randint(0, size) for _ in range(4))
            done = rng.choice([[(0, size)], [(edges[0], edges[1]), (edges[2], edges[3])], []])
            deal = progress.settle(done, 1, 0.5)
            for start, stop in done:
                seen[schedule.pick(deal.epoch, deal.part(start, stop))] += 1
            assert progress.committed == seen.sum()
        copy = Progress(schedule)
        copy.restore(progress.capture())
        assert copy == progress
    assert (seen == schedule.epochs).all()
    assert total(progress.owed) == 0


def test_own_samples_that_are_owed_for_more_than_one_round_count_once() -> None:
    """Rank 1 computes nothing until all of the epoch is dealt; a round is a third of an epoch."""
    held = [Holding(6), Holding(6)]
    schedule = OwnSchedule(12, 4, holding=held[0]).for_group(held, afresh=True)
    progress = Progress(schedule, taken=[(0, 6), (0, 6)])

    def round_(computes: list[bool]) -> list[tuple[int, int]]:
        deal = progress.deal(4)
        dealt = schedule.dealt(deal, progress.taken, 2)
        done = [part if each else (0, 0) for part, each in zip(dealt, computes, strict=True)]
        progress.settle(done, 1, 0.5)
        return done

    for part in ((0, 2), (2, 4), (4, 6)):
        assert round_([True, False]) == [part, (0, 0)]
    assert progress.owed == ((1, 12),), "up to position 1 it has no sample"
    assert [round_([True, True])[1] for _ in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert progress.done
    assert progress.owed == ()
    assert progress.taken == [(0, 6), (0, 6)], "of the next epoch"


def test_a_deadline_follows_the_arrivals() -> None:
    arrivals = Arrivals()
    assert arrivals.deadline_s(3) is None
    arrivals.add([1.0, 1.2, 0.8, 5.0, 0.0])
    middle, deviation = 1.1, 0.2  # without the rank that did nothing
    assert arrivals.deadline_s(3) == pytest.approx(middle + 3 * deviation)
    assert arrivals.longest_s == 5.0
    for _ in range(4):
        arrivals.add([2.0, 2.0, 2.0])
    assert arrivals.deadline_s(3) == pytest.approx(2.2), "equal ranks get a tenth"
