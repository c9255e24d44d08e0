"""Commits as tables: votes in, outcome out; standings in, resolution out."""

from __future__ import annotations

import math

import pytest

from potluck._core.context.commit import Standing, Vote, reconcile, tally

# ---------------------------------------------------------------- one vote per rank


def test_all_ok_is_a_commit() -> None:
    outcome = tally([Vote(7), Vote(7), Vote(7)])
    assert outcome.committed
    assert outcome.reason == ""
    assert outcome.diverged == ()


def test_one_no_is_none() -> None:
    outcome = tally([Vote(7), Vote(7, ok=False), Vote(7), Vote(7, ok=False)])
    assert not outcome.committed
    assert outcome.reason == "rank 1, 3 voted no"


def test_ranks_at_different_steps_commit_nothing() -> None:
    outcome = tally([Vote(7), Vote(8)])
    assert not outcome.committed
    assert outcome.reason == "ranks vote on different steps: rank 0 at 7, rank 1 at 8"


@pytest.mark.parametrize(
    ("hashes", "diverged"),
    [
        ([5, 5, 5], ()),
        ([0, 0], ()),
        ([5, 5, 6], (2,)),
        ([6, 5, 5], (0,)),
        ([5, 6], (1,)),
        ([6, 5, 7], (1, 2)),
        ([5, 6, 6, 5], (1, 2)),
        ([5, 0, 5], (1,)),
    ],
)
def test_the_ranks_in_the_minority_have_diverged(
    hashes: list[int], diverged: tuple[int, ...]
) -> None:
    outcome = tally([Vote(1, state_hash=value) for value in hashes])
    assert outcome.diverged == diverged
    assert outcome.committed == (not diverged)


def test_everyone_hears_of_the_newest_epoch() -> None:
    assert tally([Vote(1, next_epoch=3), Vote(1, next_epoch=9), Vote(1)]).next_epoch == 9


def test_the_loss_is_weighted_and_who_has_none_does_not_count() -> None:
    votes = [
        Vote(1, loss=1.0, weight=30),
        Vote(1, loss=4.0, weight=10),
        Vote(1),
        Vote(1, loss=99.0, weight=0.0),
    ]
    assert tally(votes).loss == pytest.approx(1.75)
    assert math.isnan(tally([Vote(1), Vote(1)]).loss)


def test_the_loss_is_the_same_in_all_versions_of_python() -> None:
    votes = [Vote(1, loss=loss) for loss in (1.0, 1e100, -1e100)]
    assert tally(votes).loss == 0  # sum() gives 1 from Python 3.12 on


# ---------------------------------------------------------------- after a loss

NEWCOMER = Standing(-1)

