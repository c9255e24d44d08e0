"""The messages between a worker and its agent after the greeting, and the status of jobs.

A worker's messages are also events of ``cluster.jobs.groups.membership``, and are forwarded
unchanged to the node that leads the job. Each message names its ``worker``; the agent ends the link
of a worker that names another worker.

Each message is a tagged msgpack struct with a little-endian u32 length in front, of at most
``MAX_MESSAGE`` bytes, which is checked before memory is allocated. Texts and collections are
bounded, so that a peer can't exhaust the other's memory. The first messages of a connection (Hello,
Welcome, Refusal) are in ``greeting.py``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck._core.types import Engine, MeasuredPath, Member, Site
from potluck._core.wire.format import MessageFormat, Name, Pairs

MAX_MESSAGE = 1 << 20
MAX_TEXT = 16 * 1024
MAX_MEMBERS = 4096
MAX_FACTS = 128
MAX_HOLD_S = 600.0

TYPED = "POTLUCK_TYPED"
"""The variable with the descriptor of the pipe for what is typed at a worker's debugger, its inode
and the worker's process id (``jobs/shim.py``): a program that the script starts has the variable,
but another file behind that number; a fork has the file."""
EOT = b"\x04"
"""The end of what is typed, in that pipe."""

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Fact = int | float | bool | Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Epoch = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
"""An epoch, of 31 bits as in frames; -1 for none."""
Step = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)]
"""A training step or a rank; -1 for none."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Pid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Facts = Annotated[dict[Name, Fact], msgspec.Meta(max_length=MAX_FACTS)]


