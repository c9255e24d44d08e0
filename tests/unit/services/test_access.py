"""Who may connect to a worker's services, and how one is found among workers that are silent."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from potluck._core.backends.service_transport import (
    Caller,
    LocalServiceNetwork,
    LocalServiceTransport,
    Objection,
    Take,
)
from potluck._core.transport.bulk import BulkLink, socket_pair
from potluck._core.types import Group, Member
from potluck.errors import UnknownService
from potluck.services import Call, Services, access, service


@service("s")
def rank(call: Call) -> int:
    return call.rank


def group_of(me: str, *workers: str) -> Group:
    """Each worker on a node named after it."""
    members = tuple(Member(each, node=f"node {each}") for each in workers)
    return Group(1, workers.index(me), members, "job")


def services(network: LocalServiceNetwork, group: Group, *more: Member) -> Services:
    transport = LocalServiceTransport(network, group.me.worker)
    return Services(transport, lambda: group, lambda: more, timeout_s=20.0, max_bytes=1 << 20)


def test_a_worker_that_is_in_no_group_is_refused() -> None:
    network = LocalServiceNetwork()
    server = services(network, group_of("0", "0", "1"))
    server.serve(rank)
    stranger = services(network, group_of("9", "0", "9"))
    with pytest.raises(UnknownService, match=r"no worker '9' that is known here"):
        stranger.connect("s", 0, 1.0)
    member = services(network, group_of("1", "0", "1"))
    assert member.connect("s", 0, 5.0).rank() == 1
    for each in (stranger, member, server):
        each.close()


@pytest.mark.parametrize("node", ["node 9", ""], ids=["its node is told", "it is not"])
def test_a_worker_of_the_group_that_waits_is_heard_before_that_is_entered(node: str) -> None:
    network = LocalServiceNetwork()
    server = services(network, group_of("0", "0", "1"), Member("9", node=node))
    server.serve(rank)
    again = services(network, group_of("9", "0", "9"))
    assert again.connect("s", 0, 5.0).rank() == -1
    again.close()
    server.close()


def test_a_worker_that_was_started_again_on_another_node_is_heard() -> None:
    network, group = LocalServiceNetwork(), group_of("0", "0", "1")
    found: list[Objection] = []

    class Transport(LocalServiceTransport):
        def open(self, objection: Objection, take: Take) -> None:
            found.append(objection)

    moved = Member("1", node="another")
    Services(Transport(network, "0"), lambda: group, lambda: (moved,), timeout_s=1.0, max_bytes=1)
    [objection] = found
    assert objection(Caller("another", "1", "job")) is None
    assert objection(Caller("node 1", "1", "job")) is None
    assert "is on node another, not on thief" in str(objection(Caller("thief", "1", "job")))
    assert "in job 'job', not 'other'" in str(objection(Caller("node 1", "1", "other")))


def test_a_silent_rank_leaves_time_to_ask_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_ANSWER_S", 0.5)  # all are asked again until the deadline
    network = LocalServiceNetwork()
    server = services(network, group_of("1", "0", "1", "2"))
    server.serve(rank)
    held: list[BulkLink] = []

    class Transport(LocalServiceTransport):
        def connect(self, group: Group, member: Member, deadline: float) -> BulkLink:
            if member.worker == "0":  # takes connections, and says nothing
                mine, theirs = socket_pair("caller", "silent")
                held.append(theirs)
                return mine
            return super().connect(group, member, deadline)

    group = group_of("2", "0", "1", "2")
    caller = Services(Transport(network, "2"), lambda: group, timeout_s=20.0, max_bytes=1 << 20)
    remote = caller.connect("s", None, 60.0)
    assert remote.rank() == 2
    for each in (*held, caller, server):
        each.close()


def test_the_error_tells_what_a_rank_said_before_it_fell_silent() -> None:
    network = LocalServiceNetwork()
    server = services(network, group_of("0", "0", "1"))
    server.serve(rank)
    num_calls = 0

    class Transport(LocalServiceTransport):
        def connect(self, group: Group, member: Member, deadline: float) -> BulkLink:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1:
                raise TimeoutError
            return super().connect(group, member, deadline)

    group = group_of("1", "0", "1")
    caller = Services(Transport(network, "1"), lambda: group, timeout_s=20.0, max_bytes=1 << 20)
    with pytest.raises(UnknownService, match=r"Services of worker 0[^:]*: 's'$"):
        caller.connect("another", 0, 3.0)
    with pytest.raises(UnknownService, match=r"can't be asked \(it does not answer\)$"):
        caller.connect("another", 0, 0.1)
    for each in (caller, server):
        each.close()


def test_close_ends_the_connections_of_a_remote_of_which_a_method_is_kept() -> None:
    network = LocalServiceNetwork()
    server = services(network, group_of("0", "0", "1"))
    server.serve(rank)
    member = services(network, group_of("1", "0", "1"))
    method = member.connect("s", 0, 5.0).rank
    gc.collect()  # the Remote itself is gone
    assert method() == 1
    member.close()
    deadline, tick = time.monotonic() + 20.0, threading.Event()
    while server._server._clients:
        assert time.monotonic() < deadline, "the connection is still open"
        tick.wait(0.01)
    server.close()
