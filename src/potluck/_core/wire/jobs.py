"""The messages about jobs between the agents of a cluster.

The node that leads the cluster leads its jobs. It sends an ``Order`` of a job to every node, which
fetches the script's folder and answers. Then it sends instructions for workers, and receives what
happens to each of them as an ``Event`` for ``cluster.jobs.groups.membership``. The node on which
``potluck run`` was called (the job's ``starter``) receives the output. All messages are bounded,
and are sent over the links of agents (``peers.py``).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck._core.wire import worker_link
from potluck._core.wire.format import Digest, Name, Text, Versions

MAX_ARGUMENTS = 1024
MAX_VARIABLES = 256
MAX_PER_NODE = 256
MAX_PLACES = 4096
MAX_JOBS = 64
MAX_INTERRUPTS = 100
MAX_SUMMARY = 512 * 1024
MAX_NEEDS = 256
MAX_QUEUED = 256
MAX_LISTED = 256
"""Jobs of the history in one message."""

Job = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f]+\Z")]
"""The id of a job. It is also the name of a folder and of a log file, so it can't be a path."""
MAX_JOB_NUMBER = (1 << 53) - 1
JobNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_JOB_NUMBER)]
Workers = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_PLACES)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Signal = Annotated[int, msgspec.Meta(ge=1, le=64)]
MAX_TEXT = 64 * 1024
Line = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
End = Literal["\n", "\r", ""]
"""The end of a piece of output: of a whole line; of a line that the next piece replaces, such as a
progress bar; of a prompt, behind which something is typed."""
Stamp = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Microseconds of Unix time at the node of a log's source; rises from line to line."""
NOTE = "note"
"""The stream of notes in a log."""


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of a job's log, ``number`` of its ``source``: a worker, or ``@`` and a node that led
    the job, of which it is a note. ``label`` is the worker's rank then, with the name of its
    node."""

    at: Stamp
    number: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)]
    source: Name
    stream: Name
    label: Name
    text: Line
    end: End = "\n"


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``potluck run``, called in ``directory``: ``per_node`` workers run on each of
    at most ``max_nodes`` nodes (0: all), and ``extra_workers`` more on the starter's.
    ``max_restarts``, ``restarts_worlds``, ``wait_s`` and ``min_workers`` are as in
    ``roster.JobPolicy``, ``chaos`` as in ``jobs.chaos``. ``environment`` has names and values of
    variables for the workers. The job begins on ``min_nodes`` nodes or more. In the folders
    ``importable`` the script finds modules, besides its own folder: below the folder that travels,
    or, for a local job, on this machine. ``module`` is the dotted name by which the script runs, as
    by ``python -m``, found in the first of these folders that has it; empty: it runs as a file.
    ``keeps_files``: what workers write stays there, and the
    starter can't fetch it. ``commit`` is that of the folder's git repository, in words (empty: it
    is in none).

    Of each machine the job takes ``cores`` (0: the whole machine, alone), ``gpus`` and
    ``memory_bytes`` (0: in proportion to the cores). Of jobs that wait for machines, those of a
    higher ``priority`` go first. The job is ended after ``seconds`` (0: never), and is refused
    in place of waiting if it ``starts_now``. The worker of ``debug_rank`` (-1: none) runs under
    debugpy."""

    script: Text
    arguments: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_ARGUMENTS)] = ()
    directory: Text = ""
    per_node: Annotated[int, msgspec.Meta(ge=1, le=MAX_PER_NODE)] = 1
    extra_workers: Annotated[int, msgspec.Meta(ge=0, le=MAX_PER_NODE)] = 0
    max_nodes: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    max_restarts: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 3
    restarts_worlds: bool = True
    wait_s: worker_link.Seconds = 60.0
    min_workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLACES)] = 1
    peer_timeout_s: worker_link.Seconds = 30.0
    chaos: Text = ""
    environment: Annotated[
        tuple[tuple[Name, Line], ...], msgspec.Meta(max_length=MAX_VARIABLES)
    ] = ()
    keeps_files: bool = False
    importable: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()
    module: Text = ""
    min_nodes: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    commit: Name = ""
    cores: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    gpus: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    seconds: worker_link.Seconds = 0.0
    starts_now: bool = False
    debug_rank: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_PLACES)] = -1


class Need(msgspec.Struct, frozen=True):
    """A ``module`` that a script imports, and the ``package`` that brings it, by pip's name."""

    module: Name
    package: Name


DATA_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Of a data set. It is also the name of a folder, so it can't be a path."""
MAX_DATA_SETS = 16