STORIES = [
    # who stands where                         committed, history, apply, drop, source, receivers
    ("nobody has a state", [NEWCOMER, NEWCOMER], (0, 0, (), (), -1, (0, 1))),
    (
        "all idle between steps",
        [Standing(5, 2), Standing(5, 2)],
        (5, 2, (), (), 0, ()),
    ),
    (
        "a newcomer joins",
        [Standing(5, 2), Standing(5, 2), NEWCOMER],
        (5, 2, (), (), 0, (2,)),
    ),
    (
        "the newcomer has the lowest rank: the state still comes from who has it",
        [NEWCOMER, Standing(5, 2)],
        (5, 2, (), (), 1, (0,)),
    ),
    (
        "a member died before anyone voted",
        [Standing(5, 2), Standing(5, 2), Standing(5, 2)],
        (5, 2, (), (), 0, ()),
    ),
    (
        "all survivors voted ok and none heard the outcome: the dead may have, so it counts",
        [Standing(5, 2, 2), Standing(5, 2, 2)],
        (6, 2, (0, 1), (), 0, ()),
    ),
    (
        "one had not voted yet, so nobody can have heard a commit: all run it again",
        [Standing(5, 2, 2), Standing(5, 2)],
        (5, 2, (), (0,), 0, ()),
    ),
    (
        "one heard that it was committed: those that hold it apply it",
        [Standing(6, 2), Standing(5, 2, 2), Standing(5, 2, 2)],
        (6, 2, (1, 2), (), 0, ()),
    ),
    (
        "one has not heard of the last step and so not voted on the next: it is run again",
        [Standing(6, 2, 2), Standing(5, 2, 2)],
        (6, 2, (1,), (0,), 0, ()),
    ),
    (
        "it was committed, and one who holds it comes first",
        [Standing(5, 2, 2), Standing(6, 2)],
        (6, 2, (0,), (), 0, ()),
    ),
    (
        "the first step of all",
        [Standing(0, 0, 1), Standing(0, 0, 1)],
        (1, 1, (0, 1), (), 0, ()),
    ),
    (
        "the first step of all was committed; one had not heard",
        [Standing(1, 1), Standing(0, 0, 1)],
        (1, 1, (1,), (), 0, ()),
    ),
    (
        "two steps behind: not a matter of one outcome, so it gets the state",
        [Standing(7, 2), Standing(5, 2, 2)],
        (7, 2, (), (), 0, (1,)),
    ),
    (
        "a step held since an earlier epoch is not the one that was committed later",
        [Standing(6, 3), Standing(5, 2, 2)],
        (6, 3, (), (), 0, (1,)),
    ),
    (
        "a stopped worker comes back with a step of an epoch long over",
        [Standing(9, 4), Standing(9, 4), Standing(5, 2, 2)],
        (9, 4, (), (), 0, (2,)),
    ),
    (
        "more steps in an older history do not win: (epoch, step) orders histories",
        [Standing(8, 2), Standing(6, 3)],
        (6, 3, (), (), 1, (0,)),
    ),
    (
        "the returning member is the most senior, and still receives",
        [Standing(8, 2, 2), Standing(6, 3), Standing(6, 3)],
        (6, 3, (), (), 1, (0,)),
    ),
    (
        "all voted ok, and a newcomer joins in the same reform",
        [Standing(5, 2, 2), Standing(5, 2, 2), NEWCOMER],
        (6, 2, (0, 1), (), 0, (2,)),
    ),
    (
        "steps held since different epochs can't be the same outcome: neither counts",
        [Standing(5, 2, 3), Standing(5, 2, 4)],
        (5, 2, (), (0, 1), 0, ()),
    ),
    (
        "alone after losing all others amid a vote",
        [Standing(5, 2, 2)],
        (6, 2, (0,), (), 0, ()),
    ),
]


@pytest.mark.parametrize(
    ("standings", "wanted"), [story[1:] for story in STORIES], ids=[story[0] for story in STORIES]
)
def test_members_become_equal_again(
    standings: list[Standing], wanted: tuple[int, int, tuple, tuple, int, tuple]
) -> None:
    resolution = reconcile(standings)
    assert (
        resolution.committed,
        resolution.history,
        resolution.apply,
        resolution.drop,
        resolution.source,
        resolution.receivers,
    ) == wanted
    assert resolution.reason


def test_whoever_ends_somewhere_ends_up_to_date() -> None:
    """Every rank is ready, applies, drops what it holds, or receives; and the source is ready."""
    possible = [NEWCOMER] + [
        Standing(committed, history, pending)
        for committed in (4, 5)
        for history in (1, 2)
        for pending in (0, 1, 2)
        if pending == 0 or pending >= history
    ]
    for a in possible:
        for b in possible:
            for c in possible:
                standings = [a, b, c]
                result = reconcile(standings)
                assert not set(result.apply) & set(result.drop)
                assert not set(result.receivers) & {*result.apply, *result.drop}
                for rank, each in enumerate(standings):
                    if rank in result.receivers:
                        continue
                    steps = each.committed + (rank in result.apply)
                    assert steps == result.committed, (standings, result)
                    holds = each.pending > 0
                    assert holds == (rank in result.apply or rank in result.drop)
                if result.source >= 0:
                    assert result.source not in result.receivers
                for rank in result.apply:
                    assert standings[rank].pending == result.history, (standings, result)


def test_one_rank_that_was_interrupted_ends_the_training_of_all_once_a_step_counts() -> None:
    assert tally([Vote(7), Vote(7, ends=True), Vote(7)]).ends
    assert not tally([Vote(7), Vote(7)]).ends
    assert not tally([Vote(7, ok=False), Vote(7, ends=True)]).ends, "it is asked again"
