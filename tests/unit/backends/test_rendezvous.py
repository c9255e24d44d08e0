"""Callers that wait for a group: admitted while it is gathered, then told or sent away."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from potluck._core.backends.rendezvous import Rendezvous
from potluck._core.transport.listener import Admission
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck.errors import LinkError


@dataclass
class Link:
    """A link that remembers its end."""

    peer_host: str = "10.0.0.2"
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True


def hello(name: str, port: int = 1234) -> Hello:
    return Hello("join", worker=name, port=port)


def welcome_all(hello: Hello) -> Refusal | None:
    return None


def arrive(rendezvous: Rendezvous[None], name: str) -> Link:
    link = Link()
    admission = rendezvous.admit(hello(name), "node")
    assert isinstance(admission.answer, Welcome)
    assert admission.deliver is not None
    admission.deliver(link)  # type: ignore[arg-type]
    return link


def opened() -> Rendezvous[None]:
    rendezvous: Rendezvous[None] = Rendezvous(welcome_all, lambda link: None)
    rendezvous.open()
    return rendezvous


def test_a_caller_waits_until_the_rendezvous_opens() -> None:
    rendezvous: Rendezvous[None] = Rendezvous(welcome_all, lambda link: None)
    answers: list[Admission] = []
    asking = threading.Event()

    def objection(hello: Hello) -> Refusal | None:
        asking.set()
        return None

    rendezvous._objection = objection
    caller = threading.Thread(target=lambda: answers.append(rendezvous.admit(hello("a"), "node")))
    caller.start()
    assert asking.wait(30)
    rendezvous.open()
    caller.join()
    # On a machine that stands still for a second the caller is told to ask again.
    assert isinstance(answers[0].answer, Welcome) or answers[0].answer.code == "not_ready"


def test_those_taken_are_told_and_the_others_are_sent_away() -> None:
    rendezvous = opened()
    links = {name: arrive(rendezvous, name) for name in "abc"}
    rendezvous.wait_for(3, 30)
    taken = rendezvous.take(["c", "a"])
    assert [each.member.worker for each in taken] == ["c", "a"]
    assert {name for name, link in links.items() if link.is_closed} == {"b"}
    assert rendezvous.arrivals() == {}


def test_a_caller_that_comes_again_replaces_its_first_link() -> None:
    rendezvous = opened()
    first, second = arrive(rendezvous, "a"), arrive(rendezvous, "a")
    assert (first.is_closed, second.is_closed) == (True, False)
    assert rendezvous.arrivals()["a"].link is second


def test_a_caller_that_says_something_else_is_sent_away_and_may_come_again() -> None:
    def read(link: object) -> None:
        raise LinkError("it went away")

    rendezvous: Rendezvous[None] = Rendezvous(welcome_all, read)
    rendezvous.open()
    assert arrive(rendezvous, "a").is_closed
    assert not rendezvous.knows("a")
    assert rendezvous.arrivals() == {}


def test_a_caller_without_a_port_is_refused_and_after_the_end_all_are() -> None:
    rendezvous = opened()
    refusal = rendezvous.admit(hello("a", port=0), "node").answer
    assert isinstance(refusal, Refusal)
    assert refusal.code == "port"
    late = rendezvous.admit(hello("b"), "node")
    rendezvous.close()
    link = Link()
    assert late.deliver is not None
    late.deliver(link)  # type: ignore[arg-type]
    assert link.is_closed
    assert isinstance(rendezvous.admit(hello("c"), "node").answer, Refusal)


def test_no_more_callers_are_kept_than_fit_into_a_group() -> None:
    rendezvous: Rendezvous[None] = Rendezvous(welcome_all, lambda link: None, capacity=2)
    rendezvous.open()
    assert [arrive(rendezvous, name).is_closed for name in "abc"] == [False, False, True]
