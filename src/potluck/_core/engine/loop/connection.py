"""A connection: the framing layer over one link. Frames in, frames out, no policy.

A connection keeps the state of half-done transfers: a header or payload half read, a frame half
written, the free slots of link memory. It never blocks: ``read`` and ``write`` go on until the link
would block, or until ``BUDGET`` bytes have moved, so that no link starves the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from potluck._core.metrics import LinkMeter
from potluck._core.transport.link import Link
from potluck._core.wire import frames
from potluck._core.wire.frames import FRAME_BYTES, IN_LINK_MEMORY, Frame, Kind
from potluck.errors import ProtocolError

BUDGET = 8 * 1024 * 1024
"""Bytes that one call of ``read`` or ``write`` moves at most, about. Tuned for this loop; the
native loop's is 2 MiB (docs/dev/found-out.md)."""

_MERGE_BYTES = 8 * 1024
"""Payloads up to this size are copied behind their header, so that both take one write."""

_LINK_MEMORY_BYTES = 4 * 1024
"""Payloads from this size on travel through link memory, where there is any."""


class Outgoing(NamedTuple):
    """A frame to write. The payload is not copied: its memory must stay unchanged until ``sent`` is
    called."""

    frame: Frame
    payload: memoryview
    sent: Callable[[], None] | None = None


class Sink(NamedTuple):
    """Where a payload goes, and what to do once it is there.

    ``buffer`` None means: ``complete`` reads the payload where it already lies.
    """

    buffer: memoryview | None
    complete: Callable[[memoryview], None]


