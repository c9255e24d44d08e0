"""The messages of bulk connections between agents, on which the content of files travels.

What travels is a *package*: a list of files (the manifest), named by the manifest's SHA-256. A file
is cut into chunks of ``CHUNK_BYTES``; a chunk is verified when it has arrived, before it is stored
or passed on. A request names a namespace and a package, never a hash alone, and is answered only to
a node that may have this package: so nobody finds out which private files a machine holds.

| request | response | what for |
|---|---|---|
| DescriptionRequest | Part | the manifest, then the hashes of the chunks of all files |
| HoldingRequest | Holding | which chunks both have and await |
| PartRequest | Part | bytes of one chunk, or of several |

``Announce`` follows a Holding and has no response. Each side of a connection may send all of these.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck._core.wire.format import Digest, MessageFormat
from potluck._core.wire.nodes import Count
from potluck._core.wire.peers import Failure

CHUNK_BYTES = 4 << 20
MAX_CHUNKS = 1 << 18
"""Of one package: 1 TiB of large files."""
MAX_PART = 256 << 10
MAX_FILES = 20_000
MAX_MANIFEST = 8 << 20
MAX_MESSAGE = 1 << 20
_MAX_RANGES = 4096
_MAX_DECLARED = 1 << 14

Namespace = Literal["code", "result", "wheel", "data", "checkpoint"]
"""They differ in who may have a package, how long it is kept, and in the bytes that all of them
together may take."""

Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHUNKS)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
Bitmap = Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNKS // 8)]
"""Of a package's chunks, the lowest bit of the first byte first."""
Ranges = Annotated[tuple[tuple[Index, Index], ...], msgspec.Meta(max_length=_MAX_RANGES)]
"""(first chunk, last chunk) each."""
Declared = Annotated[tuple[tuple[Index, Digest], ...], msgspec.Meta(max_length=_MAX_DECLARED)]
"""SHA-256 of chunks that the sender answers for: it has them from outside of the cluster, or has
verified the whole. Only of a package that is named by the SHA-256 of its one file."""


class DescriptionRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for a part of the description of ``package``, from byte ``offset``."""

    namespace: Namespace
    package: Digest
    offset: Size = 0


class PartRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for ``count`` bytes of the contents of ``package``, from byte ``begin`` of all of
    them together."""

    namespace: Namespace
    package: Digest
    begin: Size
    count: Annotated[int, msgspec.Meta(gt=0, le=MAX_PART)]


class Part(msgspec.Struct, frozen=True, tag=True):
    """The requested bytes, and the ``size`` of the whole that they are a part of."""

    size: Size
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_PART)]


class HoldingRequest(msgspec.Struct, frozen=True, tag=True):
    """The sender fetches ``package``, and has and awaits these chunks. ``reaches``: it can also get
    them from outside of the cluster."""

    namespace: Namespace
    package: Digest
    has: Bitmap = b""
    awaits: Bitmap = b""
    declares: Declared = ()
    reaches: bool = False


class Holding(msgspec.Struct, frozen=True, tag=True):
    """The chunks that the sender has and awaits. Empty if it has nothing of the package, or does
    not share it with the receiver. ``is_fetching``: it wants to hear of the receiver's chunks."""

    has: Bitmap = b""
    awaits: Bitmap = b""
    is_fetching: bool = False
    declares: Declared = ()
    reaches: bool = False


class Announce(msgspec.Struct, frozen=True, tag=True):
    """What has changed at the sender: chunks that it has ``got``, ``awaits`` now, and does not
    await any more because their sender was lost (``given_up``)."""

    namespace: Namespace
    package: Digest
    got: Ranges = ()
    awaits: Ranges = ()
    given_up: Ranges = ()
    declares: Declared = ()


Request = DescriptionRequest | PartRequest | HoldingRequest
Response = Part | Holding | Failure


class Asked(msgspec.Struct, frozen=True, tag=True):
    """A request, with a number of the sender's own."""

    number: Count
    content: Request


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The response to the receiver's request of this number."""

    number: Count
    content: Response


BulkMessage = Asked | Answered | Announce

MESSAGE: MessageFormat[BulkMessage] = MessageFormat(
    BulkMessage, limit=MAX_MESSAGE, name="a message of a bulk connection"
)
