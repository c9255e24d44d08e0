"""The messages between agents, after the greeting.

Each message is a tagged msgpack struct behind a little-endian u32 length of at most ``MAX_MESSAGE``
(1 MiB), checked before anything is allocated. Messages of the membership protocol are in
``nodes.py``, about jobs in ``jobs.py``, about machines and links in ``facts.py``. Here are the
rest: introductions, new secrets, and code packages.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.wire.facts import Facts, Measured
from potluck.wire.format import MessageFormat
from potluck.wire.jobs import JobMessage
from potluck.wire.names import Digest, Name, Text, Versions
from potluck.wire.nodes import NodeMessage

MAX_MESSAGE = 1 << 20
MAX_PART = 256 * 1024
MAX_FILES = 20_000

Psk = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class Introduction(msgspec.Struct, frozen=True, tag=True):
    """The first message in both directions: in which run of my agent I speak, what people call
    this machine, where its agent listens, and with which versions its workers would run."""

    incarnation: int
    name: Name
    port: int
    versions: Versions


class NewSecret(msgspec.Struct, frozen=True, tag=True):
    """Accept ``psk`` from now on; do not show it yet. Answer with SecretStored."""

    rotation: Name
    psk: Psk

    def __repr__(self) -> str:
        return f"NewSecret(rotation={self.rotation!r})"


class SecretStored(msgspec.Struct, frozen=True, tag=True):
    """The secret of ``rotation`` is on my disk and accepted; ``error`` if it could not be."""

    rotation: Name
    error: Text = ""


class UseSecret(msgspec.Struct, frozen=True, tag=True):
    """Show the new secret from now on, and accept the old one for the time of grace."""

    rotation: Name


class DropSecret(msgspec.Struct, frozen=True, tag=True):
    """The rotation was given up: forget its secret."""

    rotation: Name


class PartWanted(msgspec.Struct, frozen=True, tag=True):
    """Send me a part, from ``offset``, of the file of ``package`` whose SHA-256 is ``file``; of its
    manifest if ``file`` is empty."""

    package: Digest
    file: Annotated[bytes, msgspec.Meta(max_length=32)]
    offset: Offset


class PackagePart(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a manifest (``file`` empty) or a file, from ``offset``; ``size`` is the whole's."""

    package: Digest
    file: Annotated[bytes, msgspec.Meta(max_length=32)]
    offset: Offset
    size: int
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_PART)]


class NotHere(msgspec.Struct, frozen=True, tag=True):
    """I don't have this package or file."""

    package: Digest
    file: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    reason: Text = ""


PackageMessage = PartWanted | PackagePart | NotHere
PeerMessage = (
    NodeMessage
    | Introduction
    | NewSecret
    | SecretStored
    | UseSecret
    | DropSecret
    | PackageMessage
    | JobMessage
    | Facts
    | Measured
)

MESSAGE: MessageFormat[PeerMessage] = MessageFormat(
    PeerMessage, limit=MAX_MESSAGE, name="a message between agents"
)
