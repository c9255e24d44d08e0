"""Who may say what about jobs, and what a node makes of anything that the schemas allow."""

from __future__ import annotations

import random
import typing

import pytest

from potluck._core.cluster.jobs.journal import MAX_FACTS, MAX_NOTES, Journal
from potluck._core.cluster.jobs.permissions import (
    ASKERS,
    SENDERS,
    Role,
    may_lead_soon,
    may_send,
    objection_to_asking,
)
from potluck._core.wire import jobs, peers, worker_link
from potluck._core.wire.nodes import View, ViewMember
from potluck.errors import ProtocolError
from support.hostile import Hostile

VIEW = View("L", 3, tuple(ViewMember(name, 1, i) for i, name in enumerate("abc")))


def may(node: str, message: jobs.JobMessage, view: View | None = VIEW) -> bool:
    return may_send(node, message, view, {"job": "b"}.get)  # type: ignore[arg-type]


def test_the_table_has_every_message() -> None:
    assert set(SENDERS) == set(typing.get_args(jobs.JobMessage))


@pytest.mark.parametrize("kind", SENDERS, ids=lambda kind: kind.__name__)
def test_who_may_say_it(kind: type) -> None:
    hostile = Hostile(random.Random(kind.__name__), ["job", "b"])
    message = hostile.anything(kind)
    if isinstance(message, jobs.InterruptJob):
        message = jobs.InterruptJob("job", 2, 1)
    allowed = {node for node in "abcz" if may(node, message)}
    match SENDERS[kind]:
        case Role.LEADER:
            assert allowed == {"a"}
        case Role.MEMBER:
            assert allowed == {"a", "b", "c"}
        case Role.STARTER if isinstance(message, jobs.Submit):
            assert allowed == {message.spec.starter} & {"a", "b", "c"}
        case Role.STARTER:
            assert allowed == {"b"}
    assert not any(may(node, message, None) for node in "abcz")


def test_the_table_of_questions_has_every_one() -> None:
    assert set(ASKERS) == set(typing.get_args(jobs.HistoryQuestion))


@pytest.mark.parametrize("kind", ASKERS, ids=lambda kind: kind.__name__)
def test_who_gets_an_answer(kind: type) -> None:
    question = Hostile(random.Random(kind.__name__), ["job", "b"]).anything(kind)

    def answered(view: View | None, **is_it: bool) -> set[str]:
        return {
            node
            for node in "abcz"
            if not objection_to_asking(node, question, view, me="c", **is_it)
        }

    needed = {Role.READER: "is_reader", Role.CANCELLER: "is_canceller"}.get(ASKERS[kind])
    both = {"is_reader": True, "is_canceller": True}
    assert answered(VIEW, **both) == ({"a"} if ASKERS[kind] is Role.LEADER else set("abc"))
    for name in both:
        without = answered(VIEW, **(both | {name: False}))
        assert without == (set() if name == needed else answered(VIEW, **both))
    assert answered(None, **both) <= {"c"}, "without a view only its own commands"


def test_orders_of_a_node_outside_of_the_view_are_not_even_kept() -> None:
    assert may_lead_soon("c", VIEW)
    assert not may_lead_soon("z", VIEW)
    assert may_lead_soon("z", None), "a newcomer does not know who will lead"


OUT_OF_BOUNDS = {
    "signals for ever": jobs.InterruptJob("job", 2, 2**62),
    "a signal that is none": jobs.SignalWorkers("job", ("0",), 2**40),
    "an exit in an attempt that can't be": jobs.WorkerEvent("job", jobs.Exited("0", 0, 2**62)),
    "an epoch that frames can't carry": jobs.WorkerEvent("job", worker_link.Entered("0", 2**33)),
    "a step from the end": jobs.WorkerEvent("job", worker_link.WorkerProgress("0", 1, 2**63)),
    "a patience of no number": jobs.SendToWorkers("job", (), worker_link.Probe(-1)),
}


@pytest.mark.parametrize("message", OUT_OF_BOUNDS.values(), ids=OUT_OF_BOUNDS)
def test_what_is_out_of_bounds_is_no_message(message: jobs.JobMessage) -> None:
    with pytest.raises(ProtocolError):
        peers.MESSAGE.decode(peers.MESSAGE.encode(message)[4:])


def test_a_lying_worker_does_not_make_the_journal_grow() -> None:
    journal = Journal(["0"], 0.0)
    hostile = Hostile(random.Random(1), ["0"])
    for number in range(3000):
        told = hostile.anything(worker_link.WorkerProgress)
        facts = {f"fact {number} {i}": 1.0 for i in range(8)}
        journal.progress(
            worker_link.WorkerProgress(
                "0", told.epoch, told.step, told.loss, float("nan"), facts=facts
            ),
            float(number),
        )
        journal.lost("0", "x" * 4000, float(number))
    known = journal.facts_of("0")
    assert known.samples_per_s is None, "no number is no figure"
    assert len(known.facts) <= MAX_FACTS
    assert len(journal.recoveries) <= MAX_NOTES
    assert all(len(each.cause) <= 4096 for each in journal.recoveries)