# From a worker to its agent.


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has no usable group and requests one with an epoch above ``after_epoch``.

    ``host`` and ``port`` are the address of the worker's listener. The node that leads the job sets
    ``node`` from the link of the message. ``is_fixed``: the script can't change its world while it
    runs; if torch forms the world, ``port`` is the port at which rank 0 will serve torch's store.
    ``site`` is the node's setting.
    """

    worker: Name
    after_epoch: Epoch = 0
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    pid: Pid = 0
    node: Name = ""
    host: Name = ""
    local_rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)] = 0
    cause: Text = ""
    is_fixed: bool = False
    engine: Engine = Engine.NATIVE
    site: Site = ""

    @property
    def member(self) -> Member:
        """The worker as a member of a group."""
        return Member(
            self.worker,
            self.node,
            self.host,
            self.port,
            self.local_rank,
            self.engine,
            site=self.site,
        )


class Entered(msgspec.Struct, frozen=True, tag=True):
    """The worker has entered the group of ``epoch``."""

    worker: Name
    epoch: Epoch


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The worker has left its broken group ``epoch`` and requests a later one.

    ``rank`` is the member that the worker blames (-1: none). ``certain``: the link to that member
    ended; otherwise the member was silent for too long. ``unreachable``: the members that
    did not answer when this worker called them for a link. ``step`` is the present training step,
    counted from 0 (-1: unknown).
    """

    worker: Name
    epoch: Epoch
    rank: Step = -1
    certain: bool = False
    cause: Text = ""
    step: Step = -1
    unreachable: Annotated[tuple[Step, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()


class WorkerProgress(msgspec.Struct, frozen=True, tag=True):
    """The progress of a training loop. ``step`` is the number of committed steps (-1: unknown) and
    ``epoch`` the group in which the last of them was committed; ``committed_samples`` of
    ``total_samples`` are their samples, of which this process has computed ``worker_samples`` (0:
    unknown); ``facts`` are the facts since the last message."""

    worker: Name
    epoch: Epoch = 0
    step: Step = -1
    loss: float | None = None
    samples_per_s: float | None = None
    device: Name = ""
    facts: Facts = {}
    committed_samples: Count = 0
    total_samples: Count = 0
    worker_samples: Count = 0


class WorkerNote(msgspec.Struct, frozen=True, tag=True):
    """A line of output for the user. An empty ``worker`` stands for the agent itself."""

    worker: Name
    text: Text


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker's script raised. ``secondary``: the failure is a consequence of another worker's
    loss; ``gave_up``: the script ends at that loss, without a request for another group."""

    worker: Name
    text: Text
    secondary: bool = False
    gave_up: bool = False


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The worker has finished, so later groups do not wait for it."""

    worker: Name


class ChaosDue(msgspec.Struct, frozen=True, tag=True):
    """The worker is about to begin ``step``, for which a fault was ordered, and waits for
    ChaosDone."""

    worker: Name
    epoch: Epoch
    step: Step


class ProbeReply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Probe. ``blocked``: a call of the worker waits for other ranks, or the worker
    sits at a breakpoint."""

    worker: Name
    probe: Count
    blocked: bool = False


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """An operation of the worker in group ``epoch`` takes long; the agents are to check whether the
    other workers run."""

    worker: Name
    epoch: Epoch


class Mended(msgspec.Struct, frozen=True, tag=True):
    """The worker has reached member ``rank`` of its group ``epoch``, to which its link is cut."""

    worker: Name
    epoch: Epoch
    rank: Step


class Halted(msgspec.Struct, frozen=True, tag=True):
    """The worker stands still and the others are to wait for it: ``why``. It sits at a breakpoint,
    or, as its agent says, waits for data that comes; repeated every 1 or 2 s."""

    worker: Name
    why: Name


# From an agent to a worker.


class NewGroup(msgspec.Struct, frozen=True, tag=True):
    """The group of ``epoch``: its members in rank order, the most senior as rank 0.

    Before each of ``chaos_steps`` the worker sends ChaosDue. ``paths`` are the measured links
    between the members' nodes, equal for all members; ``cut`` are pairs of workers that can't reach
    each other.
    """

    job: Name
    epoch: Epoch
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    chaos_steps: Annotated[tuple[Step, ...], msgspec.Meta(max_length=4096)] = ()
    paths: Annotated[tuple[MeasuredPath, ...], msgspec.Meta(max_length=256)] = ()
    cut: Pairs = ()


class GroupOver(msgspec.Struct, frozen=True, tag=True):
    """A group is over; the worker leaves it, and its blocked calls raise.

    With a ``worker``, every group up to ``epoch`` with this member is over, because the member died
    (``certain``) or was evicted. Otherwise exactly the group ``epoch`` is over.
    """

    epoch: Epoch
    worker: Name
    certain: bool
    cause: Text

    def ends(self, epoch: int, workers: tuple[str, ...]) -> bool:
        """Whether this message ends the group of ``epoch`` with these members."""
        if self.worker:
            return epoch <= self.epoch and self.worker in workers
        return epoch == self.epoch


class Probe(msgspec.Struct, frozen=True, tag=True):
    """A request for an immediate ProbeReply."""

    probe: Count


class ChaosDone(msgspec.Struct, frozen=True, tag=True):
    """The fault for ``step`` was injected; the worker goes on."""

    step: Step


class Hold(msgspec.Struct, frozen=True, tag=True):
    """No group can be formed now, for a ``reason`` outside the job; the worker keeps waiting. With
    ``seconds`` a group may stand, of which a member sits at a breakpoint or waits for data: no
    deadline passes for so long. It is sent again every few seconds."""

    reason: Text
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_HOLD_S)] = 0.0


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The job ends: blocked calls of the worker raise ``reason``, and it exits."""

    reason: Text


# The status of a job, for displays.


class WorkerStatus(msgspec.Struct, frozen=True):
    """The status of one worker. ``rank`` is -1 outside the present group; ``node`` is the name of
    its node, empty if the job has a single node."""

    worker: Name
    rank: Step
    phase: Name
    pid: Pid
    restarts: Count
    device: Name
    step: Step
    samples_per_s: float | None
    node: Name = ""


class Samples(msgspec.Struct, frozen=True):
    """The progress of a training in samples: ``committed`` of ``total``, over all epochs of its
    data set, and the recent rate (None: not known yet)."""

    committed: Count
    total: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    per_s: float | None = None


class RecoveryRecord(msgspec.Struct, frozen=True):
    """A ``jobs.journal.Recovery``; ``detected`` is in seconds since the job began."""

    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    cause: Text
    detected: Seconds
    reformed_s: Seconds | None
    recovered_s: Seconds | None
    step: Step | None
    run_again: bool


class JobRecord(msgspec.Struct, frozen=True):
    """What the summary of a job tells beside its status, for the node that leads it next:
    ``seconds`` since it began, at which of them the ``events`` of the status were, and the newest
    recoveries."""

    seconds: Seconds = 0.0
    times: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=64)] = ()
    recoveries: Annotated[tuple[RecoveryRecord, ...], msgspec.Meta(max_length=64)] = ()


class JobState(msgspec.Struct, frozen=True):
    """The status of one job. ``started`` is Unix time in seconds; ``samples`` is None if the script
    does not report them; ``world_restarts`` counts restarts of all workers of a script that is not
    elastic."""

    job: Name
    node: Name
    pid: Pid
    script: Text
    started: float
    epoch: Epoch
    step: Step
    loss: float | None
    workers: Annotated[tuple[WorkerStatus, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    events: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]
    samples: Samples | None = None
    world_restarts: Count = 0
    record: JobRecord = JobRecord()


FromWorker = (
    Ready
    | Entered
    | Lost
    | WorkerProgress
    | WorkerNote
    | Failed
    | Finished
    | ChaosDue
    | ProbeReply
    | Waiting
    | Mended
    | Halted
)
FromAgent = NewGroup | GroupOver | Probe | ChaosDone | Hold | Stop

TO_AGENT: MessageFormat[FromWorker] = MessageFormat(
    FromWorker, limit=MAX_MESSAGE, name="a message to an agent"
)
FROM_AGENT: MessageFormat[FromAgent] = MessageFormat(
    FromAgent, limit=MAX_MESSAGE, name="a message from an agent"
)


def clip(text: str) -> str:
    """``text``, shortened to the limit of a message from the front: the end of a traceback is the
    most useful part."""
    return text if len(text) <= MAX_TEXT else "..." + text[-(MAX_TEXT - 3) :]
