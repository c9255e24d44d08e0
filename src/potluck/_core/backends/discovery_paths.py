"""Measuring the paths between the nodes of a group before it is formed, as agents do.

The gathering process orders the measurements: every pair of nodes is measured by one process of
each node, in rounds in which a node takes part in at most one measurement. Paths that are not
measured within ``BUDGET_S`` count as ordinary links.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from potluck._core.cluster.topology import measure
from potluck._core.cluster.topology.graph import Topology, in_ring
from potluck._core.transport.blocking import receive, send_all
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.listener import Admission
from potluck._core.transport.tcp import TcpLink
from potluck._core.types import MeasuredPath
from potluck._core.wire.facts import MEASURING, LinkFacts, Measuring, NodeFacts
from potluck._core.wire.gathering import ASKED, READING, Measure, Participant, Reading
from potluck._core.wire.greeting import Hello, Welcome
from potluck.errors import LinkError, PotluckError

BUDGET_S = 10.0

ANSWER_S = measure.MEASURE_S + 2.0

MeasureHere = Callable[[Participant], Reading]


def in_order(
    participants: Sequence[Participant], paths: Sequence[MeasuredPath]
) -> tuple[tuple[Participant, ...], tuple[MeasuredPath, ...]]:
    """Order ``participants`` (the most senior first) by the best ring; also returns the known paths
    between their nodes."""
    nodes = {each.member.node for each in participants}
    links = [
        LinkFacts(path.source, path.target, path.latency_s, path.bandwidth)
        for path in paths
        if path.source in nodes and path.target in nodes
    ]
    topology = Topology([NodeFacts(node) for node in nodes], links)
    by_member = {id(participant.member): participant for participant in participants}
    ranked = in_ring([each.member for each in participants], topology.ring())
    return tuple(by_member[id(member)] for member in ranked), topology.paths(nodes)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` nodes, in rounds in which each node is in at most one pair.

    The circle method of tournament schedules: the first node stays, the others rotate by one place
    a round, and opposite places are a pair. For an odd number of nodes, -1 fills the last place.
    """
    circle = [*range(count), *([-1] if count % 2 else [])]
    half = len(circle) // 2
    found = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def survey(
    participants: Sequence[Participant],
    links: Sequence[TcpLink | None],
    here: MeasureHere,
    budget_s: float,
) -> tuple[MeasuredPath, ...]:
    """Measure the paths between the nodes of ``participants`` over ``links``, within ``budget_s``
    seconds. The link of this process is None; it measures by ``here``."""
    first: dict[str, int] = {}
    for index, participant in enumerate(participants):
        first.setdefault(participant.member.node, index)
    chosen = list(first.values())
    until = time.monotonic() + budget_s
    paths: list[MeasuredPath] = []
    for of_nodes in rounds(len(chosen)):
        if time.monotonic() >= until:
            break
        pairs = [(chosen[a], chosen[b]) for a, b in of_nodes]
        for (a, b), reading in zip(pairs, _measure(pairs, participants, links, here), strict=True):
            near, far = participants[a].member.node, participants[b].member.node
            if reading.outward and reading.inward:
                paths.append(MeasuredPath(near, far, reading.latency_s, reading.outward))
                paths.append(MeasuredPath(far, near, reading.latency_s, reading.inward))
    return tuple(paths)


def _measure(
    pairs: Sequence[tuple[int, int]],
    participants: Sequence[Participant],
    links: Sequence[TcpLink | None],
    here: MeasureHere,
) -> list[Reading]:
    """One round: other processes measure on request, this process at the same time."""
    readings: dict[tuple[int, int], Reading] = {}
    deadline = time.monotonic() + ANSWER_S
    for a, b in pairs:
        link = links[a]
        if link is not None:
            with contextlib.suppress(LinkError):
                send_all(link, ASKED.encode(Measure(participants[b])), deadline)
    for a, b in pairs:
        if links[a] is None:
            readings[a, b] = here(participants[b])
    for a, b in pairs:
        link = links[a]
        if link is not None:
            with contextlib.suppress(PotluckError):  # a lost process is noticed when links are made
                readings[a, b] = receive(link, READING, deadline)
    return [readings.get(pair, Reading()) for pair in pairs]


async def read(participant: Participant, host: str, credentials: Credentials) -> Reading:
    """Measure the path to ``participant`` at ``host``."""
    member = participant.member
    try:
        found = await measure.measure(
            host, member.port, member.node, credentials, may_go_on=lambda: True
        )
    except (PotluckError, measure.Stopped, TimeoutError, OSError):
        return Reading()
    return Reading(found.latency_s, found.outward, found.inward)


def answer(hello: Hello, node: str) -> Admission:
    """Serve the measurement of another process."""

    def deliver(link: TcpLink) -> None:
        with contextlib.closing(link):
            connection = _BlockingConnection(link, time.monotonic() + measure.MEASURE_S)
            asyncio.run(measure.serve(connection, may_go_on=lambda: True))

    return Admission(Welcome(), deliver)


class _BlockingConnection:
    """A measuring connection over a blocking link. It blocks the event loop, which has no other
    task."""

    def __init__(self, link: TcpLink, deadline: float) -> None:
        self._link = link
        self._deadline = deadline

    def send(self, message: Measuring) -> None:
        send_all(self._link, MEASURING.encode(message), self._deadline)

    async def drain(self) -> None:
        """Return at once: ``send`` has waited until the system took the bytes."""

    async def receive(self) -> Measuring:
        return receive(self._link, MEASURING, self._deadline)


def named(
    participants: Sequence[Participant], last: Sequence[Participant] = ()
) -> tuple[Participant, ...]:
    """``participants`` with the workers' names of the ``last`` group; in a first group the names
    are the ranks."""
    names = {each.instance: each.member.worker for each in last} or {
        each.instance: str(rank) for rank, each in enumerate(participants)
    }
    return tuple(
        Participant(each.instance, replace(each.member, worker=names[each.instance]))
        for each in participants
    )
