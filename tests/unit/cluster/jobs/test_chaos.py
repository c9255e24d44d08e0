"""The grammar of ordered faults, and that each happens once."""

from __future__ import annotations

import pytest

from potluck._core.cluster.jobs.chaos import EXAMPLES, Fault, FaultKind, check_ranks, parse_chaos
from potluck.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", []),
        (" ; ", []),
        ("kill rank 2 at step 60", [Fault(FaultKind.KILL, 2, 60)]),
        ("stop rank 1 at step 20 for 5 s", [Fault(FaultKind.STOP, 1, 20, 5.0)]),
        ("stop rank 1 at step 20 for 0.25s", [Fault(FaultKind.STOP, 1, 20, 0.25)]),
        ("KILL  Rank 0 at step 0", [Fault(FaultKind.KILL, 0, 0)]),
        ("kill all at step 80", [Fault(FaultKind.KILL, None, 80)]),
        (
            "kill rank 2 at step 60; stop rank 1 at step 20 for 5 seconds;",
            [Fault(FaultKind.KILL, 2, 60), Fault(FaultKind.STOP, 1, 20, 5.0)],
        ),
    ],
)
def test_orders_are_read(text: str, faults: list[Fault]) -> None:
    assert parse_chaos(text).waiting == faults


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_an_order_and_is_shown_as_it_was_written(example: str) -> None:
    (fault,) = parse_chaos(example).waiting
    assert str(fault) == example


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode", "'explode' can't be understood; write for example 'kill rank 2 at step 60'"),
        ("kill rank two at step 60", "can't be understood"),
        ("kill rank 2", "can't be understood"),
        ("kill rank -1 at step 3", "can't be understood"),
        ("kill rank 2 at step 60, stop rank 1 at step 3 for 1 s", "can't be understood"),
        ("stop rank 1 at step 20", "stop needs 'for N s'"),
        ("kill rank 1 at step 20 for 5 s", "kill takes no 'for'"),
    ],
)
def test_what_is_no_order_is_refused_with_examples(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_chaos(text)
    assert words in str(caught.value)
    assert EXAMPLES[0] in str(caught.value)


def test_a_rank_learns_only_its_own_steps() -> None:
    plan = parse_chaos(
        "kill rank 2 at step 60; kill rank 2 at step 9; kill rank 1 at step 5; kill all at step 7"
    )
    assert plan.steps_of(2) == (9, 60)
    assert plan.steps_of(1) == (5,)
    assert plan.steps_of(0) == (7,), "rank 0 asks for all"
    assert plan.steps_of(3) == ()


def test_a_fault_happens_once() -> None:
    plan = parse_chaos("kill rank 2 at step 60; kill rank 2 at step 61")
    assert [str(fault) for fault in plan.due(2, 60)] == ["kill rank 2 at step 60"]
    assert plan.due(2, 60) == [], "also when the step is run again"
    assert plan.due(1, 61) == []
    assert [str(fault) for fault in plan.waiting] == ["kill rank 2 at step 61"]


def test_a_rank_that_can_not_exist_is_refused_before_anything_starts() -> None:
    plan = parse_chaos("kill rank 3 at step 60; kill all at step 2")
    check_ranks(plan, 4)
    with pytest.raises(ConfigurationError, match="the highest rank is 2, with --workers 3"):
        check_ranks(plan, 3)
