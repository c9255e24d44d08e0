"""The first messages on every connection, before anything else is said.

Client -> server: ``Hello``. Server -> client: ``Welcome`` or ``Refusal``. Each is msgpack behind a
little-endian u32 length of at most ``MAX_GREETING`` bytes, checked before anything is allocated.
Nothing of value is sent before ``Welcome``: a TLS 1.3 client believes itself connected before the
server has judged its certificate.

Unknown fields are ignored, so that peers of different versions get as far as telling each other so.
"""

from __future__ import annotations

import msgspec

from potluck.wire.format import MessageFormat

PROTOCOL_VERSION = 1
MAX_GREETING = 64 * 1024

SEALED = "sealed"
PLAIN = "plain"


class LinkMemoryOffer(msgspec.Struct, frozen=True):
    """Where a peer on the same node finds the memory that both directions of this link may use.

    The client makes it and offers it in ``Hello``; the server says in ``Welcome`` whether it could
    map it. ``boot`` names the running kernel, so that no other host goes looking for ``pid``.
    """

    boot: str
    pid: int
    fd: int
    token: bytes
    num_slots: int
    slot_bytes: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The caller's first message: its identity in the job, and the kind of connection it wants.

    ``kind``, to the listener of a worker: ``data`` (a link of two ranks), ``rendezvous`` (to
    rank 0, which tells everyone's address; ``port`` is where the caller listens, ``world_size``
    what it expects), ``store`` (a process group's store), ``meet`` and ``join`` (discovery). To
    an agent: ``node`` (another agent), ``control`` (a worker), ``client`` (a command of the same
    machine). To either: ``measure`` (one measurement of the path). ``wire`` is how a data link
    goes on after WELCOME: ``sealed`` (TLS) or ``plain``.
    """

    kind: str
    namespace: str
    job: str = ""
    epoch: int = 0
    rank: int = -1
    to_rank: int = -1
    worker: str = ""
    version: int = PROTOCOL_VERSION
    memory: LinkMemoryOffer | None = None
    port: int = 0
    world_size: int = 0
    local_rank: int = 0
    wire: str = SEALED


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The server accepts: from here on both sides may send.

    ``memory`` says that the server mapped the offered memory; else neither side uses any. ``wire``
    is what the server goes on with; a client that asked for something else ends the connection.
    """

    rank: int = -1
    version: int = PROTOCOL_VERSION
    memory: bool = False
    wire: str = SEALED


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The server declines. ``code`` is one word for programs, ``reason`` a sentence for people."""

    code: str
    reason: str


Greeting = Hello | Welcome | Refusal

GREETING: MessageFormat[Greeting] = MessageFormat(
    Greeting, limit=MAX_GREETING, name="a potluck greeting"
)