class DataSet(msgspec.Struct, frozen=True):
    """A data set of a job: its ``package`` of ``num_bytes``, the ``folder`` on the starter that it
    lies in, and the package with the outlines of its shards (empty: it has none). A local job has
    no packages of it."""

    name: Annotated[str, msgspec.Meta(pattern=DATA_NAME)]
    package: Annotated[bytes, msgspec.Meta(max_length=32)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
    folder: Text
    outline: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


DataSets = Annotated[tuple[DataSet, ...], msgspec.Meta(max_length=MAX_DATA_SETS)]


class Proof(msgspec.Struct, frozen=True):
    """The public key of a job's starter, and its signature of the job (``trust.signed_jobs``)."""

    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class JobSpec(JobOptions, frozen=True, kw_only=True):
    """A job that is to be run.

    ``script`` is a path below the folder that is sent as ``package``; ``below`` is the directory in
    that folder in which the command was called (empty: the folder, or outside of it). A job without
    a ``package`` is local: ``script`` is a path on the ``starter``, and runs only there.
    ``versions`` are the starter's. ``started`` is Unix time. Without a ``proof`` of the starter no
    node runs it; the proof is for one ``cluster`` (its id; empty: an open one) and for one run:
    ``number`` is higher than that of each job which the node started before.
    ``only`` these nodes run it (empty: all may). ``needs`` are the packages that a node must have;
    ``own`` are modules of the user's own that do not travel, with their folders on the starter.
    ``plan`` is the package with the plan of the environment in which workers run (``environments``
    in ``cluster``); None: they run with the packages that each machine has. ``data`` comes to each
    node on which workers run.
    """

    job: Job
    package: Digest | None
    starter: Name
    versions: Versions
    below: Text = ""
    master_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    started: worker_link.Seconds = 0.0
    cluster: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    number: JobNumber = 0
    only: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1024)] = ()
    needs: Annotated[tuple[Need, ...], msgspec.Meta(max_length=MAX_NEEDS)] = ()
    own: Annotated[tuple[tuple[Name, Text], ...], msgspec.Meta(max_length=MAX_NEEDS)] = ()
    plan: Digest | None = None
    data: DataSets = ()
    proof: Proof | None = None

    @property
    def is_local(self) -> bool:
        """Whether all workers run on the starter, in the script's own folder."""
        return self.package is None


class WorkerPlace(msgspec.Struct, frozen=True):
    """The place of ``worker``: its node, and its local rank among the job's workers there."""

    worker: Name
    node: Name
    local_rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PLACES)]


class WorldSpec(msgspec.Struct, frozen=True):
    """The world for which workers are started: ``members`` in rank order, ``number`` of restarts of
    the world so far, of which ``restarts`` count against the limit. ``is_fixed``: see
    ``groups.worlds``."""

    number: Attempt = 0
    members: Workers = ()
    restarts: Attempt = 0
    is_fixed: bool = False
    master_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0


Places = Annotated[tuple[WorkerPlace, ...], msgspec.Meta(max_length=MAX_PLACES)]


