"""What a worker in a sandbox asks of the socket broker of its agent, one packet for each message.

A sandbox has no network. The agent makes the sockets that the worker may have, and passes them over
a Unix socket (SCM_RIGHTS).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck._core.wire.format import decoded

MAX_PACKET = 4096

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Dial(msgspec.Struct, frozen=True, tag=True):
    """A request for a socket that is connected to ``port`` of ``host``, where the broker has
    knocked."""

    host: Annotated[str, msgspec.Meta(max_length=255)]
    port: Port


class Listen(msgspec.Struct, frozen=True, tag=True):
    """A request to listen on ``port`` (0: any) as long as this connection lasts. Each caller that
    has knocked is passed on, with a ``Granted``."""

    port: Port


class Granted(msgspec.Struct, frozen=True, tag=True):
    """The answer: a socket comes with it, or the broker listens on ``port``."""

    port: Port = 0


class Denied(msgspec.Struct, frozen=True, tag=True):
    """The answer if there is no socket: the system's error number, and a sentence."""

    errno: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class Unheard(msgspec.Struct, frozen=True, tag=True):
    """The answer if something else than this cluster's potluck listens there, or nothing answers
    the knock: a sentence."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


Request = Dial | Listen
Answer = Granted | Denied | Unheard

_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """``message`` as one packet."""
    return msgspec.msgpack.encode(message)


def decode_request(packet: bytes) -> Request:
    """The request in ``packet``; ProtocolError if it is none."""
    return decoded(_REQUESTS, packet, "a request of a sandbox")


def decode_answer(packet: bytes) -> Answer:
    """The answer in ``packet``; ProtocolError if it is none."""
    return decoded(_ANSWERS, packet, "an answer to a sandbox")
