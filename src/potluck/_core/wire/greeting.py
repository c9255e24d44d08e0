"""The greeting: the first messages on every connection.

Client -> server: ``Hello``. Server -> client: ``Welcome`` or ``Refusal``. Each is msgpack with a
little-endian u32 length in front, of at most ``MAX_GREETING`` bytes, which is checked before memory
is allocated. No other data is sent before ``Welcome``: in TLS 1.3 a client's handshake ends before
the server has verified the client's certificate.

Each side says the versions of the protocol that it speaks, from ``version`` to ``newest``
(``versions.py``); releases of version 1 say no ``newest``. Unknown fields are ignored.
"""

from __future__ import annotations

from typing import Final

import msgspec

from potluck._core.types import Engine, Site
from potluck._core.wire.format import MessageFormat, Name
from potluck._core.wire.versions import NEWEST, OLDEST

MAX_GREETING = 64 * 1024

WORKER: Final = "worker"
"""The kind of the connection of a worker to its agent."""


class LinkMemoryOffer(msgspec.Struct, frozen=True):
    """The location of shared memory for both directions of a link between peers of one node.

    The client creates the memory and offers it in ``Hello``; the server says in ``Welcome`` whether
    it has mapped it. ``boot`` identifies the running kernel, so that a server on another host does
    not look for ``pid``.
    """

    boot: str
    pid: int
    fd: int
    token: bytes
    num_slots: int
    slot_bytes: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The client's first message: its identity in the job, and the kind of the connection.

    ``kind``, to the listener of a worker: ``data`` (a link of two ranks), ``rendezvous`` (to rank
    0, which sends the addresses of all ranks; ``port`` is the port of the client's listener,
    ``world_size`` the size that it expects), ``store`` (a process group's store), ``meet`` and
    ``join`` (discovery). To an agent: ``node`` (another agent), ``worker``, ``client``
    (a command of the same machine). To either: ``measure`` (one measurement of the path).
    ``engine`` is the engine of the client, ``site`` where its machine stands (``rendezvous`` and
    ``join`` only). ``relay``, to an agent: it is to pass this connection on to the agent of
    ``target``, with which it is ``for_files`` or for messages; ``via`` is the node that passes a
    ``node`` connection on. ``bulk``: between agents, for files.
    """

    kind: str
    job: str = ""
    epoch: int = 0
    rank: int = -1
    to_rank: int = -1
    worker: str = ""
    version: int = OLDEST
    memory: LinkMemoryOffer | None = None
    port: int = 0
    world_size: int = 0
    local_rank: int = 0
    engine: Engine = Engine.NATIVE
    target: Name = ""
    via: Name = ""
    site: Site = ""
    for_files: bool = False
    newest: int = 0


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The server accepts the connection; both peers may send from now on.

    ``memory``: the server has mapped the offered memory; otherwise neither peer uses it.
    """

    rank: int = -1
    version: int = OLDEST
    memory: bool = False
    newest: int = 0


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The server refuses the connection. ``code`` is a word for programs, ``reason`` a sentence."""

    code: str
    reason: str


Greeting = Hello | Welcome | Refusal

GREETING: MessageFormat[Greeting] = MessageFormat(
    Greeting, limit=MAX_GREETING, name="a potluck greeting"
)


def sent_greeting(message: Greeting) -> bytes:
    """``message`` as it is sent, with the versions that this release speaks."""
    if not isinstance(message, Refusal) and not message.newest:
        message = msgspec.structs.replace(message, newest=max(NEWEST, message.version))
    return GREETING.encode(message)


def common_version(theirs: Hello | Welcome) -> int:
    """The newest version of the protocol that the sender and this release speak; 0 if none."""
    version = min(NEWEST, max(theirs.newest, theirs.version))
    return version if version >= max(OLDEST, theirs.version) else 0