# From the starter to the leader.


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request to run a job, answered with Submitted."""

    spec: JobSpec


class InterruptJob(msgspec.Struct, frozen=True, tag=True):
    """A request of the user to end ``job`` by signal ``number``, for the ``times``-th time."""

    job: Job
    number: Signal
    times: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTERRUPTS)]


# From the leader to the starter.


class Submitted(msgspec.Struct, frozen=True, tag=True):
    """The answer to Submit: ``job`` is accepted, or refused with ``error``."""

    job: Job
    error: Text = ""


class LabelledOutput(msgspec.Struct, frozen=True, tag=True):
    """A line of a worker's output for the user; ``worker`` is its rank, with the name of its node.
    In a cluster it is the ``number``-th line of its ``source``, of the time ``at`` (LogLine), and
    the receiver keeps it in its log; it may be a note, and the receiver another node than the
    starter."""

    job: Job
    worker: Name
    stream: Name
    text: Line
    end: End = "\n"
    source: Name = ""
    at: Stamp = 0
    number: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)] = 0


class JobNote(msgspec.Struct, frozen=True, tag=True):
    """A note about a job for the user."""

    job: Job
    text: worker_link.Text


class JobEnded(msgspec.Struct, frozen=True, tag=True):
    """``job`` has ended; ``summary`` is JSON, and has the exit code."""

    job: Job
    summary: Annotated[bytes, msgspec.Meta(max_length=MAX_SUMMARY)]


# From the leader to all nodes.


class Order(msgspec.Struct, frozen=True, tag=True):
    """The sender leads this job. A node without the job's package fetches it from the starter or,
    if that fails, from the leader, and answers with NodeReport. If the leader is lost, its
    successor takes the job over with these ``places``, this ``world``, and as one that was to end
    as many times as ``interrupts`` says."""

    spec: JobSpec
    places: Places
    world: WorldSpec = WorldSpec()
    interrupts: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTERRUPTS)] = 0


class JobList(msgspec.Struct, frozen=True, tag=True):
    """All jobs that the sender leads, and those that are ``queued`` (None: its release has no
    queue); other jobs have ended."""

    jobs: Annotated[tuple[Job, ...], msgspec.Meta(max_length=MAX_JOBS)]
    queued: Annotated[tuple[Job, ...], msgspec.Meta(max_length=MAX_QUEUED)] | None = None


class JobWaits(msgspec.Struct, frozen=True, tag=True):
    """The job of ``spec`` waits for machines; or did, and was cancelled. Whoever leads next goes on
    with it."""

    spec: JobSpec
    is_cancelled: bool = False


class JobStatus(msgspec.Struct, frozen=True, tag=True):
    """The status of a job."""

    status: worker_link.JobState


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """An instruction to start ``worker`` for the world of the last Order; ``attempt`` counts its
    restarts so far."""

    job: Job
    worker: Name
    attempt: Attempt


class SignalWorkers(msgspec.Struct, frozen=True, tag=True):
    """An instruction to send signal ``number`` to ``workers``."""

    job: Job
    workers: Workers
    number: Signal


class SendToWorkers(msgspec.Struct, frozen=True, tag=True):
    """An instruction to forward ``message`` to ``workers``. For workers without a link, Stop
    becomes a SIGTERM."""

    job: Job
    workers: Workers
    message: worker_link.FromAgent


# From a node to the leader.


class ProcessState(msgspec.Struct, frozen=True, tag=True):
    """The newest process of ``worker`` on the sending node: its ``attempt``, the number of its
    world, and whether it runs."""

    worker: Name
    attempt: Attempt
    world: Attempt
    is_alive: bool


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process ``pid`` of ``worker`` was started, in this ``attempt``."""

    worker: Name
    attempt: Attempt
    pid: worker_link.Pid


class OutputEnded(msgspec.Struct, frozen=True, tag=True):
    """All output of the process of this ``attempt`` was sent. The job's workers on the sending node
    have written ``num_files`` files so far."""

    worker: Name
    attempt: Attempt
    num_files: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    num_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The process of ``worker`` ended with ``code``, negative for a signal, as in subprocess, for a
    ``reason`` that its node knows (empty: none). An earlier ``attempt`` than the present one is
    ignored; -1 stands for the present one."""

    worker: Name
    code: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 32)]
    attempt: Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)] = -1
    reason: worker_link.Text = ""


class Disconnected(msgspec.Struct, frozen=True, tag=True):
    """The link of ``worker`` to its agent ended while its process runs."""

    worker: Name


class Stalled(msgspec.Struct, frozen=True, tag=True):
    """The process of ``worker`` is stopped, for ``reason``, and did not answer a probe."""

    worker: Name
    reason: worker_link.Text


Event = worker_link.FromWorker | Started | Exited | OutputEnded | Disconnected | Stalled
"""A message of a worker, or an observation of its agent."""


class WorkerEvent(msgspec.Struct, frozen=True, tag=True):
    """An event of a worker on the sending node."""

    job: Job
    event: Event


class NodeReport(msgspec.Struct, frozen=True, tag=True):
    """The answer to an Order: it is carried out, or failed with ``error``, because the node
    ``lacks`` something that the script needs, or for another reason. ``workers`` are the job's
    workers that were started on the sending node."""

    job: Job
    workers: Annotated[tuple[ProcessState, ...], msgspec.Meta(max_length=MAX_PLACES)] = ()
    error: Text = ""
    lacks: bool = False


class Output(msgspec.Struct, frozen=True, tag=True):
    """A line that a worker on the sending node wrote to ``stream``: stdout or stderr. In a cluster
    it is the ``number``-th of the worker, of the time ``at`` (LogLine)."""

    job: Job
    worker: Name
    stream: Name
    text: Line
    end: End = "\n"
    at: Stamp = 0
    number: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)] = 0


# From a node to a job's starter, and back.


class JobRunsRequest(msgspec.Struct, frozen=True, tag=True):
    """A request whether the receiver's job with this number runs, answered with JobRuns. Any node
    of the cluster may send it."""

    number: JobNumber


class JobRuns(msgspec.Struct, frozen=True, tag=True):
    """Whether the job runs."""

    runs: bool


class DebugRequest(msgspec.Struct, frozen=True, tag=True):
    """A request to hold ``rank`` of ``job`` for ``session``, a command that debugs it, until it
    ``leaves`` or is silent; what was ``typed`` there goes to the prompt at which the rank sits.
    Answered with JobRuns: whether the rank runs on the receiver. The job's starter may send it; a
    node's own commands ask in its name."""

    job: Job
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PLACES)]
    session: Name
    typed: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""
    leaves: bool = False


