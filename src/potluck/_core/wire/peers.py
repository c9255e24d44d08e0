"""The messages between agents after the greeting.

Each message is a tagged msgpack struct with a little-endian u32 length in front, of at most
``MAX_MESSAGE`` (1 MiB), which is checked before memory is allocated. Messages of the membership
protocol are in ``nodes.py``, about jobs in ``jobs.py``, about nodes and links in ``facts.py``,
about admitted keys in ``admissions.py``. This file has introductions and the messages

- about the files that a job's workers wrote, also with commands. The files themselves are a package
  (``bulk.py``), whose name is asked for first;
- about the services of programs outside of jobs. They are not broadcast: an agent asks the others
  when a program of its machine looks for a service;
- in which an agent tells the others whose jobs its machine runs.

What one agent asks another is the content of a ``Request``, and answered by a ``Response`` of the
same number.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck._core.printable import MAX_NAME, PRINTABLE
from potluck._core.wire.admissions import AdmissionMessage, Key
from potluck._core.wire.facts import Facts, Measured
from potluck._core.wire.format import Digest, MachineName, MessageFormat, Name, Text, Versions
from potluck._core.wire.jobs import (
    DebugRequest,
    History,
    HistoryQuestion,
    Job,
    JobMessage,
    JobRuns,
    JobRunsRequest,
    Kept,
    LogLines,
)
from potluck._core.wire.nodes import Count, NodeMessage
from potluck._core.wire.worker_link import Seconds

MAX_DECISIONS = 1024

Rule = Literal["all", "ask", "none"]
"""What holds for members that the owner has not decided about: their jobs run; they don't until the
owner, who is asked, allows it; they don't."""
Nodes = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_DECISIONS)]


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Whose jobs the sender runs: those of ``allowed`` nodes, none of ``denied`` nodes, those of
    other nodes by ``rule``. A node that ``is_paused`` runs no jobs, not even its own."""

    rule: Rule = "ask"
    allowed: Nodes = ()
    denied: Nodes = ()
    is_paused: bool = False


MAX_SERVICES = 64
"""Of the programs of one machine, all together."""
MAX_METHODS = 64
MAX_SERVED_BYTES = 64 << 10
"""Of one machine's services, as they are sent."""

ServiceName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME, pattern=PRINTABLE)]


class ServedService(msgspec.Struct, frozen=True):
    """A service of a program that listens on TCP ``port`` of its machine."""

    name: ServiceName
    methods: Annotated[tuple[ServiceName, ...], msgspec.Meta(max_length=MAX_METHODS)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


Served = Annotated[tuple[ServedService, ...], msgspec.Meta(max_length=MAX_SERVICES)]


class NodeServicesRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for the service ``name`` of the receiver's machine, or for all of its services if
    that is empty; answered with NodeServices."""

    name: MachineName = ""


class NodeServices(msgspec.Struct, frozen=True, tag=True):
    """The requested services of the sender's machine."""

    services: Served = ()


MAX_LISTED = 256

Want = Literal["list", "package", "remove"]


class ResultsRequest(msgspec.Struct, frozen=True, tag=True):
    """A request about the results of ``job`` (empty, for a list: of all jobs) at the receiver:
    which there are, as a package (of the files that match ``pattern``; empty: of all), or to delete
    them. Answered with Results. Only a job's starter learns of it."""

    want: Want
    job: Annotated[str, msgspec.Meta(max_length=256)] = ""
    pattern: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class JobFiles(msgspec.Struct, frozen=True):
    """The results of a job at one node. ``began`` is Unix time; ``gone``: why they were deleted
    there (empty: they were not)."""

    job: Job
    starter: Name
    script: Name
    began: Seconds
    num_files: Count
    num_bytes: Count
    is_running: bool = False
    gone: Name = ""


class Results(msgspec.Struct, frozen=True, tag=True):
    """The jobs, the newest first, or the name of the ``package``, of which the files ``left`` are
    no part, because their names can't travel."""

    jobs: Annotated[tuple[JobFiles, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    package: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    left: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()


class Written(msgspec.Struct, frozen=True):
    """What a job's workers had written on ``node``, which people call ``machine``, when the job
    ended; None if the node was away then."""

    node: Name
    machine: Name
    num_files: Count | None
    num_bytes: Count | None


class DataRequest(msgspec.Struct, frozen=True, tag=True):
    """A request which data sets are at the receiver, of those that the sender brought there, or to
    remove, pin or unpin the one of this ``name``, which only the receiver's own commands may send.
    Answered with DataHeld."""

    want: Literal["list", "rm", "pin", "unpin"] = "list"
    name: Name = ""


class HeldData(msgspec.Struct, frozen=True):
    """A data set at a node: its ``package``, the node that brought it, when it was ``used`` last
    (Unix time), and in words whether it is used now, or the folder of that node it lies in."""

    name: Name
    package: Digest
    num_bytes: Count
    starter: Name
    used: Seconds
    state: Text


class DataHeld(msgspec.Struct, frozen=True, tag=True):
    """The data sets; at most ``quota`` bytes of other nodes' are kept (0: none are taken)."""

    quota: Count
    sets: Annotated[tuple[HeldData, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()


MAX_MESSAGE = 1 << 20


class Introduction(msgspec.Struct, frozen=True, tag=True):
    """The first message in both directions: the incarnation (run) of the sending agent, the name
    and the key of its machine, the port of its listener, and the versions of its workers."""

    incarnation: Count
    name: MachineName
    key: Key
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    versions: Versions


class BulkCall(msgspec.Struct, frozen=True, tag=True):
    """The sender can't call the receiver, which is to make the bulk connection between them."""


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The response to a request that the sender can't or won't answer."""

    reason: Text


RequestContent = (
    ResultsRequest
    | NodeServicesRequest
    | JobRunsRequest
    | DebugRequest
    | HistoryQuestion
    | DataRequest
)
ResponseContent = Results | NodeServices | JobRuns | History | Kept | LogLines | DataHeld | Failure


class Request(msgspec.Struct, frozen=True, tag=True):
    """A request, with a number of the sender's own."""

    number: Count
    content: RequestContent


class Response(msgspec.Struct, frozen=True, tag=True):
    """The response to the receiver's request of this number."""

    number: Count
    content: ResponseContent


Place = tuple[Name, Annotated[int, msgspec.Meta(ge=1, le=65535)]]


class Places(msgspec.Struct, frozen=True, tag=True):
    """Where agents of other members of an allocation listen, for members that were told only the
    launcher's address. They are hints, as those of finders."""

    places: Annotated[tuple[Place, ...], msgspec.Meta(max_length=MAX_LISTED)]


PeerMessage = (
    NodeMessage
    | Introduction
    | AdmissionMessage
    | JobMessage
    | Facts
    | Measured
    | Offer
    | BulkCall
    | Places
    | Request
    | Response
)

MESSAGE: MessageFormat[PeerMessage] = MessageFormat(
    PeerMessage, limit=MAX_MESSAGE, name="a message between agents"
)
