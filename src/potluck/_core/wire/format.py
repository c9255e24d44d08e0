"""The format of messages: msgpack with a little-endian u32 length in front; the bounded types of
their fields."""

from __future__ import annotations

import struct
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec

from potluck._core.printable import MAX_NAME, PRINTABLE
from potluck.errors import ProtocolError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PREFIX_BYTES = 4

_LENGTH = struct.Struct("<I")


class Decoder(Protocol[T_co]):
    """A decoder of msgspec, for msgpack or JSON."""

    def decode(self, data: Any, /) -> T_co: ...


def decoded(decoder: Decoder[T], data: bytes | memoryview | str, name: str) -> T:
    """What ``decoder`` makes of ``data``, which may be hostile; ProtocolError, in which ``name``
    (for example ``a request``) says what was expected, if it is no such message."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not {name}: {error}") from error


class MessageFormat(Generic[T]):
    """The format of messages of one type, which may be a union of tagged structs.

    A message has at most ``limit`` bytes, checked before memory is allocated. ``name`` is used in
    errors, for example ``a request``. A reader reads ``PREFIX_BYTES``, then ``length(prefix)``
    bytes, which it passes to ``decode``.
    """

    def __init__(self, type: Any, *, limit: int, name: str) -> None:
        self.limit = limit
        self.name = name
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(type)

    def encode(self, message: T) -> bytes:
        """The message with its length in front; ProtocolError if it is too long."""
        body = self._encoder.encode(message)
        if len(body) > self.limit:
            raise ProtocolError(
                f"{self.name} ({type(message).__name__}) of {len(body)} bytes; "
                f"at most {self.limit} are allowed"
            )
        return _LENGTH.pack(len(body)) + body

    def length(self, prefix: bytes) -> int:
        """The number of bytes that follow ``prefix``; ProtocolError if that is out of bounds."""
        length: int = _LENGTH.unpack(prefix)[0]
        if not 0 < length <= self.limit:
            raise ProtocolError(
                f"{self.name} announces {length} bytes; 1 to {self.limit} are allowed"
            )
        return length

    def decode(self, body: bytes) -> T:
        """The message in ``body``; ProtocolError if it is no message of this type."""
        return decoded(self._decoder, body, self.name)


Name = Annotated[str, msgspec.Meta(max_length=256, pattern=PRINTABLE)]
MachineName = Annotated[str, msgspec.Meta(max_length=MAX_NAME, pattern=PRINTABLE)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Versions(msgspec.Struct, frozen=True):
    """The versions with which a node runs workers. ``torch`` is empty if it is not installed, or,
    in a job, if the script does not use it; ``python``, in a job that brings an environment.
    ``executable`` is the path of Python; which wheels fit, ``kind`` says (see ``environments``)."""

    python: Name
    potluck: Name
    torch: Name
    numpy: Name
    machine: Name
    byte_order: Name = "little"
    executable: Name = ""
    kind: Name = ""


MAX_PAIRS = 1024
Pairs = Annotated[tuple[tuple[Name, Name], ...], msgspec.Meta(max_length=MAX_PAIRS)]
"""Pairs of workers."""
