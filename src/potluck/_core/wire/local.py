"""The messages between potluck's commands and the agent of the same machine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck._core.types import Site
from potluck._core.wire.bulk import DescriptionRequest, Holding, HoldingRequest, Part, PartRequest
from potluck._core.wire.facts import MAX_LINKS, LinkFacts
from potluck._core.wire.format import MachineName, MessageFormat, Name, Text
from potluck._core.wire.jobs import (
    MAX_DATA_SETS,
    MAX_JOBS,
    MAX_QUEUED,
    CancelJob,
    DebugRequest,
    History,
    HistoryRequest,
    JobEnded,
    JobNote,
    JobOptions,
    JobRuns,
    JobStatus,
    Kept,
    LabelledOutput,
    LogLines,
    LogRequest,
)
from potluck._core.wire.nodes import MAX_NODES, Count
from potluck._core.wire.peers import (
    DataHeld,
    DataRequest,
    Failure,
    Results,
    ResultsRequest,
    Served,
    ServedService,
)
from potluck._core.wire.worker_link import JobState

MAX_MESSAGE = 1 << 20
MAX_INCLUDE = 256


class NodesRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for the nodes of the cluster, answered with NodesReply."""


class ContinueRequest(msgspec.Struct, frozen=True, tag=True):
    """A request to let this paused node go on without the other nodes, answered with
    CommandResult."""


class ShareRequest(msgspec.Struct, frozen=True, tag=True):
    """The owner of this machine allows or denies jobs of ``node``, or pauses the machine for all
    jobs and resumes; answered with CommandResult."""

    change: Literal["allow", "deny", "pause", "resume"]
    node: Name = ""


class RunRequest(JobOptions, frozen=True, kw_only=True, tag=True):
    """A request to run ``script``, a path below ``folder``, on the cluster, which must have
    ``min_nodes`` within ``wait_s``. Answered with CommandResult if that is impossible; else with
    JobNote, JobSubmitted and JobTaken, with JobStatus while the job runs, and JobEnded at its end.
    A private agent also gives it LabelledOutput; others keep that in the job's log.

    ``root`` is the folder that the user wants to travel; empty: ``cluster.run.checked`` finds it.
    An empty ``folder`` makes it a local job (``JobSpec.is_local``). ``include`` has the patterns of
    files that travel with the script although they are hidden, ignored, or look like keys. ``on``
    names the machines that run it (empty: all may). ``modules`` are files that the script imports
    by names which its text does not show. ``is_installed``: it runs with the packages that machines
    have, whatever its folder says that it needs; ``allows_builds``: some of these packages may be
    built from source. ``data`` has names and folders of data sets. A job that ``outlives`` its
    command goes on when that leaves, however it does. ``again`` is a job that this machine started
    before: its code and its options are run once more, with its data, and of these fields only
    ``outlives`` counts.
    """

    folder: Text = ""
    root: Text = ""
    include: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_INCLUDE)] = ()
    on: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_INCLUDE)] = ()
    modules: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_INCLUDE)] = ()
    outlives: bool = False
    is_installed: bool = False
    allows_builds: bool = False
    data: Annotated[tuple[tuple[Name, Text], ...], msgspec.Meta(max_length=MAX_DATA_SETS)] = ()
    again: Name = ""


class JobSubmitted(msgspec.Struct, frozen=True, tag=True):
    """The cluster is asked to run ``job`` for the command. Its log is read from ``node``, the
    starter, from now on: machines tell there how they get ready."""

    job: Name
    node: Name


class JobTaken(msgspec.Struct, frozen=True, tag=True):
    """The cluster runs ``job`` for the command, or has it wait for machines."""

    job: Name
    node: Name


class InterruptRequest(msgspec.Struct, frozen=True, tag=True):
    """A request to end the job of this connection by signal ``number``."""

    number: int


class JobsRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for the cluster's jobs, answered with JobsReply."""


class JobsReply(msgspec.Struct, frozen=True, tag=True):
    """The newest status of the cluster's jobs that this node's agent has, and the ``names`` of all
    jobs that run or are about to, also those that have no status yet."""

    jobs: Annotated[tuple[JobState, ...], msgspec.Meta(max_length=MAX_JOBS)]
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=2 * MAX_JOBS + MAX_QUEUED)] = ()


