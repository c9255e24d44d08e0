"""``Channel``: the frames of one connection. No call of it blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from potluck.errors import ProtocolError
from potluck.services.memory import Blocks
from potluck.transport.bulk import BulkLink
from potluck.wire.payload import Packed, unpack
from potluck.wire.services import PREFIX_BYTES, Head, Lengths, encode, lengths_in

T = TypeVar("T", bound=Head)

_JOINED_BYTES = 64 * 1024
"""Arrays up to this size are copied behind the head, so that the frame leaves by one write."""

_NOTHING = memoryview(b"")


class State(Enum):
    """How much of a frame has been received."""

    WAITING = "no more bytes have come"
    ANNOUNCED = "its lengths are known; no memory was taken for them"
    COMPLETE = "its head and value are there"


class Channel(Generic[T]):
    """One end of a connection, with at most one frame under way in each direction."""

    def __init__(self, link: BulkLink, received: type[T], limit: int, memory: Blocks) -> None:
        """``received`` is the type of the heads that come in, ``limit`` the most bytes of their
        arrays, which are taken from ``memory``."""
        self.link = link
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(received)
        self._limit = limit
        self._memory = memory
        self._outgoing: deque[memoryview] = deque()
        self.value: Any = None
        self._rooms: Iterator[memoryview] = self._frame()
        self._room = self._prefix = next(self._rooms)
        self._at = 0

    def close(self) -> None:
        """End the connection, and let go of all arrays now: a cycle keeps this object for a
        while."""
        self.link.close()
        self._outgoing.clear()
        self._rooms = iter(())
        self._room = self._prefix = _NOTHING
        self.value = None

    # -- out

    def put(self, head: Head, packed: Packed) -> None:
        """Begin to send a frame. Its arrays must not change until ``send`` has returned True."""
        first = encode(head, packed)
        if packed.nbytes <= _JOINED_BYTES:
            self._outgoing.append(memoryview(b"".join((first, *packed.buffers))))
            return
        self._outgoing.append(memoryview(first))
        self._outgoing.extend(buffer for buffer in packed.buffers if len(buffer))

    def send(self) -> bool:
        """Send what the connection takes; True when all has left. LinkError if it has ended."""
        while self._outgoing:
            data = self._outgoing[0]
            taken = self.link.send(data)
            if taken < len(data):
                if not taken:
                    return False
                self._outgoing[0] = data[taken:]
            else:
                self._outgoing.popleft()
        return self.link.flush()

    # -- in

    def receive(self) -> State:
        """Receive what has come. LinkError if the connection has ended, ProtocolError for bytes
        that are no frame.

        After ANNOUNCED ``lengths`` is known, and the next call goes on. After COMPLETE ``head`` and
        ``value`` are the frame's; the next call begins another frame.
        """
        while True:
            while self._at < len(self._room):
                count = self.link.recv_into(self._room[self._at :])
                if not count:
                    return State.WAITING
                self._at += count
            self._at = 0
            room = next(self._rooms, None)
            if room is None:
                self._begin()
                return State.COMPLETE
            self._room = room
            if room is _NOTHING:
                return State.ANNOUNCED

    @property
    def is_receiving(self) -> bool:
        """Whether a part of a frame has come."""
        return self._at > 0 or self._room is not self._prefix

    def _begin(self) -> None:
        self._rooms = self._frame()
        self._room = self._prefix = next(self._rooms)
        self._at = 0

    def _frame(self) -> Iterator[memoryview]:
        """The memory for each part of a frame, in order; a part is full when the next is asked
        for."""
        prefix = memoryview(bytearray(PREFIX_BYTES))
        yield prefix
        self.lengths: Lengths = lengths_in(prefix, self._limit)
        yield _NOTHING
        start = memoryview(bytearray(self.lengths.head + self.lengths.header))
        yield start
        try:
            head = self._decoder.decode(start[: self.lengths.head])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not the head of a call: {error}") from error
        given = start[self.lengths.head :]
        unpacked = unpack(given, self.lengths.arrays, self._memory.take)
        if unpacked.nbytes != self.lengths.arrays:
            raise ProtocolError(
                f"the arrays of a call take {unpacked.nbytes} bytes, {self.lengths.arrays} were "
                "announced"
            )
        yield from unpacked.buffers
        self.head: T = head
        self.value = unpacked.value
