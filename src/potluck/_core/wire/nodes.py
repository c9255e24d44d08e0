"""The messages of the membership protocol between agents, and the views that they decide.

The protocol is described in ``docs/membership.md``. Messages are msgspec structs, bounded as in
``worker_link.py``. The sender and its incarnation are known from the link's greeting.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck._core.types import MeasuredPath, Member
from potluck._core.wire.format import Name, Pairs, Text

MAX_NODES = 1024
MAX_GROUPS = 64
MAX_WORKERS = 4096
MAX_PATHS = 256

MAX_VIEW_BYTES = 448 * 1024
"""The size of a view. A message between agents (1 MiB) has room for two: ``RecoveryReport``."""
MAX_HISTORIES = 8
MAX_EPOCH = (1 << 31) - 1
"""The highest epoch. Frames between workers carry epochs in 32 bits (``frames.py``)."""

Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NODES)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
Used = Annotated[int, msgspec.Meta(ge=-1, le=MAX_EPOCH)]
"""The highest epoch that a node has used; -1 before the first of a private agent."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Digest = Annotated[bytes, msgspec.Meta(max_length=16)]
Ballot = tuple[Epoch, Name]
"""The ballot of an attempt to decide a view: its number and its proposer, compared in this
order."""


class ViewMember(msgspec.Struct, frozen=True):
    """A member of a view: an ``incarnation`` (run of the agent) of ``node``. ``joined`` is the
    epoch of its first view. A node whose agent starts again is a new member."""

    node: Name
    incarnation: Count
    joined: Epoch

    @property
    def seniority(self) -> tuple[int, str]:
        """The sort key, with the most senior member first."""
        return (self.joined, self.node)


class JobGroup(msgspec.Struct, frozen=True):
    """The group of ``job``: its workers in rank order, and the epoch of the view that decided it.

    ``origin`` is the epoch of the group in which the job's state began. Each later group has
    the same ``origin`` if at least one of its members held the state before. If all holders of
    the state have ended, the next group begins afresh: ``origin`` is its own epoch, and training
    steps since the last checkpoint may be repeated. ``entering`` are members that may lack the
    state, in a first group all members. ``paths`` are the links between the members' nodes as the
    leader knew them. ``world`` is the number of the world for which the workers were started.
    ``cut`` are pairs of workers that can't reach each other.
    """

    job: Name
    epoch: Epoch
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_WORKERS)]
    origin: Epoch = 0
    entering: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()
    paths: Annotated[tuple[MeasuredPath, ...], msgspec.Meta(max_length=MAX_PATHS)] = ()
    world: Count = 0
    cut: Pairs = ()


