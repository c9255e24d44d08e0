"""How long a round waits: decided without a clock."""

from __future__ import annotations

import pytest

from potluck.federated import Patience
from potluck.federated.patience import Deadlines, Gathering, exchange_s


def test_a_deadline_follows_the_answers_so_far() -> None:
    deadlines = Deadlines(Patience(first_deadline_s=100, least_s=1, spread=5))
    assert deadlines.next_s() == 100
    deadlines.note([8.0, 10.0, 12.0], 0, 100)
    assert deadlines.next_s() == 10 + 5 * 2
    deadlines.note([10.0] * 9, 0, 20)
    assert deadlines.next_s() == 10 + 5 * 1  # no deviation: a tenth of the median
    quick = Deadlines(Patience())
    quick.note([0.01, 0.01], 0, 600)
    assert quick.next_s() == 5


def test_clients_that_all_became_slow_are_waited_for_longer_and_longer() -> None:
    deadlines = Deadlines(Patience(least_s=1))
    deadlines.note([2.0] * 10, 0, 600)
    seen = []
    for _ in range(8):
        seen.append(deadlines.next_s())
        deadlines.note([], 10, seen[-1])
    assert seen[0] == 3.0
    assert seen[-1] > 30


def test_a_fixed_deadline_does_not_follow_the_answers() -> None:
    """With differential privacy one client's time must not decide who is in a later sum."""
    deadlines = Deadlines(Patience(first_deadline_s=40.0), is_fixed=True)
    deadlines.note([1.0, 2.0], 1, 40.0)
    assert deadlines.next_s() == 40.0


def test_a_given_deadline_stays() -> None:
    deadlines = Deadlines(Patience(deadline=7))
    deadlines.note([100.0], 3, 7)
    assert deadlines.next_s() == 7


def test_k_of_n_is_a_fraction_or_a_number() -> None:
    assert Patience(wait_for=0.8).enough(10) == 8
    assert Patience(wait_for=0.7).enough(10) == 7
    assert Patience(wait_for=0.75).enough(10) == 8
    assert Patience(wait_for=1.0).enough(10) == 10
    assert Patience(wait_for=3).enough(10) == 3
    assert Patience(wait_for=1).enough(10) == 1
    assert Patience(wait_for=30).enough(10) == 10


def test_how_few_updates_still_count() -> None:
    assert Patience().fewest(10) == 5
    assert Patience().fewest(1) == 1
    assert Patience().fewest(0) == 1
    assert Patience(min_clients=5, min_updates=3).fewest(10) == 3
    assert Patience().fewest(10, least=7) == 7  # the aggregation's own bound


def test_a_gathering_ends_when_enough_have_answered_or_nobody_else_can() -> None:
    gathering = Gathering("abcd", enough=2)
    gathering.answered("b", 1, 0.5)
    gathering.answered("b", 2, 0.6)  # twice
    gathering.answered("x", 3, 0.7)  # was not asked
    assert gathering.answers == {"b": 1}
    assert not gathering.is_over
    gathering.answered("a", None, 0.9)
    assert gathering.is_over
    gathering.end(2.0)
    assert list(gathering.answers.items()) == [
        ("a", None),
        ("b", 1),
    ]  # in the order of the question
    assert gathering.times == [0.5, 0.9]
    assert gathering.missing == dict.fromkeys("cd", "enough others came first")
    assert gathering.num_late == 0
    broken = Gathering("ab", enough=2)
    broken.answered("a", None, 0.1, "killed")
    broken.answered("b", None, 0.1, "killed")
    assert broken.is_over
    assert not broken.answers
    assert broken.missing == dict.fromkeys("ab", "killed")
    late = Gathering("abc", enough=3)
    late.answered("a", 1, 0.1)
    late.end(2.0)
    assert late.missing == dict.fromkeys("bc", "no answer within 2.0 s")
    assert late.num_late == 2


def test_the_exchanges_of_secure_aggregation_share_a_rounds_deadline() -> None:
    assert exchange_s("before", 8.0, 0.0) == 2.0
    assert exchange_s("before", 8.0, 2.0) == 2.0
    assert exchange_s("training", 8.0, 3.5) == 4.5
    assert exchange_s("training", 8.0, 9.0) == 0.0
    assert exchange_s("after", 8.0, 8.0) == 2.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_clients": 0}, "min_clients is 0"),
        ({"min_updates": 0}, "min_updates is 0"),
        ({"wait_for": 1.5}, "wait_for is 1.5"),
        ({"wait_for": 0}, "wait_for is 0"),
        ({"deadline": "soon"}, "deadline is 'soon'; seconds or 'adaptive' are needed"),
        ({"deadline": 0}, "deadline is 0"),
        ({"too_few": "wait"}, "too_few is 'wait'; it is 'skip' or 'stop'"),
        ({"start_s": float("inf")}, "start_s is inf"),
    ],
)
def test_arguments_that_do_not_fit(options, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Patience(**options)
