"""The messages between agents after the greeting.

Each message is a tagged msgpack struct with a little-endian u32 length in front, of at most
``MAX_MESSAGE`` (1 MiB), which is checked before memory is allocated. Messages of the membership
protocol are in ``nodes.py``, about jobs in ``jobs.py``, about nodes and links in ``facts.py``,
about whose jobs a node runs in ``sharing.py``, about services of programs in ``served.py``, about
files that jobs wrote in ``results.py``, about admitted keys in ``admissions.py``. This file has
introductions and code packages.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck._core.wire.admissions import AdmissionMessage, Key
from potluck._core.wire.facts import Facts, Measured
from potluck._core.wire.format import MessageFormat
from potluck._core.wire.jobs import JobMessage, VouchMessage
from potluck._core.wire.names import Digest, MachineName, Text, Versions
from potluck._core.wire.nodes import Count, NodeMessage
from potluck._core.wire.results import ResultsMessage
from potluck._core.wire.served import ServicesHere, ServicesWanted
from potluck._core.wire.sharing import Offer

MAX_MESSAGE = 1 << 20
MAX_PART = 256 * 1024
MAX_FILES = 20_000

Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class Introduction(msgspec.Struct, frozen=True, tag=True):
    """The first message in both directions: the incarnation (run) of the sending agent, the name
    and the key of its machine, the port of its listener, and the versions of its workers."""

    incarnation: Count
    name: MachineName
    key: Key
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    versions: Versions


class PartWanted(msgspec.Struct, frozen=True, tag=True):
    """A request for a part, from ``offset``, of the file of ``package`` with the SHA-256 ``file``;
    of the package's manifest if ``file`` is empty."""

    package: Digest
    file: Annotated[bytes, msgspec.Meta(max_length=32)]
    offset: Offset


class PackagePart(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a manifest (``file`` is empty) or a file, from ``offset``; ``size`` is its total
    size."""

    package: Digest
    file: Annotated[bytes, msgspec.Meta(max_length=32)]
    offset: Offset
    size: Offset
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_PART)]


class NotHere(msgspec.Struct, frozen=True, tag=True):
    """The sender does not have this package or file."""

    package: Digest
    file: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    reason: Text = ""


PackageMessage = PartWanted | PackagePart | NotHere | ResultsMessage
PeerMessage = (
    NodeMessage
    | Introduction
    | AdmissionMessage
    | PackageMessage
    | JobMessage
    | VouchMessage
    | Facts
    | Measured
    | Offer
    | ServicesWanted
    | ServicesHere
)

MESSAGE: MessageFormat[PeerMessage] = MessageFormat(
    PeerMessage, limit=MAX_MESSAGE, name="a message between agents"
)
