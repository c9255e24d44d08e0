"""Who is let in to a group over TCP, and what the others are told."""

from __future__ import annotations

import hashlib
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from potluck._core.backends import cut_links
from potluck._core.backends.tcp import TcpBase
from potluck._core.collectives.plan import Operation
from potluck._core.engine import mesh
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.request import Request
from potluck._core.settings import Settings
from potluck._core.transport.handshake import connect
from potluck._core.types import Group, Member, ReduceOp
from potluck._core.wire.greeting import Hello
from potluck.errors import ConfigurationError, Desync, GroupError, PeerLost, Refused
from support.links import new_credentials
from support.ports import reserved_ports
from support.worlds import run_all, tcp_backends

EPOCH = 5
SETTINGS = Settings(
    psk=hashlib.sha256(b"unused").hexdigest(), connection_timeout_s=5.0, peer_timeout_s=20.0
)
STRANGER = new_credentials()
OTHER = new_credentials()


def summing(array: np.ndarray, timeout_s: float, algorithm: str | None = None) -> Request:
    """An all_reduce of ``array``, in place."""
    return Request(
        Operation.ALL_REDUCE, array, array, ReduceOp.SUM, algorithm=algorithm, timeout_s=timeout_s
    )


@pytest.fixture
def base() -> Iterator[TcpBase]:
    made = TcpBase("127.0.0.1", 0, replace(SETTINGS, connection_timeout_s=1.0), new_credentials())
    yield made
    made.close()


@pytest.fixture
def communicator(base: TcpBase) -> Iterator[Communicator]:
    """Rank 1 of four in epoch 5; rank 2 is on a node of its own."""
    members = (
        Member("a"),
        Member("b", host="127.0.0.1", port=base.port),
        Member("c", node=OTHER.node_id),
        Member("d"),
    )
    opened = base.open(Group(EPOCH, 1, members, job="j"))
    yield opened
    opened.close()


def call(base: TcpBase, credentials=STRANGER, **fields: object) -> None:
    hello = Hello("data", job="j", epoch=EPOCH, rank=0, to_rank=1, worker="a")
    changed = Hello(**{**{f: getattr(hello, f) for f in hello.__struct_fields__}, **fields})
    link, _ = connect("127.0.0.1", base.port, changed, credentials, deadline=time.monotonic() + 10)
    link.close()


REFUSALS = [
    ({"epoch": EPOCH - 1}, "stale", "epoch 4 is over; this worker is in 5"),
    ({"epoch": EPOCH + 1}, "not_ready", "has not formed epoch 6"),
    ({"job": "another"}, "job", "this worker is in job 'j', not 'another'"),
    ({"to_rank": 2}, "rank", "this worker is rank 1, not 2"),
    ({"rank": 1}, "duplicate", "is RANK set to the same number on two workers"),
    ({"rank": 4}, "duplicate", "rank 4 can't call rank 1 in a world of 4"),
    ({"rank": -1}, "duplicate", "rank -1 can't call"),
    ({"rank": 2}, "identity", "rank 2 is on node"),
    ({"kind": "rendezvous"}, "kind", "does not take 'rendezvous' connections"),
    ({"kind": "reached"}, "reached", "this worker can be reached"),
]


@pytest.mark.parametrize(("fields", "code", "reason"), REFUSALS)
def test_a_caller_that_does_not_belong_is_told_why(
    base: TcpBase, communicator: Communicator, fields: dict[str, object], code: str, reason: str
) -> None:
    with pytest.raises(Refused, match=reason) as caught:
        call(base, **fields)
    assert caught.value.code == code
    assert communicator.error is None


def test_a_second_worker_with_the_same_rank_is_refused(
    base: TcpBase, communicator: Communicator
) -> None:
    hello = Hello("data", job="j", epoch=EPOCH, rank=0, to_rank=1)
    deadline = time.monotonic() + 10
    link, _ = connect("127.0.0.1", base.port, hello, STRANGER, deadline=deadline)
    with pytest.raises(Refused, match="rank 0 is connected already") as caught:
        call(base)
    assert caught.value.code == "duplicate"
    assert communicator.error is None, "the first one is not disturbed"
    link.close()


