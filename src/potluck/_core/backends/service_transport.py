"""Connections to services, from one worker of a job to another, outside of groups.

Over TCP they come to the port of the worker's links, with the same knock, TLS, list of admitted
keys and bans (``transport/listener.py``), under the kind ``service``. In one process they are pairs
of sockets. ``dial`` and ``admission`` are the two ends of a connection over TCP, also for programs
outside of jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from potluck._core.engine.mesh import Switchboard
from potluck._core.transport.bulk import BulkLink, bulk_link, socket_pair
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.handshake import connect
from potluck._core.transport.listener import Admission
from potluck._core.types import Group, Member
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck._core.wire.services import KIND
from potluck.errors import LinkError, Refused


class Caller(NamedTuple):
    """The other end of a connection: the id of its node, proved by a certificate, and the name that
    it gives itself as a worker of ``job`` (both empty for a program outside of jobs)."""

    node: str
    worker: str = ""
    job: str = ""


Objection = Callable[[Caller], str | None]
"""``objection(caller)``: why its connection is not taken, or None."""

Take = Callable[[BulkLink, Caller], None]
"""``take(link, caller)`` owns the connection from then on."""


class ServiceTransport(Protocol):
    """Connects one worker to the services of others, and accepts their connections to its own."""

    def open(self, objection: Objection, take: Take) -> None:
        """Accept connections of other workers from now on."""

    def connect(self, group: Group, member: Member, deadline: float) -> BulkLink:
        """A connection to the services of ``member``, which is another worker or this one.

        Tried once. LinkError if it can't be made, Refused if the member refuses it.
        """

    def objects_to(self, node: str) -> str | None:
        """Why the connections with ``node``, accepted before, must end: it is banned now; else
        None."""


def admission(caller: Caller, objection: str | None, take: Take) -> Admission:
    """What a listener does with a connection of ``caller``."""
    if objection is not None:
        return Admission(Refusal(KIND, objection))
    return Admission(Welcome(), lambda link: take(bulk_link(link), caller), lambda: None)


def dial(
    address: tuple[str, int],
    hello: Hello,
    credentials: Credentials,
    *,
    node: str,
    whom: str,
    deadline: float,
) -> BulkLink:
    """A connection to the services at ``address``, tried once. LinkError if it can't be made, or
    another node than ``node`` (empty: any) answers there; Refused if ``whom`` refuses it."""
    link, _ = connect(
        *address,
        hello,
        credentials,
        deadline=deadline,
        max_retries=0,
        connection_timeout_s=max(0.001, deadline - time.monotonic()),
        memory=None,
    )
    if node and link.peer_node != node:
        link.close()
        raise LinkError(
            f"{whom} should be on node {node[:12]}, but node {link.peer_node[:12]} answered there"
        )
    return bulk_link(link)


class LocalServiceNetwork:
    """The workers of one process, by name, and how each accepts connections."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Objection, Take]] = {}

    def open(self, worker: str, objection: Objection, take: Take) -> None:
        self._open[worker] = objection, take

    def shut(self, worker: str) -> None:
        """``worker`` has ended."""
        self._open.pop(worker, None)

    def connect(self, group: Group, member: Member) -> BulkLink:
        if member.worker not in self._open:
            raise LinkError(f"{member} has ended")
        objection, take = self._open[member.worker]
        caller = Caller(group.me.node, group.me.worker, group.job)
        reason = objection(caller)
        if reason is not None:
            raise Refused(f"{member} refused this connection: {reason}", KIND)
        mine, theirs = socket_pair(f"worker {group.me.worker}", str(member))
        take(theirs, caller)
        return mine


class LocalServiceTransport:
    """The transport of one of several workers of one process, over pairs of sockets."""

    def __init__(self, network: LocalServiceNetwork, worker: str) -> None:
        self._network = network
        self._worker = worker

    def open(self, objection: Objection, take: Take) -> None:
        self._network.open(self._worker, objection, take)

    def connect(self, group: Group, member: Member, deadline: float) -> BulkLink:
        return self._network.connect(group, member)

    def objects_to(self, node: str) -> str | None:
        return None


class TcpServiceTransport:
    """The transport of a worker with a listener, over TLS."""

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        self.objects_to = switchboard.credentials.objects_to
        self._own: tuple[Objection, Take] | None = None

    def open(self, objection: Objection, take: Take) -> None:
        def admit(hello: Hello, node: str) -> Admission:
            caller = Caller(node, hello.worker, hello.job)
            return admission(caller, objection(caller), take)

        self._own = objection, take
        self._switchboard.answer(KIND, admit)

    def connect(self, group: Group, member: Member, deadline: float) -> BulkLink:
        if member.worker == group.me.worker and self._own is not None:
            own = LocalServiceNetwork()
            own.open(member.worker, *self._own)
            return own.connect(group, member)
        hello = Hello(kind=KIND, job=group.job, worker=group.me.worker)
        return dial(
            (member.host, member.port),
            hello,
            self._switchboard.credentials,
            node=member.node,
            whom=str(member),
            deadline=deadline,
        )
