"""``AutoDiscoveryBackend``: scripts that find each other on the network, without an agent.

Each process listens, announces itself by all finders of ``cluster.discovery``, and connects to the
addresses that it receives (``discovery_search.py``). A process that holds the cluster's secret
answers with its random id. Then the processes agree on a group, and after a loss on the next group
(``discovery_gather.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from potluck._core import hints
from potluck._core.backends.base import StaticBackend
from potluck._core.backends.discovery_gather import (
    First,
    Gathering,
    Next,
    Situation,
    answer_measurement,
    read_joining,
)
from potluck._core.backends.discovery_rules import SETTLE_S, FirstGroup
from potluck._core.backends.discovery_search import (
    FORMED,
    JOIN,
    MEET,
    KnownPeers,
    Search,
    welcome_caller,
)
from potluck._core.backends.rendezvous import Rendezvous
from potluck._core.backends.tcp import TcpBase
from potluck._core.checks import Duration, checked_seconds, checked_whole
from potluck._core.cluster.discovery.advert import new_instance
from potluck._core.cluster.discovery.configured import all_finders
from potluck._core.cluster.discovery.finder import Finder
from potluck._core.cluster.topology import measure
from potluck._core.engine.communicator import Communicator
from potluck._core.settings import Settings, load_settings
from potluck._core.types import Group, Member
from potluck._core.wire.gathering import INSTANCE, MAX_PARTICIPANTS, Formed, Joining, Participant
from potluck._core.wire.greeting import Hello, Refusal
from potluck.errors import ConfigurationError, GroupError

_MEET_S = 10.0
"""Seconds for the members of a group to make their links; after that they agree on a group
again."""


class AutoDiscoveryBackend(StaticBackend[Communicator]):
    """One rank of a group of processes that find each other on the network.

    The world is formed of all processes found, when at least ``min_peers`` other processes are
    found and no new process was found for ``settle_s`` seconds; ``min_peers`` defaults to
    POTLUCK_MIN_PEERS, at least 1. ``world_size`` fixes the number instead, equal on all processes.
    Later processes are refused with that reason. After a loss the remaining processes form the next
    group.

    All processes must hold the cluster's secret. ``finders`` defaults to those of
    POTLUCK_DISCOVERY. Listens on ``port`` (0: any free port), by default on POTLUCK_GRADIENT_PORT,
    the default port in POTLUCK_PEERS, or on any free port if that is taken. ConfigurationError for
    an unusable setting.
    """

    elastic = True

    @hints.arguments(hints.BACKEND)
    def __init__(
        self,
        world_size: int | None = None,
        *,
        min_peers: int | None = None,
        settle_s: Duration = SETTLE_S,
        settings: Settings | None = None,
        finders: Sequence[Finder] | None = None,
        port: int | None = None,
    ) -> None:
        self._settings = settings or load_settings()
        settle_s = checked_seconds(settle_s, "settle_s", at_least=0)
        self._rule = _rule(world_size, min_peers, settle_s, self._settings)
        default_port = self._settings.gradient_port or self._settings.discovery_port
        ways = all_finders(self._settings, default_port) if finders is None else list(finders)
        if port is None:
            self._base = TcpBase.on_port_or_any("", self._settings.gradient_port, self._settings)
        else:
            self._base = TcpBase("", port, self._settings)
        self.switchboard = self._base.switchboard
        credentials = self._base.credentials
        instance = new_instance()
        self._me = Participant(instance.hex(), self._base.member(""))
        self._changed = threading.Condition()
        self._peers = KnownPeers(self._changed)
        self._formed: Formed | None = None
        self._formed_at = 0.0
        self._ring: Communicator | None = None
        self._rendezvous: Rendezvous[Joining] = Rendezvous(
            self._objection_to_joining,
            partial(read_joining, me=self._me.instance),
            changed=self._changed,
            capacity=MAX_PARTICIPANTS - 1,
        )
        switchboard = self._base.switchboard
        switchboard.answer(JOIN, self._rendezvous.admit)
        switchboard.answer(measure.KIND, answer_measurement)
        switchboard.answer(
            MEET,
            partial(
                welcome_caller, instance=instance, peers=self._peers, objection=self._objection
            ),
        )
        self._search = Search(credentials, instance, self._base.port, ways, self._peers)
        self._gathering = Gathering(
            self._me, self._rule.world_size, credentials, self._rendezvous, self._search
        )

    @property
    def world_size(self) -> int | None:
        """The fixed number of processes; None: all processes that are found."""
        return self._rule.world_size or None

    @property
    def min_peers(self) -> int:
        """The least number of other processes in the group."""
        return self._rule.min_peers

    @property
    def port(self) -> int:
        """The TCP port on which this process listens."""
        return self._base.port

    @property
    def peers(self) -> tuple[Participant, ...]:
        """The other processes found so far, in the order of their ids."""
        return self._peers.peers

    def wait_for_peers(self, n: int, timeout: Duration) -> tuple[Participant, ...]:
        """Block until at least ``n`` other processes are found; returns all that are found.

        OperationTimeout if fewer are found within ``timeout`` seconds; Refused if the other
        processes have formed a group already; LinkError if the search itself has broken.
        """
        n = checked_whole("n", n, at_least=0)
        return self._peers.wait(n, checked_seconds(timeout), self._search.complaint)

    def establish_ring(self, timeout: Duration | None = None) -> Communicator:
        """Form the group, unless it exists, and return its communicator.

        A context on this backend uses the same communicator. Rank 0 is the process with the lowest
        id; the other ranks follow the ring whose slowest measured link is fastest. Blocks at most
        ``timeout`` seconds (default POTLUCK_PEER_TIMEOUT_S). OperationTimeout names the absent
        processes; Refused if the group was formed without this process; ConfigurationError if rank
        0 was given another world size.
        """
        seconds = self._settings.peer_timeout_s if timeout is None else checked_seconds(timeout)
        return self.form(0, None, seconds)

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Communicator:
        """The communicator of the first group, or of the members that remain after ``after_epoch``.

        The next group needs a majority of the last one, not counting processes that certainly
        ended. GroupError without a majority within ``timeout_s``; Evicted if other members have
        gone on without this process.
        """
        ring = self._ring
        if ring is not None and ring.group.epoch > after_epoch and ring.error is None:
            return ring
        deadline = time.monotonic() + timeout_s
        situation: Situation
        if self._formed is not None:
            situation = Next(self._me.instance, self._formed, cause)
        else:
            self.wait_for_peers(self._rule.min_peers, timeout_s)
            situation = First(self._me.instance, self._rule, self._peers, self._search)
        while True:
            formed = self._gathering.agree(situation, deadline)
            try:
                return self._meet(formed, deadline)
            except GroupError:
                if time.monotonic() >= deadline:
                    raise

    def _meet(self, formed: Formed, deadline: float) -> Communicator:
        """The communicator of an agreed group, when all its members have links to each other."""
        rank = formed.rank_of(self._me.instance)
        group = Group(formed.epoch, rank, _members(formed), formed.name, formed.paths)
        left = min(_MEET_S, max(0.1, deadline - time.monotonic()))
        communicator = self._base.open_linked(group, left)
        with self._changed:
            self._formed, self._formed_at = formed, time.time()
            self._changed.notify_all()
        self._gathering.attempts.clear()
        self._search.rest()
        self._ring = communicator
        return communicator

    def close(self) -> None:
        self._search.close()
        self._rendezvous.close()
        if self._ring is not None:
            self._ring.close()
        self._base.close()

    def _objection(self, hello: Hello) -> Refusal | None:
        """The refusal of a process outside of the group that was formed; None if it may go on."""
        with self._changed:
            formed = self._formed
            if formed is None or formed.rank_of(hello.worker) >= 0:
                return None
            members = ", ".join(
                f"{participant.member.host or 'that machine'}:{participant.member.port}"
                for participant in formed.participants[:8]
            )
            at = time.strftime("%H:%M:%S", time.localtime(self._formed_at))
            return Refusal(
                FORMED,
                f"a group of {len(formed.participants)} processes was formed at {at} ({members}), "
                "which accepts no new members. Start this process together with the others "
                "(POTLUCK_MIN_PEERS says for how many to wait), wait for the end of that group, or "
                "give the processes of another job a secret of their own (POTLUCK_PSK)",
            )

    def _objection_to_joining(self, hello: Hello) -> Refusal | None:
        refusal = self._objection(hello)
        if refusal is None and not INSTANCE.match(hello.worker):
            refusal = Refusal("port", "that process has no id")
        if refusal is None and self._formed is None and hello.world_size != self._rule.world_size:
            refusal = Refusal(
                "world",
                f"the process with the lowest id wants {_world(self._rule.world_size)}, this one "
                f"{_world(hello.world_size)}; give all processes the same world_size",
            )
        return refusal


def _rule(
    world_size: int | None, min_peers: int | None, settle_s: float, settings: Settings
) -> FirstGroup:
    if world_size is not None:
        if checked_whole("world_size", world_size, at_least=0) < 1:
            raise ConfigurationError(f"a world has at least one process, not {world_size}")
        return FirstGroup(world_size, world_size - 1, settle_s)
    if min_peers is None:
        min_peers = max(1, settings.min_peers)
    if checked_whole("min_peers", min_peers, at_least=0) < 1:
        raise ConfigurationError(
            f"min_peers={min_peers}: a search is for at least one other process; a script alone "
            "needs no discovery"
        )
    return FirstGroup(0, min_peers, settle_s)


def _members(formed: Formed) -> tuple[Member, ...]:
    """The members of a group, with their local ranks."""
    seen: dict[str, int] = {}
    members = []
    for participant in formed.participants:
        member = participant.member
        local_rank = seen[member.node] = seen.get(member.node, -1) + 1
        members.append(replace(member, local_rank=local_rank))
    return tuple(members)


def _world(size: int) -> str:
    return f"a world of {size}" if size else "a world of all processes that are found"
