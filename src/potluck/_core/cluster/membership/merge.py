"""Histories: which one a node joins or founds, how two merge, how one is forked. Pure.

Merging: nodes of different histories meet. The facts are the peers' last heartbeats.

Forks: one node of a view goes on in a history of its own, without the others. Inside a history
every decision needs a majority, whatever is banned: the other side of a cut may not know of the ban
yet. Where banned members keep the others from a decision, one of these others goes on as a fork,
and the rest of them join it. So a history never has two views of one epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from potluck._core.cluster.membership.failure_detector import PeerHealth, Status
from potluck._core.wire.nodes import JobGroup, View, ViewMember


def forked(view: View, first: View) -> View:
    """``first``, the first view of a history of one node, as a fork of ``view``: with this node's
    part in the groups of jobs. A fork of a fork is one of the same origin."""
    (node,) = first.nodes
    groups = []
    for group in view.groups:
        members = tuple(member for member in group.members if member.node == node)
        if members:
            groups.append(JobGroup(group.job, first.epoch, members, first.epoch, world=group.world))
    return msgspec.structs.replace(
        first, groups=tuple(groups), fork_of=view.fork_of or view.history
    )


def left_by_ban(
    view: View, subtracted: Collection[ViewMember], banned: Collection[str]
) -> tuple[ViewMember, ...]:
    """The members of ``view`` that are neither banned nor ``subtracted``, holders of the state
    of a job first: the first of them forks. Empty if no member is banned."""
    left = [m for m in view.members if m not in subtracted and m.node not in banned]
    holders = {
        member.node
        for group in view.groups
        for member in group.members
        if member.worker not in group.entering
    }
    if set(view.nodes).isdisjoint(banned):
        return ()
    return tuple(sorted(left, key=lambda member: member.node not in holders))


@dataclass(frozen=True, slots=True)
class ObservedCluster:
    """A history as observed here: ``nodes`` are the peers that use its newest view, ``size`` is how
    many members they say it has. ``whole``: all its members have a link with this node."""

    history: str
    fork_of: str
    busy: bool
    size: int
    nodes: tuple[str, ...]

    @property
    def origin(self) -> str:
        """The history that this one was forked from, or this one."""
        return self.fork_of or self.history

    @property
    def whole(self) -> bool:
        return len(self.nodes) >= self.size

    def outranks(self, other: ObservedCluster) -> bool:
        """Whether a newcomer joins this cluster rather than ``other``. In this order: more nodes
        use it; it has jobs; it is no fork; its history has the lesser name."""
        mine = (len(self.nodes), self.busy, not self.fork_of)
        theirs = (len(other.nodes), other.busy, not other.fork_of)
        return mine > theirs or (mine == theirs and self._name < other._name)

    @property
    def _name(self) -> tuple[str, list[str]]:
        return self.history, sorted(self.nodes)

    def gives_way_to(
        self, other: ObservedCluster, forked_from: Collection[str], *, is_fresh: bool
    ) -> bool:
        """Whether this cluster gives up its history for that of ``other``. ``forked_from``: the
        last known members of the history that this one was forked from.

        What one node claims does not end what several have agreed on: each node that counts reports
        for itself that it uses the history. So a cluster never gives way to a smaller one, and one
        with jobs only to a larger one with jobs. Two exceptions. Sides of one history have the same
        jobs, so one side has to end: of equals a fork gives way, to its origin or to the fork with
        the lesser name; and it gives way to an origin without jobs that is no smaller, if a member
        that it knows is still there. A cluster without jobs that ``is_fresh`` gives way to one with
        jobs: machines that start together find each other before they find the machine that trains.
        """
        mine, theirs = len(self.nodes), len(other.nodes)
        if other.fork_of == self.history and theirs <= mine:
            return False
        if self.fork_of and self.origin == other.origin and theirs >= mine:
            if not other.fork_of and not set(forked_from).isdisjoint(other.nodes):
                return True
            if theirs == mine and self.busy and other.busy:
                return not other.fork_of or other._name < self._name
        if self.busy:
            return other.busy and theirs > mine
        if is_fresh and other.busy:
            return True
        return other.outranks(self)


def own_cluster(view: View) -> ObservedCluster:
    """The cluster of this node, which uses ``view``."""
    return ObservedCluster(
        view.history, view.fork_of, bool(view.groups), len(view.members), view.nodes
    )


def observe(peers: Iterable[PeerHealth]) -> list[ObservedCluster]:
    """The histories of peers with a working link, without paused peers; of each history the view
    that most of these peers use, and of equals the newest."""
    users: dict[str, dict[int, list[PeerHealth]]] = {}
    for peer in peers:
        beat = peer.last
        if peer.status is Status.UP and beat is not None and beat.history and not beat.paused:
            users.setdefault(beat.history, {}).setdefault(beat.epoch, []).append(peer)
    observed = []
    for history, epochs in users.items():
        members = max(epochs.items(), key=lambda item: (len(item[1]), item[0]))[1]
        last = members[0].last
        assert last is not None
        nodes = tuple(peer.node for peer in members)
        observed.append(ObservedCluster(history, last.fork_of, last.busy, last.size, nodes))
    return observed


def history_to_join(observed: Iterable[ObservedCluster]) -> str:
    """The history that a node without a view asks to join; empty if there is none. Its members may
    already count on this node, which then is not heard."""
    best: ObservedCluster | None = None
    for cluster in observed:
        is_whole = len(cluster.nodes) + 1 >= cluster.size
        if is_whole and (best is None or cluster.outranks(best)):
            best = cluster
    return "" if best is None else best.history


def may_found(me: str, peers: Iterable[PeerHealth], observed: Iterable[ObservedCluster]) -> bool:
    """Whether node ``me`` is to found a history: no history is observed, and of the nodes that are
    linked with it and ask to join none, it has the least id."""
    if any(True for _ in observed):
        return False
    rivals = [p.last for p in peers if p.status is Status.UP and p.node < me]
    return not any(beat is not None and not beat.history and not beat.wants for beat in rivals)


def cluster_to_join(
    view: View,
    paused: bool,
    peers: dict[str, PeerHealth],
    observed: Iterable[ObservedCluster],
    forked_from: Collection[str] = (),
    *,
    is_fresh: bool,
) -> ObservedCluster | None:
    """The cluster that this node's cluster should merge into, None if it stays. All present members
    of this one must be linked with all members of the other. A paused one merges only into a fork
    that an operator ordered on one of its members."""
    mine = own_cluster(view)
    for cluster in observed:
        # Of the same history, too: a newcomer that heard a liar alone may be in a view of its own.
        is_mine = not set(view.nodes).isdisjoint(cluster.nodes) or paused
        if (cluster.history == view.history and is_mine) or not cluster.whole:
            continue
        if paused:
            if cluster.fork_of != mine.origin or set(view.nodes).isdisjoint(cluster.nodes):
                continue
        elif not mine.gives_way_to(cluster, forked_from, is_fresh=is_fresh):
            continue
        rows = []
        for node in view.nodes:
            peer = peers.get(node)
            if peer is not None and peer.status is Status.UP and peer.last is not None:
                rows.append(peer.last.links)
        if all(node in row for row in rows for node in cluster.nodes):
            return cluster
    return None
