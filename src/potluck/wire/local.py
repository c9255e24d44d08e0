"""What the command line and the agent of the same machine say to each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.wire.control import StatusReply
from potluck.wire.facts import MAX_LINKS, LinkFacts
from potluck.wire.format import MessageFormat
from potluck.wire.jobs import MAX_JOBS, JobEnded, JobNote, JobOptions, JobStatus, Shown
from potluck.wire.names import Name, Text
from potluck.wire.nodes import MAX_NODES

MAX_MESSAGE = 1 << 20


class NodesRequest(msgspec.Struct, frozen=True, tag=True):
    """Answer with NodesReply."""


class RotateRequest(msgspec.Struct, frozen=True, tag=True):
    """Change the cluster's secret; answer with CommandResult once it is done or given up."""


class ContinueRequest(msgspec.Struct, frozen=True, tag=True):
    """This paused node is to go on without the others; answer with CommandResult."""


class RunRequest(JobOptions, frozen=True, kw_only=True, tag=True):
    """Run ``script``, a path below ``folder``, on the cluster, which must have ``min_nodes`` within
    ``wait_s``. Answered with CommandResult if it can't be; else with JobNote, Shown and JobStatus
    as things happen, and JobEnded at the end.

    An empty ``folder`` makes it a local job (``JobSpec.is_local``).
    """

    folder: Text = ""
    min_nodes: int = 1


class InterruptRequest(msgspec.Struct, frozen=True, tag=True):
    """End the job that was asked for on this connection, by signal ``number``."""

    number: int


class JobsRequest(msgspec.Struct, frozen=True, tag=True):
    """Answer with JobsReply."""


class JobsReply(msgspec.Struct, frozen=True, tag=True):
    """The cluster's jobs, as this node's agent last heard of them."""

    jobs: Annotated[tuple[StatusReply, ...], msgspec.Meta(max_length=MAX_JOBS)]


class NodeInfo(msgspec.Struct, frozen=True):
    """One node as an agent sees it. ``role`` is leader, member, or empty outside the view;
    ``latency_ms`` is one way, 0 where it was not measured."""

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


class NodesReply(msgspec.Struct, frozen=True, tag=True):
    """The cluster as this node's agent sees it. ``epoch`` is 0 without a view; ``stragglers`` is
    one sentence for each node or link that is far behind the best link."""

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


class CommandResult(msgspec.Struct, frozen=True, tag=True):
    """How an order ended, in words."""

    ok: bool
    text: Text


JobReply = JobNote | Shown | JobStatus | JobEnded
Request = (
    NodesRequest | RotateRequest | ContinueRequest | RunRequest | InterruptRequest | JobsRequest
)
Reply = NodesReply | CommandResult | JobsReply | JobReply

REQUEST: MessageFormat[Request] = MessageFormat(
    Request, limit=MAX_MESSAGE, name="a request to this machine's agent"
)
REPLY: MessageFormat[Reply] = MessageFormat(
    Reply, limit=MAX_MESSAGE, name="an answer of this machine's agent"
)
