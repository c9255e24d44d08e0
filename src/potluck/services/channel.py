"""``Channel``: the frames of one connection, and ``Blocks``: the memory of their arrays. No call
blocks."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from potluck._core.transport.bulk import BulkLink
from potluck._core.wire.format import decoded
from potluck._core.wire.payload import Packed, Unpacked, Unpacker, decoded_bytes
from potluck._core.wire.services import PREFIX_BYTES, Head, Lengths, encode, lengths_in
from potluck.errors import ProtocolError

KEEP_BYTES = 256 << 20
SMALLEST = 1 << 20


class Blocks:
    """Memory for large arrays, used again once no array refers to it: up to ``keep_bytes`` of it.

    Fresh memory comes from the system page by page, which can take three times as long as the
    transfer that fills it (100 MiB: 0.30 s of page faults, 0.11 s on the link).
    """

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._kept: list[NDArray[np.uint8]] = []
        # Re-entrant: the garbage collector may give a block back at any moment.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A flat array of ``nbytes``, whose contents are undefined."""
        if nbytes < SMALLEST:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            fits = (i for i, each in enumerate(self._kept) if nbytes <= each.nbytes <= 2 * nbytes)
            index = next(fits, -1)
            block = self._kept.pop(index) if index >= 0 else np.empty(nbytes, np.uint8)
        lease = _Lease(block, nbytes)
        weakref.finalize(lease, self._give_back, block).atexit = False
        return np.asarray(lease)

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            if sum(each.nbytes for each in self._kept) + block.nbytes <= self._keep_bytes:
                self._kept.append(block)


class _Lease:
    """A block in use: every array and view of it refers to this object."""

    def __init__(self, block: NDArray[np.uint8], nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (block.ctypes.data, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


T = TypeVar("T", bound=Head)

SMALL_BYTES = 4096
"""A frame of up to this size is received whole, by one read in most cases."""

_JOINED_BYTES = 64 * 1024
"""Arrays up to this size are copied behind the head, so that the frame leaves by one write."""


class State(Enum):
    """How much of a frame has been received."""

    WAITING = "no more bytes have arrived"
    ANNOUNCED = "its lengths are known; no memory was taken for them"
    COMPLETE = "its head and value are there"


class Channel(Generic[T]):
    """One end of a connection, with at most one frame under way in each direction."""

    def __init__(self, link: BulkLink, received: type[T], limit: int, memory: Blocks) -> None:
        """``received`` is the type of the heads that come in, ``limit`` the most bytes of their
        arrays, which are taken from ``memory``."""
        self.link = link
        self._decoder = msgspec.msgpack.Decoder(received)
        self._limit = limit
        self._unpacker = Unpacker(limit, memory.take)
        self._outgoing: deque[memoryview] = deque()
        self._start = memoryview(bytearray(SMALL_BYTES))
        """The beginning of a frame, or all of it."""
        self._num_start = 0
        self._lengths = Lengths(0, 0, 0)
        self.nbytes = 0
        self._is_announced = False
        self._rooms: Iterator[memoryview] | None = None
        """The memory for the rest of a frame that is not small."""
        self._room = memoryview(b"")
        self.value: Any = None

    def close(self) -> None:
        """End the connection, and release all arrays now: a reference cycle keeps this object
        for a while."""
        self.link.close()
        self._outgoing.clear()
        self._rooms = None
        self._room = memoryview(b"")
        self.value = None

    # -- out

    def put(self, head: Head, packed: Packed) -> None:
        """Queue a frame for ``send``. Its arrays must not change until ``send`` has returned
        True."""
        first = encode(head, packed)
        if packed.nbytes <= _JOINED_BYTES:
            self._outgoing.append(memoryview(b"".join((first, *packed.buffers))))
            return
        self._outgoing.append(memoryview(first))
        self._outgoing.extend(buffer for buffer in packed.buffers if len(buffer))

    def send(self) -> bool:
        """Send what the connection takes; True once all is sent. LinkError if it has ended."""
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
        """Receive the bytes that have arrived. LinkError if the connection has ended, ProtocolError
        for bytes that are no frame.

        After ANNOUNCED ``nbytes`` is known, and the next call goes on. After COMPLETE ``head`` and
        ``value`` are the frame's; the next call begins another frame.
        """
        if not self._is_announced:
            if not self._receive_start():
                return State.WAITING
            self._is_announced = True
            return State.ANNOUNCED
        if self.nbytes <= SMALL_BYTES:
            self._take_small()
        elif not self._receive_rest():
            return State.WAITING
        self._is_announced = False
        self._num_start = 0
        return State.COMPLETE

    @property
    def memory_bytes(self) -> int:
        """The most memory that the announced frame takes, received and decoded."""
        return self.nbytes + decoded_bytes(self._lengths.header)

    @property
    def is_receiving(self) -> bool:
        """Whether a part of a frame was received."""
        return self._num_start > 0

    def _receive_start(self) -> bool:
        """Whether a small frame is complete, or the lengths of a long one are known."""
        size = self._num_start
        while count := self.link.recv_into(self._start[size:] if size else self._start):
            before, self._num_start = size, size + count
            size += count
            if size < PREFIX_BYTES:
                continue
            if before < PREFIX_BYTES:
                self._lengths = lengths_in(self._start, self._limit)
                self.nbytes = PREFIX_BYTES + sum(self._lengths)
            if size > self.nbytes:
                raise ProtocolError(
                    f"{size - self.nbytes} bytes came behind a frame, before it was answered"
                )
            if size == self.nbytes or self.nbytes > SMALL_BYTES:
                return True
        return False

    def _take_small(self) -> None:
        at = self.nbytes - self._lengths.arrays
        unpacked = self._parsed(self._start[PREFIX_BYTES:at])
        for buffer in unpacked.buffers:
            buffer[:] = self._start[at : at + len(buffer)]
            at += len(buffer)
        self.value = unpacked.value

    def _receive_rest(self) -> bool:
        """Whether a frame that is not small is complete."""
        if self._rooms is None:
            self._rooms = self._rest()
        while True:
            while self._room:
                count = self.link.recv_into(self._room)
                if not count:
                    return False
                self._room = self._room[count:]
            room = next(self._rooms, None)
            if room is None:
                self._rooms = None
                self._room = memoryview(b"")  # an empty view keeps its array alive, too
                return True
            self._room = room

    def _rest(self) -> Iterator[memoryview]:
        """The buffers of a frame that is not small, in order; each is filled before the next is
        taken."""
        came = self._start[PREFIX_BYTES : self._num_start]

        def left_of(room: memoryview) -> memoryview:
            nonlocal came
            size = min(len(came), len(room))
            room[:size] = came[:size]
            came = came[size:]
            return room[size:]

        heads = memoryview(bytearray(self._lengths.head + self._lengths.header))
        yield left_of(heads)
        unpacked = self._parsed(heads)
        for buffer in unpacked.buffers:
            yield left_of(buffer)
        self.value = unpacked.value

    def _parsed(self, heads: memoryview) -> Unpacked:
        """The payload of a frame whose head is ``self.head`` from now on."""
        lengths = self._lengths
        self.head: T = decoded(self._decoder, heads[: lengths.head], "the head of a call")
        unpacked = self._unpacker.unpack(heads[lengths.head :])
        if unpacked.nbytes != lengths.arrays:
            raise ProtocolError(
                f"the arrays of a call take {unpacked.nbytes} bytes, {lengths.arrays} were "
                "announced"
            )
        return unpacked