class View(msgspec.Struct, frozen=True):
    """The nodes of the cluster and the groups of its jobs, decided by the members of the previous
    view.

    ``members`` are in order of seniority. ``fork_of`` is the history from which this one was
    forked, by the operator's command or after a ban; empty otherwise.
    """

    history: Name
    epoch: Epoch
    members: Annotated[tuple[ViewMember, ...], msgspec.Meta(max_length=MAX_NODES, min_length=1)]
    groups: Annotated[tuple[JobGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    reason: Text = ""
    fork_of: Name = ""

    @property
    def leader(self) -> str:
        """The most senior node."""
        return self.members[0].node

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes, the most senior first."""
        return tuple(member.node for member in self.members)

    def member(self, node: str) -> ViewMember | None:
        """The member of ``node``; None if the node is no member."""
        for member in self.members:
            if member.node == node:
                return member
        return None

    def group(self, job: str) -> JobGroup | None:
        """The group of ``job``; None if it has no group."""
        for group in self.groups:
            if group.job == job:
                return group
        return None


class Proposal(msgspec.Struct, frozen=True):
    """The proposal of ``view`` as successor of the view of epoch ``parent``. ``ended`` are the
    members of that view that have ended, as the proposer knows. ``fresh``: the view is the
    proposer's own, not one that other members had accepted before."""

    ballot: Ballot
    parent: Epoch
    view: View
    ended: Names = ()
    fresh: bool = False


class HistoryRecord(msgspec.Struct, frozen=True):
    """A node's record of one history on disk: the last view that the node used, and the proposal
    that it accepted since."""

    view: View
    accepted: Proposal | None = None


class StableRecord(msgspec.Struct, frozen=True):
    """A node's record of the control plane on disk. ``installed`` is the highest epoch that the
    node ever used; ``histories`` are its latest histories, the newest last."""

    installed: Used = 0
    histories: Annotated[tuple[HistoryRecord, ...], msgspec.Meta(max_length=16)] = ()


# Failure detection, every 200 ms.


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The heartbeat of the sender.

    ``echo`` is the newest ``number`` that the sender received from the receiver, ``held_s`` seconds
    ago; with ``lease`` the sender accepts no view without the receiver for a while after that.
    ``links`` are the nodes with a working link to the sender. ``history`` and ``epoch`` are the
    sender's view, ``size`` its number of members; without a view ``history`` is empty and ``wants``
    is the history that the sender would join. ``installed`` is the highest epoch that the sender
    ever used, or has given up in the history that it wants. ``digest`` is a hash of
    the sender's view, empty without one.
    """

    number: Count
    echo: Count = 0
    held_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    lease: bool = True
    links: Names = ()
    history: Name = ""
    epoch: Epoch = 0
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)] = 0
    busy: bool = False
    paused: bool = False
    fork_of: Name = ""
    wants: Name = ""
    installed: Used = 0
    digest: Digest = b""


# Indirect probes, through another node.


class IndirectProbe(msgspec.Struct, frozen=True, tag=True):
    """A request to probe ``target``."""

    target: Name


class Ping(msgspec.Struct, frozen=True, tag=True):
    """A request for a Pong, on behalf of ``origin``."""

    origin: Name


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Ping, to be forwarded to ``origin`` as Reached."""

    origin: Name


class Reached(msgspec.Struct, frozen=True, tag=True):
    """The result of a probe: ``target`` answered the sender."""

    target: Name


# The decision of the next view, by single-decree Paxos.


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """A request for a promise: to accept no proposal with an older ballot than ``ballot`` as
    successor of view ``parent``."""

    history: Name
    parent: Epoch
    ballot: Ballot


class Promise(msgspec.Struct, frozen=True, tag=True):
    """The promise for ``ballot``. ``accepted`` is the newest proposal that the sender has accepted,
    ``promised_to`` are the proposers to which the sender has promised since then."""

    ballot: Ballot
    accepted: Proposal | None = None
    promised_to: Names = ()


class Propose(msgspec.Struct, frozen=True, tag=True):
    """A request to accept ``proposal``."""

    proposal: Proposal


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The sender has accepted the proposal of ``ballot``, and written it to its disk. ``digest`` is
    a hash of the view. The proposer counts these; the other members check its count by them."""

    ballot: Ballot
    digest: Digest = b""


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The rejection of ``ballot``, for ``reason``. ``promised`` is the newest ballot that the
    sender knows."""

    ballot: Ballot
    promised: Ballot
    reason: Text


class Decided(msgspec.Struct, frozen=True, tag=True):
    """``view`` is decided. A node that is not in it is no member any more."""

    view: View


# Recovery of the state that an ended member had accepted.


class RecoveryRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for the receiver's record of ``history``. The receiver is a member in the sender's
    view of ``epoch``."""

    history: Name
    epoch: Epoch


class RecoveryReport(msgspec.Struct, frozen=True, tag=True):
    """The sender's record of ``history``. The sender is no member of it (any more, or in this
    incarnation), and will not use a membership in it from ``epoch`` or before."""

    history: Name
    epoch: Epoch
    found: HistoryRecord | None = None


NodeMessage = (
    Heartbeat
    | IndirectProbe
    | Ping
    | Pong
    | Reached
    | Prepare
    | Promise
    | Propose
    | Accepted
    | Rejected
    | Decided
    | RecoveryRequest
    | RecoveryReport
)
