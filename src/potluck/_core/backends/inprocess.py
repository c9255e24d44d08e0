"""``InProcessBackend``: workers that are threads of one process, without a network.

Groups, errors and recovery are as over TCP. The hub takes the place of the agent: it knows which
members are alive, forms groups, and can kill a member (by cutting its links) or add a newcomer.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from potluck._core.backends.service_transport import LocalServiceNetwork, LocalServiceTransport
from potluck._core.checks import checked_whole
from potluck._core.collectives.spanning_tree import connects, cut_of
from potluck._core.engine.communicator import SEGMENT_BYTES, Communicator
from potluck._core.engine.failures.group_errors import refusal_of
from potluck._core.engine.loop.native import is_available
from potluck._core.metrics import Metrics
from potluck._core.transport.inproc import (
    InprocLink,
    Killed,
    SocketLink,
    inproc_pair,
    new_killed,
    socket_pair,
)
from potluck._core.transport.link import Deliver, Fail
from potluck._core.types import Engine, Group, Member
from potluck._core.wire.greeting import Refusal
from potluck.errors import Evicted, GroupError, LinkError, OperationTimeout, Refused

MOST_NATIVE = 16
"""The most workers of a group on the native loop: 16 take 240 descriptors if all have links to all,
and a process often has no more than 1024. Links of the Python loop take none."""


class Hub:
    """The members of an in-process world and the links between them. Thread-safe."""

    most_native = MOST_NATIVE
    """Groups of up to so many workers run on the native loop, where there is one."""

    def __init__(self, world_size: int, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._changed = threading.Condition()
        self._names = itertools.count()
        self._alive: list[str] = [str(next(self._names)) for _ in range(world_size)]
        self._epoch = 1 if world_size else 0
        self._members: tuple[str, ...] = tuple(self._alive)
        self._connectors: dict[tuple[int, int], _Connector] = {}
        self._departed: dict[tuple[int, int], Refusal] = {}
        self._killed: defaultdict[str, Killed] = defaultdict(new_killed)
        self._links: defaultdict[str, list[InprocLink | SocketLink]] = defaultdict(list)
        self._cut: set[frozenset[str]] = set()
        self.segment_bytes = segment_bytes
        self.service_network = LocalServiceNetwork()

    # -- faults and joins

    def kill(self, worker: str) -> None:
        """Kill ``worker``: its links end, and the next group is without it."""
        with self._changed:
            self._alive.remove(worker)
            self._killed[worker].set()
            links = self._links.pop(worker, [])
            waiting = self._waiting_for(worker)
            own = [each for each in self._connectors.values() if each.group.me.worker == worker]
            self._announce()
        for link in links:
            link.cut()
        self.service_network.shut(worker)
        for connector in own:  # ends its blocked calls, which a killed process would not have
            connector.fail(connector.group.rank, LinkError(f"worker {worker} was killed"))
        for connector, rank in waiting:
            connector.fail(rank, LinkError(f"worker {worker} was killed"))

    def cut_off(self, worker: str) -> None:
        """End the links of ``worker``; the next group is without it. It lives, and can ``return_``.
        To be called while it makes no call."""
        with self._changed:
            self._alive.remove(worker)
            links = self._links.pop(worker, [])
            self._announce()
        for link in links:
            link.cut()

    def return_(self, worker: str) -> None:
        """Take a worker that was cut off into the next group, as its last rank."""
        with self._changed:
            self._alive.append(worker)
            self._announce()

    def cut(self, worker: str, other: str) -> None:
        """Cut the network between two workers: their link ends, and no other can be made. The next
        group knows it, if the links that are left connect all members."""
        pair = frozenset({worker, other})
        with self._changed:
            self._cut.add(pair)
            links = [link for name in pair for link in self._links[name] if link.peer in pair]
            waiting = [
                (connector, rank)
                for name in pair
                for connector, rank in self._waiting_for(name)
                if connector.group.me.worker in pair
            ]
        for link in links:
            link.cut()
        for connector, rank in waiting:
            connector.fail(rank, _no_network(connector.group, rank))

    def mend(self, worker: str, other: str) -> None:
        """Undo ``cut``, and announce a group that has the link."""
        with self._changed:
            self._cut.discard(frozenset({worker, other}))
            self._announce()

    def leave(self, worker: str) -> None:
        """Remove ``worker``, which has finished; later groups are without it."""
        self.service_network.shut(worker)
        with self._changed:
            if worker not in self._alive:
                return
            self._alive.remove(worker)
            waiting = self._waiting_for(worker)
        for connector, rank in waiting:
            connector.fail(rank, LinkError(f"worker {worker} has left"))

    def join(self) -> InProcessBackend:
        """Add a worker, as the last rank of the next group."""
        with self._changed:
            name = str(next(self._names))
            self._alive.append(name)
            self._announce()
        return InProcessBackend(self, name)

    def rejoin(self, worker: str, after_epoch: int) -> None:
        """Announce a new group, for members that can't reach each other in the present one."""
        with self._changed:
            if self._epoch <= after_epoch and worker in self._alive:
                self._announce()

    def _announce(self) -> None:
        self._epoch += 1
        self._members = tuple(self._alive)
        self._changed.notify_all()

    # -- called by backends

    @property
    def epoch(self) -> int:
        with self._changed:
            return self._epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the newest group."""
        with self._changed:
            # By this plans are chosen. Ranks of one process share the interpreter, so that a
            # message costs about what it costs on the Python loop, on either.
            return tuple(
                Member(name, node="in-process", engine=Engine.PYTHON) for name in self._members
            )

    def group(self, worker: str, after_epoch: int, timeout_s: float) -> Group:
        """The newest group after ``after_epoch``, for ``worker``. OperationTimeout without one in
        time; Evicted if the worker was killed."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._epoch > after_epoch or worker not in self._alive, timeout_s
            ):
                raise OperationTimeout(f"no group after epoch {after_epoch} within {timeout_s} s")
            if worker not in self._alive:
                raise Evicted(f"worker {worker} was killed")
            rank = self._members.index(worker)
            names = self._members
            cut = cut_of(map(names.index, pair) for pair in self._cut if pair <= set(names))
            if not connects(len(names), cut):
                cut = ()
            return Group(self._epoch, rank, self.members, job="in-process", cut=cut)

    # -- links

    def register(self, connector: _Connector) -> None:
        key = (connector.group.epoch, connector.group.rank)
        with self._changed:
            self._connectors[key] = connector
            wanted = [
                other
                for (epoch, _), other in self._connectors.items()
                if epoch == key[0] and key[1] in other.wanted
            ]
            behind = self._waiting_for(connector.group.me.worker, before=key[0])
        for other in wanted:
            self.link(other, key[1])
        for other, rank in behind:
            other.fail(rank, _stale(connector.group))

    def unregister(self, connector: _Connector, error: BaseException) -> None:
        group = connector.group
        with self._changed:
            self._connectors.pop((group.epoch, group.rank), None)
            left = self._departed[group.epoch, group.rank] = refusal_of(group, error)
            waiting = self._waiting_for(group.me.worker, before=group.epoch + 1)
        for other, rank in waiting:
            other.fail(rank, Refused(left.reason, left.code))

    def link(self, caller: _Connector, rank: int) -> None:
        """Link two ranks once, when both have registered."""
        group = caller.group
        name, other_name = group.me.worker, group.members[rank].worker
        with self._changed:
            caller.wanted.add(rank)
            if rank in caller.linked:  # by the other's request, maybe long ago: it may have left
                return
            for worker in (name, other_name):
                if worker not in self._alive:
                    caller.fail(rank, LinkError(f"worker {worker} was killed"))
                    return
            if frozenset({name, other_name}) in self._cut:
                caller.fail(rank, _no_network(group, rank))
                return
            left = self._departed.get((group.epoch, rank))
            if left is not None and left.code != "left":
                caller.fail(rank, Refused(left.reason, left.code))
                return
            for newer in self._connectors.values():
                if newer.group.epoch > group.epoch and newer.group.me.worker == other_name:
                    caller.fail(rank, _stale(newer.group))
                    return
            if left is not None:
                caller.fail(rank, Refused(left.reason, left.code))
                return
            other = self._connectors.get((group.epoch, rank))
            if other is None:
                return
            caller.linked.add(rank)
            other.linked.add(group.rank)
            killed = self._killed[name], self._killed[other_name]
            make = socket_pair if caller.is_native else inproc_pair
            mine, theirs = make(name, other_name, killed)
            self._links[name].append(mine)
            self._links[other_name].append(theirs)
        caller.deliver(rank, mine)
        other.deliver(group.rank, theirs)

    def _waiting_for(self, worker: str, before: int | None = None) -> list[tuple[_Connector, int]]:
        """The connectors that wait for a link to ``worker``, with the rank of ``worker`` in their
        group; with ``before`` only those of earlier epochs."""
        return [
            (connector, rank)
            for connector in self._connectors.values()
            for rank in connector.wanted - connector.linked
            if connector.group.members[rank].worker == worker
            and (before is None or connector.group.epoch < before)
        ]


