"""What the agents of a cluster say to each other about jobs.

The node that leads the cluster leads its jobs. It *orders* a job on every node, which then has the
script's folder and reports; it says what is to be done with each worker, and hears what becomes of
each: an ``Event``, which ``cluster.jobs.groups.membership`` takes as it came. The node on which
``potluck run`` was called (the job's ``starter``) gets the output. All of it is bounded, and
travels over the links of agents (``peers.py``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.wire import control
from potluck.wire.messages import SEALED
from potluck.wire.names import Digest, Name, Text, Versions

MAX_ARGUMENTS = 1024
MAX_PER_NODE = 256
MAX_PLACES = 4096
MAX_JOBS = 64
MAX_SUMMARY = 512 * 1024

Job = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f]+\Z")]
"""Also the name of a folder and of a log, so never a path."""
Workers = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_PLACES)]
Line = Annotated[str, msgspec.Meta(max_length=64 * 1024)]


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator chose: the command was given in ``directory``; ``per_node`` workers run on
    each of at most ``max_nodes`` nodes (0: all). ``max_restarts``, ``restarts_worlds``, ``wait_s``
    and ``min_workers`` as in ``roster.JobPolicy``; ``chaos`` as in ``jobs.chaos``."""

    script: Text
    arguments: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_ARGUMENTS)] = ()
    directory: Text = ""
    per_node: Annotated[int, msgspec.Meta(ge=1, le=MAX_PER_NODE)] = 1
    max_nodes: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    max_restarts: Annotated[int, msgspec.Meta(ge=0)] = 3
    restarts_worlds: bool = True
    wait_s: float = 60.0
    min_workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLACES)] = 1
    peer_timeout_s: float = 30.0
    chaos: Text = ""
    wire: Name = SEALED


class JobSpec(JobOptions, frozen=True, kw_only=True):
    """What is to be run, and how.

    ``script`` is a path below the folder that travels as ``package``; ``below`` is where in that
    folder the command was given (empty: elsewhere). A job without a ``package`` is local:
    ``script`` is a path of the ``starter``, and runs only there. ``versions`` are the starter's.
    ``started`` is Unix time.
    """

    job: Job
    package: Digest | None
    starter: Name
    versions: Versions
    below: Text = ""
    master_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    started: float = 0.0

    @property
    def is_local(self) -> bool:
        """Whether all workers run on the starter, from the script's own folder."""
        return self.package is None


class WorkerPlace(msgspec.Struct, frozen=True):
    """``worker`` runs on ``node``, as its ``local_rank``-th of this job."""

    worker: Name
    node: Name
    local_rank: int


class WorldSpec(msgspec.Struct, frozen=True):
    """What workers are started for: ``members`` in rank order, ``number`` how often the world was
    started again, ``restarts`` those times that count. ``is_fixed``: see ``groups.worlds``."""

    number: int = 0
    members: Workers = ()
    restarts: int = 0
    is_fixed: bool = False
    master_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0


Places = Annotated[tuple[WorkerPlace, ...], msgspec.Meta(max_length=MAX_PLACES)]


# From the starter to the leader.


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A command on the sender's node wants this job run. Answered with Submitted."""

    spec: JobSpec


class InterruptJob(msgspec.Struct, frozen=True, tag=True):
    """The operator wants the end of ``job``, and asked for it ``times`` times, by ``number``."""

    job: Job
    number: int
    times: int


# From the leader to the starter.


class Submitted(msgspec.Struct, frozen=True, tag=True):
    """``job`` is taken on, or not, for this ``error``."""

    job: Job
    error: Text = ""


class Shown(msgspec.Struct, frozen=True, tag=True):
    """A worker's line, for people; ``worker`` with the name of its node."""

    job: Job
    worker: Name
    stream: Name
    text: Line


class JobNote(msgspec.Struct, frozen=True, tag=True):
    """Something happened that people want to know."""

    job: Job
    text: control.Text


class JobEnded(msgspec.Struct, frozen=True, tag=True):
    """``job`` is over; ``summary`` is JSON."""

    job: Job
    exit_code: int
    summary: Annotated[bytes, msgspec.Meta(max_length=MAX_SUMMARY)]


# From the leader to all nodes.


class Order(msgspec.Struct, frozen=True, tag=True):
    """The sender leads this job. A node without the job's package fetches it, from the starter or,
    if that fails, from the leader, and answers with Reported. If the leader is lost, the next one
    takes the job over with these ``places`` and this ``world``."""

    spec: JobSpec
    places: Places
    world: WorldSpec = WorldSpec()


class JobList(msgspec.Struct, frozen=True, tag=True):
    """These are the jobs that I lead; there are no others."""

    jobs: Annotated[tuple[Job, ...], msgspec.Meta(max_length=MAX_JOBS)]


class JobStatus(msgspec.Struct, frozen=True, tag=True):
    """How a job is doing."""

    status: control.StatusReply


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Start ``worker``, which was started ``attempt`` times again so far, for the world of the
    last Order."""

    job: Job
    worker: Name
    attempt: int


class SignalWorkers(msgspec.Struct, frozen=True, tag=True):
    """Send ``workers`` a signal."""

    job: Job
    workers: Workers
    number: int


class TellWorkers(msgspec.Struct, frozen=True, tag=True):
    """Pass ``message`` on to ``workers``. Stop reaches by SIGTERM those that have no link."""

    job: Job
    workers: Workers
    message: control.FromAgent


# From a node to the leader.


class Seen(msgspec.Struct, frozen=True, tag=True):
    """The newest process of ``worker`` here: started in which ``attempt``, for which world, and
    whether it runs."""

    worker: Name
    attempt: int
    world: int
    is_alive: bool


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process of this ``attempt`` of ``worker`` is ``pid`` on its node."""

    worker: Name
    attempt: int
    pid: int


class OutputEnded(msgspec.Struct, frozen=True, tag=True):
    """Every line that the process of this ``attempt`` wrote has been sent."""

    worker: Name
    attempt: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The process of ``worker`` ended; ``code`` is negative for a signal, as in subprocess. An
    ``attempt`` before the present one is ignored; -1 stands for the present one."""

    worker: Name
    code: int
    attempt: int = -1


class Disconnected(msgspec.Struct, frozen=True, tag=True):
    """The link of ``worker`` to its agent ended while its process lives."""

    worker: Name


class Stalled(msgspec.Struct, frozen=True, tag=True):
    """The process of ``worker`` does not run, for this ``reason``, and did not answer a probe."""

    worker: Name
    reason: control.Text


Event = control.FromWorker | Started | Exited | OutputEnded | Disconnected | Stalled
"""What a worker says, or what its agent sees of it."""


class Happened(msgspec.Struct, frozen=True, tag=True):
    """This became of a worker of mine."""

    job: Job
    event: Event


class Reported(msgspec.Struct, frozen=True, tag=True):
    """The order is carried out, or not, for this ``error``. ``workers`` are those of ``job`` that
    were started here."""

    job: Job
    workers: Annotated[tuple[Seen, ...], msgspec.Meta(max_length=MAX_PLACES)] = ()
    error: Text = ""


class Output(msgspec.Struct, frozen=True, tag=True):
    """A worker of mine wrote a line to ``stdout`` or ``stderr``."""

    job: Job
    worker: Name
    stream: Name
    text: Line


FromLeader = Order | JobList | StartWorker | SignalWorkers | TellWorkers | JobStatus
ToStarter = Submitted | Shown | JobNote | JobEnded
FromNode = Reported | Happened | Output
ToLeader = Submit | InterruptJob | FromNode
JobMessage = FromLeader | ToStarter | ToLeader
