"""What a worker and its agent say to each other after the greeting, and how a CLI asks for status.

A worker's messages are also the events that ``cluster.jobs.groups.membership`` decides about, and
travel unchanged to the node that leads the job. Each names its ``worker``; the agent ends the link
of a worker that names another.

Each message is a tagged msgpack struct behind a little-endian u32 length of at most
``MAX_MESSAGE`` bytes, checked before anything is allocated. Texts and collections are bounded, so
that no peer can make the other hold more than it means to. The first messages of a connection
(Hello, Welcome, Refusal) are in ``messages.py``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.types import MeasuredPath, Member
from potluck.wire.format import MessageFormat
from potluck.wire.messages import SEALED
from potluck.wire.names import Name

MAX_MESSAGE = 1 << 20
MAX_TEXT = 16 * 1024
MAX_MEMBERS = 4096
MAX_FACTS = 128

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Fact = int | float | bool | Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Facts = Annotated[dict[Name, Fact], msgspec.Meta(max_length=MAX_FACTS)]


# From a worker to its agent.


class Ready(msgspec.Struct, frozen=True, tag=True):
    """I have no usable group and want a view with an epoch above ``after_epoch``.

    ``node``, ``host`` and ``port`` say where my listener is. The node that leads the job fills in
    ``node``, from the link that this came by. ``is_fixed``: my script can't change its world while
    it runs; ``port`` is where rank 0 will have torch's store, if torch forms the world.
    """

    worker: Name
    after_epoch: int = 0
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    pid: int = 0
    node: Name = ""
    host: Name = ""
    local_rank: int = 0
    cause: Text = ""
    is_fixed: bool = False

    @property
    def member(self) -> Member:
        """The worker as the others of its group will see it."""
        return Member(self.worker, self.node, self.host, self.port, self.local_rank)


class Installed(msgspec.Struct, frozen=True, tag=True):
    """I am in the group of ``epoch`` now."""

    worker: Name
    epoch: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The worker has left its group ``epoch``, which does not work any more, and wants a later one.

    ``rank`` is the member that it blames (-1: none). ``certain`` says that the link to that member
    ended; otherwise the member was silent for too long. ``step`` is the training step in which it
    happened, counted from 0 (-1: unknown).
    """

    worker: Name
    epoch: int
    rank: int = -1
    certain: bool = False
    cause: Text = ""
    step: int = -1


class WorkerProgress(msgspec.Struct, frozen=True, tag=True):
    """The newest facts about a training loop. ``step`` is the number of committed steps, -1 if not
    told; ``epoch`` that of the group in which the last of them was committed; ``committed_samples``
    of ``total_samples`` are the samples of these steps (0: not told); ``facts`` are the new
    ones."""

    worker: Name
    epoch: int = 0
    step: int = -1
    loss: float | None = None
    samples_per_s: float | None = None
    device: Name = ""
    facts: Facts = {}
    committed_samples: Count = 0
    total_samples: Count = 0


class Said(msgspec.Struct, frozen=True, tag=True):
    """A line for people. An empty ``worker``: from the agent itself."""

    worker: Name
    text: Text


class Failed(msgspec.Struct, frozen=True, tag=True):
    """My own code raised. ``secondary`` marks a failure that only follows another worker's;
    ``gave_up``, that my script ends at its first loss, and did not ask for another group."""

    worker: Name
    text: Text
    secondary: bool = False
    gave_up: bool = False


class Finished(msgspec.Struct, frozen=True, tag=True):
    """I am done, not lost: later groups need not wait for me."""

    worker: Name


class ChaosDue(msgspec.Struct, frozen=True, tag=True):
    """I stand before ``step``, for which a fault was ordered, and wait for ChaosDone."""

    worker: Name
    epoch: int
    step: int


class ProbeReply(msgspec.Struct, frozen=True, tag=True):
    """I am here. ``blocked`` says that a call of mine waits for other ranks."""

    worker: Name
    probe: int
    blocked: bool = False


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """An operation of mine in group ``epoch`` has been under way for long: do the others run?"""

    worker: Name
    epoch: int


# From an agent to a worker.


class GroupView(msgspec.Struct, frozen=True, tag=True):
    """The members of ``epoch`` in rank order; the first is the leader.

    ``chaos_steps`` are the steps before which this worker has to ask with ChaosDue. ``paths`` are
    the links between their nodes as measured, the same for all members.
    """

    job: Name
    epoch: int
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    chaos_steps: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    paths: Annotated[tuple[MeasuredPath, ...], msgspec.Meta(max_length=256)] = ()


class GroupOver(msgspec.Struct, frozen=True, tag=True):
    """Leave the group at once: a call blocked in it would wait in vain.

    With a ``worker``: every group up to ``epoch`` that has this member is over, because it died
    (``certain``) or was evicted. Without one: exactly the group ``epoch`` is over.
    """

    epoch: int
    worker: Name
    certain: bool
    cause: Text

    def ends(self, epoch: int, workers: tuple[str, ...]) -> bool:
        """Whether the group of ``epoch`` with these members is over by this message."""
        if self.worker:
            return epoch <= self.epoch and self.worker in workers
        return epoch == self.epoch


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Answer with ProbeReply at once."""

    probe: int


class ChaosDone(msgspec.Struct, frozen=True, tag=True):
    """The fault ordered for ``step`` was carried out; go on."""

    step: int


class Hold(msgspec.Struct, frozen=True, tag=True):
    """No group can be had for now, for this ``reason`` outside the job; wait on for a view."""

    reason: Text


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The job ends: raise ``reason`` out of whatever blocks, and exit."""

    reason: Text


# How a job is doing, for people.


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker in a status. ``rank`` is -1 outside the current view; ``node`` is what people call
    the node it is on, empty where the job has one node only."""

    worker: Name
    rank: int
    phase: Name
    pid: int
    restarts: int
    device: Name
    step: int
    samples_per_s: float | None
    node: Name = ""


class Samples(msgspec.Struct, frozen=True):
    """How far a training is: ``committed`` samples of ``total``, over all epochs of its data set,
    and how many per second of late (None: not known yet)."""

    committed: Count
    total: Annotated[int, msgspec.Meta(ge=1)]
    per_s: float | None = None


class StatusReply(msgspec.Struct, frozen=True):
    """One job as its agent sees it. ``started`` is Unix time in seconds; ``samples`` is None where
    the script does not tell of them; ``world_restarts`` is how often the world of a script that is
    not elastic was started again."""

    job: Name
    node: Name
    pid: int
    script: Text
    started: float
    epoch: int
    step: int
    loss: float | None
    workers: Annotated[tuple[WorkerStatus, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    events: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]
    wire: Name = SEALED
    samples: Samples | None = None
    world_restarts: int = 0


FromWorker = (
    Ready
    | Installed
    | Lost
    | WorkerProgress
    | Said
    | Failed
    | Finished
    | ChaosDue
    | ProbeReply
    | Waiting
)
FromAgent = GroupView | GroupOver | Probe | ChaosDone | Hold | Stop

TO_AGENT: MessageFormat[FromWorker] = MessageFormat(
    FromWorker, limit=MAX_MESSAGE, name="a message to an agent"
)
FROM_AGENT: MessageFormat[FromAgent] = MessageFormat(
    FromAgent, limit=MAX_MESSAGE, name="a message from an agent"
)


def clip(text: str) -> str:
    """``text`` short enough for a message, with its end kept: the end of a traceback says most."""
    return text if len(text) <= MAX_TEXT else "..." + text[-(MAX_TEXT - 3) :]