def test_a_caller_for_a_later_epoch_waits_until_it_is_there(base: TcpBase) -> None:
    """Members install a new view at different times; who is early must not fail."""
    patient = TcpBase("127.0.0.1", 0, replace(SETTINGS, connection_timeout_s=10), STRANGER)
    members = (Member("a"), Member("b"))
    results: list[object] = []

    def early() -> None:
        hello = Hello("data", epoch=EPOCH, rank=0, to_rank=1)
        deadline = time.monotonic() + 10
        link, welcome = connect("127.0.0.1", patient.port, hello, OTHER, deadline=deadline)
        results.append(welcome.rank)
        link.close()

    thread = threading.Thread(target=early)
    thread.start()
    opened = patient.open(Group(EPOCH, 1, members))
    thread.join()
    assert results == [1]
    opened.close()
    patient.close()


def test_callers_of_a_group_that_is_over_hear_how_it_ended(base: TcpBase) -> None:
    members = (Member("a"), Member("b"))
    opened = base.open(Group(EPOCH, 1, members))
    opened.abort(Desync("they differ", rank=0, epoch=EPOCH))
    opened.close()
    with pytest.raises(Refused, match="they differ") as caught:
        call(base, job="")
    assert caught.value.code == "over:Desync:0:0"
    again = base.open(Group(EPOCH + 1, 1, members))
    with pytest.raises(Refused, match="they differ"):
        call(base, job="")
    again.close()
    with pytest.raises(Refused, match="left the group") as caught:
        call(base, job="", epoch=EPOCH + 1)
    assert caught.value.code == "left"
    third = base.open(Group(EPOCH + 2, 1, members))
    with pytest.raises(Refused, match="epoch 6 is over; this worker is in 7"):
        call(base, job="", epoch=EPOCH + 1)
    third.close()


