"""The events that membership takes, and the actions that it gives.

Events of one worker are the messages of ``wire.worker_link`` and ``wire.jobs``, as they came; the
other events are here. Every action has its reason, in words for people.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck._core.cluster.membership.events import Note as Note
from potluck._core.cluster.membership.events import Tick as Tick
from potluck._core.types import Member
from potluck._core.wire.jobs import Disconnected, Exited, ProcessState, Stalled
from potluck._core.wire.worker_link import (
    Entered,
    Failed,
    Finished,
    Lost,
    Mended,
    ProbeReply,
    Ready,
)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The operator asked for the end with ``signal``."""

    signal: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """The nodes agreed on a group, in the view of ``epoch``: announced as
    ``announced``; or, when that is 0, one of their own, which ``members`` (in rank order) are left
    in while others went with their nodes."""

    epoch: int
    members: tuple[str, ...]
    announced: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NotAgreed:
    """The nodes did not agree on the group that was announced as ``announced`` because of
    ``cause``. A later one needs an epoch above ``floor``."""

    announced: int
    floor: int
    reason: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Away:
    """The nodes of ``workers`` left the cluster's view."""

    workers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A node is there to run ``worker``, which does not run: a new one, or one that was away and
    did not outlive that."""

    worker: str


@dataclass(frozen=True, slots=True)
class Severed:
    """The pairs of workers whose agents do not reach each other, and are linked by way of a third.
    Sent every now and then."""

    pairs: frozenset[tuple[str, str]]


Event = (
    Ready
    | Entered
    | Lost
    | ProbeReply
    | Mended
    | Stalled
    | Finished
    | Failed
    | Disconnected
    | Exited
    | Interrupted
    | Agreed
    | NotAgreed
    | Away
    | Placed
    | Severed
    | ProcessState
    | Tick
)


@dataclass(frozen=True, slots=True)
class Announce:
    """Have the nodes agree on the group of these ``members`` (in rank order), of which the
    ``joined`` were not in the group before; of these, ``back`` have been in an earlier group with
    their present process. ``epoch`` is provisional: it names this announcement until ``Agreed``
    gives the group's real epoch. ``world`` is the number of the fixed world that the members form,
    None if they are elastic. ``cut``: the pairs of them that can't reach each other."""

    epoch: int
    members: tuple[Member, ...]
    joined: tuple[str, ...]
    reason: str
    world: int | None = None
    cut: tuple[tuple[str, str], ...] = ()
    back: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EndGroup:
    """Inform ``to`` that groups are over: all up to ``epoch`` with member ``worker``, or exactly
    ``epoch`` when ``worker`` is empty."""

    epoch: int
    worker: str
    certain: bool
    to: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Ask ``to`` whether they are there."""

    probe: int
    to: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start the process of ``worker``; ``attempt`` counts its restarts so far. ``alone``: no whole
    world starts with it."""

    worker: str
    attempt: int
    reason: str
    alone: bool = True


@dataclass(frozen=True, slots=True)
class BeginWorld:
    """From now on workers are started for world ``number``, ``members`` in rank order."""

    number: int
    members: tuple[str, ...]
    is_fixed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EndWorld:
    """Stop the processes of ``workers``: a fixed world has ended, because ``lost`` left it, and is
    started again when they have ended. ``cause`` is why they left, ``reason`` also what
    follows."""

    workers: tuple[str, ...]
    lost: tuple[str, ...]
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the processes of ``workers`` now."""

    workers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class EndWorkers:
    """Ask ``workers`` to end, and end them when they have not after a grace period.
    ``signal`` is sent to them at once unless it is 0."""

    workers: tuple[str, ...]
    signal: int
    reason: str


Action = Announce | EndGroup | SendProbe | Start | BeginWorld | EndWorld | Kill | EndWorkers | Note
