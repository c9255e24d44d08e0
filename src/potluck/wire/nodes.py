"""What the agents of two nodes say to each other, and the views they speak of.

The protocol is in ``docs/membership.md``. Messages are msgspec structs, bounded as in
``control.py``; who speaks, and in which incarnation, the link knows from its greeting.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.types import MeasuredPath, Member
from potluck.wire.names import Name, Text

MAX_NODES = 1024
MAX_GROUPS = 64
MAX_WORKERS = 4096
MAX_PATHS = 256

Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NODES)]
Ballot = tuple[int, Name]
"""An attempt to decide a view: its number and who makes it. Compared in this order."""


class ViewMember(msgspec.Struct, frozen=True):
    """A member of a view: one ``incarnation`` (run of the agent) of ``node``. ``joined`` is the
    epoch of its first view. A node whose agent starts again is a new member."""

    node: Name
    incarnation: int
    joined: int

    @property
    def seniority(self) -> tuple[int, str]:
        """Sorts the most senior first."""
        return (self.joined, self.node)


class JobGroup(msgspec.Struct, frozen=True):
    """The workers of ``job`` in rank order, and the epoch of the view they were agreed on in.

    ``origin`` is the epoch of the group in which the job's state began. Each later group has
    the same ``origin`` if at least one of its members held the state before. If all holders of
    the state have ended, the next group begins afresh: ``origin`` is its own epoch, and training
    steps since the last checkpoint may be done again. ``entering`` are members that are not known
    to hold the state, in a first group all members. ``paths`` are the links between the members'
    nodes as the leader knew them. ``world`` is the number of the world that the members were
    started for.
    """

    job: Name
    epoch: int
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_WORKERS)]
    origin: int = 0
    entering: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()
    paths: Annotated[tuple[MeasuredPath, ...], msgspec.Meta(max_length=MAX_PATHS)] = ()
    world: int = 0


class View(msgspec.Struct, frozen=True):
    """The nodes of the cluster and the groups of its jobs, agreed on by the members of the view
    before.

    ``members`` are in order of seniority. ``fork_of`` names the history that this one left by the
    operator's order, empty otherwise.
    """

    history: Name
    epoch: int
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
        """The member that ``node`` is, None if it is none."""
        for member in self.members:
            if member.node == node:
                return member
        return None

    def group(self, job: str) -> JobGroup | None:
        """The group of ``job``, None if it has none."""
        for group in self.groups:
            if group.job == job:
                return group
        return None


class Proposal(msgspec.Struct, frozen=True):
    """``view`` as successor of the view of epoch ``parent``; ``ended`` are the members of that view
    that the proposer knows to have ended. ``fresh``: it is the proposer's own, not one that others
    had accepted before."""

    ballot: Ballot
    parent: int
    view: View
    ended: Names = ()
    fresh: bool = False


class HistoryRecord(msgspec.Struct, frozen=True):
    """What a node has on disk of one history: the last view it used, what it accepted after it."""

    view: View
    accepted: Proposal | None = None


class StableRecord(msgspec.Struct, frozen=True):
    """What a node keeps on disk of the control plane. ``installed`` is the highest epoch it ever
    used; ``histories`` are its newest histories, the newest last."""

    installed: int = 0
    histories: Annotated[tuple[HistoryRecord, ...], msgspec.Meta(max_length=16)] = ()
    banned: Names = ()


# Every 200 ms.


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """I am here.

    ``echo`` is the newest ``number`` I heard from you, ``held_s`` how long ago; with ``lease`` I
    agree to no view without you for a while after I heard that. ``links``: the nodes that I have a
    working link with. ``history`` and ``epoch``: the view I use, ``size`` its number of members;
    empty without one, and then ``wants`` is the history I would join. ``installed``: the highest
    epoch I ever used. ``bans``: a checksum of those I know.
    """

    number: int
    echo: int = 0
    held_s: float = 0.0
    lease: bool = True
    links: Names = ()
    history: Name = ""
    epoch: int = 0
    size: int = 0
    busy: bool = False
    paused: bool = False
    fork_of: Name = ""
    wants: Name = ""
    installed: int = 0
    bans: int = 0


# Is it there? Asked through another node.


class IndirectProbe(msgspec.Struct, frozen=True, tag=True):
    """Please see whether you can reach ``target``."""

    target: Name


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer me with Pong, for ``origin``."""

    origin: Name


class Pong(msgspec.Struct, frozen=True, tag=True):
    """I am here, tell ``origin``."""

    origin: Name


class Reached(msgspec.Struct, frozen=True, tag=True):
    """``target`` answered me."""

    target: Name


# Which view comes next.


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Promise to accept no proposal older than ``ballot`` to follow view ``parent``."""

    history: Name
    parent: int
    ballot: Ballot


class Promise(msgspec.Struct, frozen=True, tag=True):
    """Promised. ``accepted`` is the newest proposal that I have accepted, ``promised_to`` are the
    proposers that I have given a promise since then."""

    ballot: Ballot
    accepted: Proposal | None = None
    promised_to: Names = ()


class Propose(msgspec.Struct, frozen=True, tag=True):
    """Accept ``proposal``."""

    proposal: Proposal


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The proposal of ``ballot`` is accepted, and on my disk."""

    ballot: Ballot


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """Not ``ballot``, for ``reason``. ``promised`` is the newest ballot I know of."""

    ballot: Ballot
    promised: Ballot
    reason: Text


class Decided(msgspec.Struct, frozen=True, tag=True):
    """``view`` is agreed on. A node that is not in it is no member any more."""

    view: View


# Recovery: what a member that ended had accepted.


class RecoveryRequest(msgspec.Struct, frozen=True, tag=True):
    """What do you have on disk of ``history``? In my view of ``epoch`` you are a member."""

    history: Name
    epoch: int


class RecoveryReport(msgspec.Struct, frozen=True, tag=True):
    """All I have of ``history``. I am no member of it (any more, or in this incarnation), and will
    use no membership in it that dates from ``epoch`` or before."""

    history: Name
    epoch: int
    found: HistoryRecord | None = None


class Bans(msgspec.Struct, frozen=True, tag=True):
    """These nodes are banned."""

    nodes: Names


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
    | Bans
)