def test_both_sides_connecting_at_once_end_up_with_one_link() -> None:
    for _ in range(20):
        backends = tcp_backends(2, 2, SETTINGS)
        communicators = [backend.form(0, None, 5) for backend in backends]
        meet = threading.Barrier(2)

        def act(communicator: Communicator, meet: threading.Barrier = meet) -> None:
            meet.wait(10)
            array = np.ones(10)
            communicator.run(
                Request(Operation.ALL_REDUCE, array, array, ReduceOp.SUM, timeout_s=10)
            ).wait()
            assert (array == 2).all()

        run_all([lambda each=each: act(each) for each in communicators])
        run_all([each.close for each in communicators])
        for backend in backends:
            backend.close()


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("127.0.0.1", 1, "no link to 127.0.0.1:1"),
        ("no-such-host.invalid", 5, "can't be resolved"),
        ("bad\0name", 5, "lost rank 0"),
        ("x" * 300, 5, "lost rank 0"),
        ("127.0.0.1", 0, "has no address"),
    ],
)
def test_an_address_that_leads_nowhere_is_a_lost_peer(
    base: TcpBase, host: str, port: int, reason: str
) -> None:
    """Whatever the name service makes of it: nobody waits for a thread that has died."""
    members = (Member("a", host=host, port=port), Member("b"))
    opened = base.open(Group(EPOCH, 1, members))
    with pytest.raises(PeerLost, match=reason) as caught:
        opened.run(Request(Operation.BARRIER, timeout_s=20)).wait()
    assert caught.value.rank == 0
    opened.close()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Where nobody listens, but the test may."""
    with reserved_ports(1) as [port]:
        yield port


def test_members_that_can_not_be_called_are_known_when_the_group_is_over(
    base: TcpBase, closed_port: int
) -> None:
    members = (Member("a", host="127.0.0.1", port=closed_port), Member("b"))
    opened = base.open(Group(EPOCH, 1, members))
    assert base.unreachable(EPOCH) == frozenset()
    with pytest.raises(PeerLost):
        opened.run(Request(Operation.BARRIER, timeout_s=20)).wait()
    opened.close()
    assert base.unreachable(EPOCH) == {0}
    assert base.unreachable(EPOCH - 1) == frozenset(), "that group is not the newest"


def test_a_member_that_answers_nothing_for_long_counts_as_unreachable(
    base: TcpBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_SILENT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        members = (Member("a", host="127.0.0.1", port=silent.getsockname()[1]), Member("b"))
        opened = base.open(Group(EPOCH, 1, members))
        opened.run(Request(Operation.BARRIER, timeout_s=60))
        peer, _ = silent.accept()
        opened.close()
        assert base.unreachable(EPOCH) == {0}
        peer.close()


def test_a_member_beyond_a_cut_link_is_called_until_it_answers(
    base: TcpBase, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_links, "_EVERY_S", 0.05)
    members = (Member("a", host="127.0.0.1", port=closed_port), Member("b"), Member("c"))
    opened = base.open(Group(EPOCH, 1, members, cut=((0, 1),)))
    answered: queue.Queue[int] = queue.Queue()
    cut_links.watch(opened, STRANGER, answered.put)
    with pytest.raises(queue.Empty):
        answered.get(timeout=0.5)
    other = TcpBase("127.0.0.1", closed_port, SETTINGS, STRANGER)
    assert answered.get(timeout=20) == 0
    assert opened.error is None, "the group goes on as it is"
    opened.close()
    other.close()


def test_another_node_at_a_members_address_is_not_that_member(base: TcpBase) -> None:
    backends = tcp_backends(2, 2, SETTINGS)
    group = backends[0].group
    assert group is not None
    members = (group.members[0], replace(group.members[1], node=STRANGER.node_id))
    opened = backends[0].base.open(replace(group, members=members))
    other = backends[1].form(0, None, 5)
    with pytest.raises(PeerLost, match="should be on node"):
        opened.run(Request(Operation.BARRIER, timeout_s=20)).wait()
    for each in (opened, other, *backends):
        each.close()


def test_closing_while_a_call_is_under_way_does_not_wait_for_it() -> None:
    """Rank 0 accepts TCP and never greets: closing must not take the whole deadline."""
    silent = socket.create_server(("127.0.0.1", 0))
    base = TcpBase("127.0.0.1", 0, replace(SETTINGS, connection_timeout_s=60), STRANGER)
    members = (Member("a", host="127.0.0.1", port=silent.getsockname()[1]), Member("b"))
    opened = base.open(Group(EPOCH, 1, members))
    work = opened.run(Request(Operation.BARRIER, timeout_s=60))
    peer, _ = silent.accept()
    started = time.monotonic()
    opened.close()
    base.close()
    assert time.monotonic() - started < 30, "half of both deadlines"
    assert work.done()
    peer.close()
    silent.close()


def test_a_port_in_use_says_so() -> None:
    first = TcpBase("127.0.0.1", 0, SETTINGS, STRANGER)
    with pytest.raises(ConfigurationError, match=f"port {first.port} on 127.0.0.1 is in use"):
        TcpBase("127.0.0.1", first.port, SETTINGS, STRANGER)
    first.close()


def test_a_listener_that_breaks_ends_the_group_on_all_ranks_and_forms_no_other() -> None:
    backends = tcp_backends(2, 1, replace(SETTINGS, use_shared_memory=False))
    contexts = run_all([partial(each.form, 0, None, 20) for each in backends], 30)
    run_all(
        [
            lambda each=each: each.run(Request(Operation.BARRIER, timeout_s=20)).wait()
            for each in contexts
        ],
        30,
    )

    def broken() -> None:
        raise MemoryError("no room")

    victim = backends[1]
    victim.base.listener._acceptor._accept = broken
    waiting = contexts[0].run(summing(np.ones(4), 600))
    caller = socket.create_connection(("127.0.0.1", victim.base.port))
    with caller, pytest.raises(GroupError) as other:
        waiting.wait(30)
    with pytest.raises(GroupError) as mine:
        contexts[1].run(Request(Operation.BARRIER, timeout_s=600)).wait(30)
    with pytest.raises(GroupError) as again:
        victim.base.open(replace(victim.group, epoch=2))
    for caught in (other, mine, again):
        assert type(caught.value) is GroupError, "nobody is lost: no next group would help"
        assert re.search(
            rf"no rank can connect to rank 1 \(worker 1 at 127\.0\.0\.1:{victim.base.port}\) "
            r"any more: the thread that takes connections .* broke \(MemoryError: no room\)"
            r".* start it again",
            str(caught.value),
        )
    for each in (*contexts, *backends):
        each.close()