def _no_network(group: Group, rank: int) -> LinkError:
    return LinkError(f"no network between {group.describe(group.rank)} and {group.describe(rank)}")


def _stale(group: Group) -> Refused:
    """The refusal of a member of ``group`` to a caller of an earlier epoch, as over TCP."""
    return Refused(f"worker {group.me.worker} is in epoch {group.epoch}", code="stale")


class _Connector:
    """The connector of one member in one group."""

    def __init__(self, hub: Hub, group: Group) -> None:
        self.group = group
        self.is_native = group.world_size <= hub.most_native and is_available()
        self.wanted: set[int] = set()
        self.linked: set[int] = set()
        self._hub = hub

    def start(self, deliver: Deliver, fail: Fail) -> None:
        self.deliver, self.fail = deliver, fail
        self._hub.register(self)

    def request(self, rank: int) -> None:
        self._hub.link(self, rank)

    def close(self, error: BaseException) -> None:
        self._hub.unregister(self, error)


class InProcessBackend:
    """One worker of an in-process world. ``world`` makes the backends of all workers. Groups of up
    to 16 run on the native loop where there is one, larger ones on the Python loop."""

    elastic = True

    def __init__(self, hub: Hub, worker: str) -> None:
        self.hub = hub
        self.worker = worker
        self.metrics = Metrics(rank=worker)
        self.service_transport = LocalServiceTransport(hub.service_network, worker)
        self.reports: list[dict[str, Any]] = []
        self.on_step: Callable[[int], None] | None = None
        """``on_step(step)`` is called at the start of each step, for fault tests."""

    @classmethod
    def world(
        cls, world_size: int, *, segment_bytes: int = SEGMENT_BYTES
    ) -> list[InProcessBackend]:
        """The backends of ``world_size`` workers, in rank order."""
        world_size = checked_whole("world_size", world_size, at_least=0)
        hub = Hub(world_size, segment_bytes=segment_bytes)
        return [cls(hub, str(rank)) for rank in range(world_size)]

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Communicator:
        if cause is not None:
            self.hub.rejoin(self.worker, after_epoch)
        group = self.hub.group(self.worker, after_epoch, timeout_s)
        return Communicator.open(
            group,
            _Connector(self.hub, group),
            metrics=self.metrics,
            segment_bytes=self.hub.segment_bytes,
        )

    def next_epoch(self) -> int:
        return self.hub.epoch

    def next_members(self) -> tuple[Member, ...]:
        return self.hub.members

    def begin_step(self, step: int) -> None:
        if self.on_step is not None:
            self.on_step(step)

    def report(self, facts: dict[str, Any]) -> None:
        self.reports.append(facts)

    def close(self) -> None:
        self.hub.leave(self.worker)