# The history of jobs: asked of one node by another (see ``peers.Request``).

Phase = Literal["queued", "placed", "running", "ended"]
"""How far a job has come: it waits for its turn; it has places on nodes; a worker was started; it
is over."""


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's history has of ``job``. ``machine`` is the name of its ``starter``,
    ``machines`` are those that ran it; ``package`` is the hash of its code, ``plan`` that of the
    plan of its environment (empty: it has none). Of one that has ended:
    when (Unix time), after how many ``seconds``, its ``exit_code``, the last exit code of each
    worker, the first of its problems. Only if one job was asked for: its ``summary`` (JSON, as in
    JobEnded), and the ``sources`` of its log on this node, with the number of lines that are kept
    and the label of the last one."""

    job: Job
    starter: Name
    machine: Name
    script: Annotated[str, msgspec.Meta(max_length=256)]
    started: worker_link.Seconds
    phase: Phase
    machines: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ()
    package: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    plan: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    commit: Name = ""
    ended: worker_link.Seconds = 0.0
    seconds: worker_link.Seconds = 0.0
    exit_code: int | None = None
    exits: Annotated[tuple[tuple[Name, int | None], ...], msgspec.Meta(max_length=64)] = ()
    problem: Annotated[str, msgspec.Meta(max_length=512)] = ""
    summary: Annotated[bytes, msgspec.Meta(max_length=MAX_SUMMARY)] = b""
    sources: Annotated[tuple[tuple[Name, int, Name], ...], msgspec.Meta(max_length=1024)] = ()


class HistoryRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for the jobs in the receiver's history whose ids begin with ``job`` (empty: all),
    or for the one of that id of ``starter``, with its summary; answered with History. Any node of
    the cluster may send it."""

    job: Annotated[str, msgspec.Meta(max_length=256)] = ""
    starter: Name = ""


class History(msgspec.Struct, frozen=True, tag=True):
    """The jobs that were asked for, the newest first."""

    jobs: Annotated[tuple[JobInfo, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()


class KeepEnd(msgspec.Struct, frozen=True, tag=True):
    """A request of the leader to keep that ``job`` has ended, ``when`` (Unix time), with its
    ``summary`` as in JobEnded; answered with Kept when it is on disk."""

    job: Job
    summary: Annotated[bytes, msgspec.Meta(max_length=MAX_SUMMARY)]
    when: worker_link.Seconds


class CancelJob(msgspec.Struct, frozen=True, tag=True):
    """A request to the leader to end ``job`` as Ctrl-C does, or, if it ``kills``, at once; answered
    with Kept when it has begun to. The job's starter may send it, and an admin of the cluster."""

    job: Job
    kills: bool = False


class Kept(msgspec.Struct, frozen=True, tag=True):
    """It is on the sender's disk, or done."""


class LogRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for the next lines of the log of ``job`` of ``starter``: of ``sources`` (empty:
    all), each after its time in ``after``, others after ``since``; or for the ``num_last`` of
    those that came last. Answered with LogLines: at once if there are any or the job is over, else
    after ``wait_s``. A node that started or ran the job may send it, and one whose jobs the
    receiver's machine runs."""

    job: Job
    starter: Name
    after: Annotated[tuple[tuple[Name, Stamp], ...], msgspec.Meta(max_length=MAX_PLACES)] = ()
    since: Stamp = 0
    sources: Workers = ()
    num_last: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=30)] = 0.0


class LogLines(msgspec.Struct, frozen=True, tag=True):
    """Lines of a log, by time. ``has_more``: there are more now; ``is_over``: the job does not run,
    as far as the sender knows. After a request for the last lines, ``newest`` has the time of the
    last line of each source."""

    lines: tuple[LogLine, ...]
    has_more: bool
    is_over: bool
    newest: Annotated[tuple[tuple[Name, Stamp], ...], msgspec.Meta(max_length=MAX_PLACES)] = ()


FromLeader = Order | JobList | JobWaits | StartWorker | SignalWorkers | SendToWorkers | JobStatus
ToStarter = Submitted | LabelledOutput | JobNote | JobEnded
FromNode = NodeReport | WorkerEvent | Output
ToLeader = Submit | InterruptJob | FromNode
JobMessage = FromLeader | ToStarter | ToLeader
HistoryQuestion = HistoryRequest | KeepEnd | LogRequest | CancelJob
