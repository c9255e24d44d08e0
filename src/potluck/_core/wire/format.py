"""The format of messages: msgpack with a little-endian u32 length in front; the bounded types of
their fields."""

from __future__ import annotations

import re
import struct
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec

from potluck._core.printable import MAX_NAME, PRINTABLE, plain
from potluck._core.wire.versions import KNOWN
from potluck.errors import ProtocolError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PREFIX_BYTES = 4

_LENGTH = struct.Struct("<I")
_UNKNOWN_TYPE = re.compile(r"Invalid value '(.*)' - at `\$[.a-z_]*\.type`", re.DOTALL)


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


class UnknownMessage(ProtocolError):
    """A whole message whose type, or the type of what it carries, this release does not know: the
    sender has another one. ``kind`` is the name of that type, ``number`` that of the request (0:
    it is none)."""

    def __init__(self, text: str, kind: str, number: int) -> None:
        super().__init__(text)
        self.kind = kind
        self.number = number


class _Numbered(msgspec.Struct):
    type: str = ""
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0


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
        """The message in ``body``; ProtocolError if it is no message of this type, UnknownMessage
        if another release may know what it is."""
        try:
            return decoded(self._decoder, body, self.name)
        except ProtocolError as error:
            unknown = _UNKNOWN_TYPE.search(str(error))
            if unknown is None:
                raise
            numbered = decoded(_NUMBERED, body, self.name)
            kind = plain(unknown[1])[:64]
            text = f"not {self.name}: this release knows no {kind!r}"
            number = numbered.number if numbered.type == "Request" else 0
            raise UnknownMessage(text, kind, number) from None

    def is_known(self, message: T, version: int) -> bool:
        """Whether a peer that speaks ``version`` knows the type of ``message``, and of each
        message in it."""
        known = KNOWN.get(version)
        if known is None:
            return True
        parts = (message, *(getattr(message, name) for name in _fields(message)))
        return all(
            type(part).__name__ in known
            for part in parts
            if isinstance(part, msgspec.Struct) and part.__struct_config__.tag is not None
        )


_NUMBERED = msgspec.msgpack.Decoder(_Numbered)


def _fields(message: Any) -> tuple[str, ...]:
    return tuple(message.__struct_fields__)


Name = Annotated[str, msgspec.Meta(max_length=256, pattern=PRINTABLE)]
MachineName = Annotated[str, msgspec.Meta(max_length=MAX_NAME, pattern=PRINTABLE)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Versions(msgspec.Struct, frozen=True):
    """The versions with which a node runs workers. ``torch`` is empty if it is not installed, or,
    in a job, if the script does not use it; ``python``, in a job that brings an environment.
    ``executable`` is the path of Python; which wheels fit, ``kind`` says (see ``environments``).
    ``protocol`` is the newest version of the protocol that its potluck speaks."""

    python: Name
    potluck: Name
    torch: Name
    numpy: Name
    machine: Name
    byte_order: Name = "little"
    executable: Name = ""
    kind: Name = ""
    protocol: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = 1

    @property
    def upgrade(self) -> str:
        """What a person enters on that node to upgrade its potluck."""
        python = self.executable or "python"
        return f"{python} -m pip install --upgrade potluck, then start its potluck up again"


MAX_PAIRS = 1024
Pairs = Annotated[tuple[tuple[Name, Name], ...], msgspec.Meta(max_length=MAX_PAIRS)]
"""Pairs of workers."""