class ServeRequest(msgspec.Struct, frozen=True, tag=True):
    """A program of this machine serves ``services`` as long as this connection lasts; answered with
    CommandResult."""

    services: Served


class ServicesRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for the service ``name`` (empty: for all services) of programs on ``node`` (empty:
    on all machines of the cluster), answered with ServicesReply."""

    name: MachineName = ""
    node: Name = ""


class ServiceInfo(msgspec.Struct, frozen=True):
    """A service, with the id and name of its node and the address of that node's agent."""

    node: Name
    machine: Name
    host: Name
    service: ServedService


class ServicesReply(msgspec.Struct, frozen=True, tag=True):
    """The services that were asked for; ``num_left_out`` more do not fit into this message.
    ``silent`` nodes did not answer. ``refusal``: why nothing was asked; empty if it was."""

    services: Annotated[tuple[ServiceInfo, ...], msgspec.Meta(max_length=MAX_MESSAGE // 64)] = ()
    num_left_out: int = 0
    silent: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    refusal: Text = ""


class NodeInfo(msgspec.Struct, frozen=True):
    """A node as an agent sees it. ``role`` is leader, member, or empty outside the view;
    ``latency_ms`` is one-way (0: not measured). ``limits``: what its owner gives to jobs, and
    ``runs_for``: whose jobs it runs, both in words (empty: all of it; not told). ``secret`` is the
    namespace of the secret that the node has, ``engine`` native or python, ``site`` where it
    stands (empty: not told). ``upgrade``: what to enter there, if its potluck is too old to run
    jobs of this node's."""

    node: Name
    name: Name
    role: Name
    link: Name
    host: Name
    latency_ms: float
    python: Name
    torch: Name
    potluck: Name
    cores: int = 0
    memory_bytes: int = 0
    accelerators: tuple[Name, ...] = ()
    samples_per_s: float | None = None
    limits: Text = ""
    runs_for: Text = ""
    paused: bool = False
    secret: Name = ""
    engine: Name = ""
    site: Site = ""
    upgrade: Text = ""


class NodesReply(msgspec.Struct, frozen=True, tag=True):
    """The cluster as this node's agent sees it. ``epoch`` is 0 without a view; ``stragglers`` has a
    sentence for each node or link that is much slower than the best link. ``is_open``: whoever
    holds the secret is in the cluster."""

    node: Name
    pid: int
    port: int
    namespace: Name
    epoch: int
    paused: Text
    nodes: Annotated[tuple[NodeInfo, ...], msgspec.Meta(max_length=MAX_NODES)]
    banned: Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)]
    events: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]
    links: Annotated[tuple[LinkFacts, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()
    stragglers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()
    is_open: bool = False


Forwarded = (
    ResultsRequest
    | DescriptionRequest
    | HoldingRequest
    | PartRequest
    | HistoryRequest
    | LogRequest
    | CancelJob
    | DebugRequest
    | DataRequest
)


class ForwardedRequest(msgspec.Struct, frozen=True, tag=True):
    """A request about results, jobs or data, or for results' files, for the agent to forward to
    ``node``, which may be this one; answered with ForwardedResponse of the same ``number``."""

    number: Count
    node: Name
    content: Forwarded


class ForwardedResponse(msgspec.Struct, frozen=True, tag=True):
    """The response of ``node``; a Failure also if there is no link to it."""

    number: Count
    node: Name
    content: Results | Part | Holding | History | LogLines | Kept | JobRuns | DataHeld | Failure


class CommandResult(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a command, in words."""

    ok: bool
    text: Text


JobReply = JobSubmitted | JobTaken | JobNote | LabelledOutput | JobStatus | JobEnded
Request = (
    NodesRequest
    | ContinueRequest
    | ShareRequest
    | RunRequest
    | InterruptRequest
    | JobsRequest
    | ServeRequest
    | ServicesRequest
    | ForwardedRequest
)
Reply = NodesReply | CommandResult | JobsReply | ServicesReply | ForwardedResponse | JobReply

REQUEST: MessageFormat[Request] = MessageFormat(
    Request, limit=MAX_MESSAGE, name="a request to this machine's agent"
)
REPLY: MessageFormat[Reply] = MessageFormat(
    Reply, limit=MAX_MESSAGE, name="an answer of this machine's agent"
)