class Connection:
    """This rank's end of the link to rank ``rank``."""

    def __init__(self, rank: int, link: Link, meter: LinkMeter) -> None:
        self.rank = rank
        self.link = link
        self.meter = meter
        self.control: deque[Outgoing] = deque()
        """Frames that go before any that ``write`` asks for."""
        self.has_closed = False
        """The peer will send nothing more."""
        self.is_acknowledged = False
        """The peer has read all that this side sent before its own CLOSE."""
        self.is_blocked = False
        """The link took less than offered; wait until it is writable."""
        self.has_aborted = False
        """ABORT was received, or is not to be waited for."""
        memory = link.memory
        self._slots: deque[int] = deque(range(memory.num_slots) if memory else ())
        self._unreleased: set[int] = set()
        self._writing: deque[memoryview] = deque()
        self._sent: Callable[[], None] | None = None
        self._header = memoryview(bytearray(FRAME_BYTES))
        self._part = self._header  # what is being read: a header or a payload
        self._filled = 0
        self._sink: Sink | None = None
        self._target = memoryview(b"")
        self._small = memoryview(bytearray(frames.MAX_CONTROL))
        self._scratch = memoryview(b"")

    # -- outgoing

    @property
    def is_writing(self) -> bool:
        return bool(self._writing or self.control)

    def uses_link_memory(self, nbytes: int) -> bool:
        """Whether the payload of a DATA or PIECE frame would travel through link memory."""
        memory = self.link.memory
        return memory is not None and _LINK_MEMORY_BYTES <= nbytes <= memory.slot_bytes

    def can_start(self, nbytes: int) -> bool:
        """Whether a payload of this size could start now (link memory may be out of slots)."""
        return not self._writing and (not self.uses_link_memory(nbytes) or bool(self._slots))

    def write(self, next_outgoing: Callable[[Connection], Outgoing | None]) -> bool:
        """Write ``control``, then the frames that ``next_outgoing`` gives, until the link would
        block, there are no more, or the budget is spent.

        Returns True if there may be more to write at once.
        """
        budget = BUDGET
        self.is_blocked = False
        while budget > 0:
            if not self._writing:
                outgoing = self.control.popleft() if self.control else next_outgoing(self)
                if outgoing is None:
                    return False
                budget -= self._start(outgoing)
            while self._writing:
                data = self._writing[0]
                taken = self.link.send(data)
                if taken == 0:
                    self.is_blocked = True
                    return False
                self.meter.bytes_sent += taken
                budget -= taken
                if taken == len(data):
                    self._writing.popleft()
                else:
                    self._writing[0] = data[taken:]
            sent, self._sent = self._sent, None
            if sent is not None:
                sent()
        return True

    def _start(self, outgoing: Outgoing) -> int:
        """Begin to write a frame; returns the bytes that went through link memory."""
        frame, payload, sent = outgoing
        self.meter.messages_sent += 1
        nbytes = len(payload)
        memory = self.link.memory
        if (
            memory is not None
            and frame.kind in frames.LINK_MEMORY_KINDS
            and self.uses_link_memory(nbytes)
            and self._slots
        ):
            slot = self._slots.popleft()
            # The frame that follows over the socket orders these stores: the receiver reads the
            # slot only after that frame, and the locks of the kernel's socket make the send happen
            # before the receive. So the slots need no locks.
            _copy(memory.outgoing(slot)[:nbytes], payload)
            self.meter.bytes_sent += nbytes
            self.meter.bytes_in_shared_memory += nbytes
            frame = frame._replace(flags=frame.flags | IN_LINK_MEMORY, tag=slot)
            self._writing.append(memoryview(frames.encode(frame)))
            if sent is not None:
                sent()  # the payload has been copied: its memory is free
            return nbytes
        if nbytes <= _MERGE_BYTES:
            self._writing.append(memoryview(b"".join((frames.encode(frame), payload))))
        else:
            self._writing.append(memoryview(frames.encode(frame)))
            self._writing.append(payload)
        self._sent = sent
        return 0

    # -- incoming

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for one payload that is combined rather than stored, valid until its end."""
        if len(self._scratch) < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]

    def read(self, route: Callable[[Connection, Frame], Sink]) -> bool:
        """Read frames until the link would block or the budget is spent; ``route`` gives the sink
        of each payload.

        Returns True if there may be more to read at once.
        """
        budget = BUDGET
        while budget > 0:
            taken = self.link.recv_into(self._part[self._filled :])
            if taken == 0:
                return False
            budget -= taken
            self.meter.bytes_received += taken
            self._filled += taken
            if self._filled < len(self._part):
                continue
            self._filled = 0
            if self._part is self._header:
                self._begin(frames.decode(self._header), route)
            else:
                self._end()
        return True

    def _begin(self, frame: Frame, route: Callable[[Connection, Frame], Sink]) -> None:
        self.meter.messages_received += 1
        if frame.kind is Kind.SLOT_FREE:
            self._free_slot(frame.tag)
            return
        if frame.flags & IN_LINK_MEMORY:
            memory = self.link.memory
            if memory is None or frame.length > memory.slot_bytes:
                raise ProtocolError(
                    "a frame points to a link-memory slot that this link does not have"
                )
            payload = memory.incoming(frame.tag)[: frame.length]
            slot = frame.tag
            if slot in self._unreleased:
                raise ProtocolError(f"link-memory slot {slot} was used again before it was free")
            self.meter.bytes_received += frame.length
            sink = route(self, frame)
            if sink.buffer is not None:
                _copy(sink.buffer, payload)
                payload = sink.buffer
            sink.complete(payload)
            # The slot is the peer's again once SLOT_FREE has been sent. A peer that names the slot
            # before has not waited for SLOT_FREE, and may have overwritten the payload while it was
            # read here.
            self._unreleased.add(slot)
            free = Frame(Kind.SLOT_FREE, frame.epoch, tag=slot)
            self.control.append(
                Outgoing(free, memoryview(b""), lambda: self._unreleased.discard(slot))
            )
            return
        sink = route(self, frame)
        self._sink = sink
        self._target = self._small[: frame.length] if sink.buffer is None else sink.buffer
        assert len(self._target) == frame.length
        self._part = self._target
        if not frame.length:
            self._end()

    def _end(self) -> None:
        sink = self._sink
        assert sink is not None
        self._sink, self._part = None, self._header
        sink.complete(self._target)

    def _free_slot(self, slot: int) -> None:
        memory = self.link.memory
        if memory is None or not 0 <= slot < memory.num_slots or slot in self._slots:
            raise ProtocolError(f"link-memory slot {slot} was freed, which is not in use")
        self._slots.append(slot)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the interpreter lock (a slice assignment would)."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
