"""One link as the progress loop sees it: frames in, frames out, no policy.

A port keeps what is half done: a header or payload half read, a frame half written, the window
slots that are free. It never blocks; ``read`` and ``write`` go on until the link has no more to
give or take, or until ``BUDGET`` bytes have moved, so that no link starves the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from potluck.errors import ProtocolError
from potluck.metrics import LinkMeter
from potluck.transport.link import Link
from potluck.wire import frames
from potluck.wire.frames import FRAME_BYTES, IN_WINDOW, Frame, Kind

BUDGET = 8 * 1024 * 1024
_MERGE_BYTES = 8 * 1024
"""Payloads up to this size are copied behind their header: one write, one TLS record."""

_WINDOW_BYTES = 4 * 1024
"""Payloads from this size on travel through the window, where there is one."""


class Outgoing(NamedTuple):
    """A frame to write. ``sent`` is called when its payload's memory is no longer needed."""

    frame: Frame
    payload: memoryview
    sent: Callable[[], None] | None = None


class Sink(NamedTuple):
    """Where a payload goes, and what to do once it is there.

    ``buffer`` None means: the consumer copies from whatever memory the payload already lies in.
    """

    buffer: memoryview | None
    complete: Callable[[memoryview], None]


class Port:
    """The engine's end of the link to rank ``rank``."""

    def __init__(self, rank: int, link: Link, meter: LinkMeter) -> None:
        self.rank = rank
        self.link = link
        self.meter = meter
        self.control: deque[Outgoing] = deque()
        self.said_goodbye = False
        """The peer will send nothing more."""
        self.is_acknowledged = False
        """The peer has everything this side sent before its own GOODBYE."""
        self.is_blocked = False
        """The link took less than offered; wait until it is writable."""
        self.said_abort = False
        """The peer has told that the group is over, and why: nothing after that matters."""
        window = link.window
        self._slots: deque[int] = deque(range(window.num_slots) if window else ())
        self._uncredited: set[int] = set()
        self._writing: deque[memoryview] = deque()
        self._sent: Callable[[], None] | None = None
        self._header = memoryview(bytearray(FRAME_BYTES))
        self._filled = 0
        self._frame: Frame | None = None
        self._sink: Sink | None = None
        self._target = memoryview(b"")
        self._small = memoryview(bytearray(frames.MAX_CONTROL))
        self._scratch = memoryview(b"")

    # -- outgoing

    @property
    def is_writing(self) -> bool:
        return bool(self._writing or self.control)

    @property
    def is_amid_frame(self) -> bool:
        """Part of a frame is on the wire and the rest is not."""
        return bool(self._writing)

    def fits_window(self, nbytes: int) -> bool:
        """Whether the payload of a DATA or PIECE frame would travel through the window."""
        window = self.link.window
        return window is not None and _WINDOW_BYTES <= nbytes <= window.slot_bytes

    def can_take(self, nbytes: int) -> bool:
        """Whether such a payload could start now (a window may be out of slots)."""
        return not self._writing and (not self.fits_window(nbytes) or bool(self._slots))

    def write(self, source: Callable[[Port], Outgoing | None]) -> bool:
        """Write until the link is full, ``source`` has nothing more, or the budget is spent.

        Returns True if there may be more to write at once.
        """
        budget = BUDGET
        self.is_blocked = False
        while budget > 0:
            if not self._writing:
                outgoing = self.control.popleft() if self.control else source(self)
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
        """Put a frame on the way; returns the bytes that took the window."""
        frame, payload, sent = outgoing
        self.meter.messages_sent += 1
        nbytes = len(payload)
        window = self.link.window
        if (
            window is not None
            and frame.kind in frames.WINDOW_KINDS
            and self.fits_window(nbytes)
            and self._slots
        ):
            slot = self._slots.popleft()
            _copy(window.outgoing(slot)[:nbytes], payload)
            self.meter.bytes_sent += nbytes
            self.meter.bytes_in_window += nbytes
            frame = frame._replace(flags=frame.flags | IN_WINDOW, tag=slot)
            self._writing.append(memoryview(frames.encode(frame)))
            if sent is not None:
                sent()
            return nbytes
        header = frames.encode(frame)
        if nbytes <= _MERGE_BYTES:
            self._writing.append(memoryview(header + payload))
        else:
            self._writing.append(memoryview(header))
            self._writing.append(payload)
        self._sent = sent
        return 0

    # -- incoming

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for one payload that is combined rather than stored, valid until its end."""
        if len(self._scratch) < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]

    def read(self, route: Callable[[Port, Frame], Sink]) -> bool:
        """Read until the link has no more or the budget is spent; ``route`` places payloads.

        Returns True if there may be more to read at once.
        """
        budget = BUDGET
        while budget > 0:
            if self._frame is None:
                taken = self.link.recv_into(self._header[self._filled :])
                if taken == 0:
                    return False
                self._filled += taken
                if self._filled < FRAME_BYTES:
                    continue
                self._filled = 0
                self._begin(frames.decode(self._header), route)
            else:
                taken = self.link.recv_into(self._target[self._filled :])
                if taken == 0:
                    return False
                self._filled += taken
            budget -= taken
            self.meter.bytes_received += taken
            if self._frame is not None and self._filled == len(self._target):
                self._end(self._target)
        return True

    def _begin(self, frame: Frame, route: Callable[[Port, Frame], Sink]) -> None:
        self.meter.messages_received += 1
        if frame.kind is Kind.CREDIT:
            self._take_credit(frame.tag)
            return
        if frame.flags & IN_WINDOW:
            window = self.link.window
            if window is None or frame.length > window.slot_bytes:
                raise ProtocolError("a frame points to a window slot that this link does not have")
            payload = window.incoming(frame.tag)[: frame.length]
            slot = frame.tag
            if slot in self._uncredited:
                raise ProtocolError(f"window slot {slot} was used again before it was free")
            self.meter.bytes_received += frame.length
            sink = route(self, frame)
            if sink.buffer is not None:
                _copy(sink.buffer, payload)
                payload = sink.buffer
            sink.complete(payload)
            self._uncredited.add(slot)
            credit = Frame(Kind.CREDIT, frame.epoch, tag=slot)
            self.control.append(
                Outgoing(credit, memoryview(b""), lambda: self._uncredited.discard(slot))
            )
            return
        sink = route(self, frame)
        self._frame, self._sink = frame, sink
        self._target = self._small[: frame.length] if sink.buffer is None else sink.buffer
        assert len(self._target) == frame.length

    def _end(self, payload: memoryview) -> None:
        sink = self._sink
        assert sink is not None
        self._frame = self._sink = None
        self._filled = 0
        sink.complete(payload)

    def _take_credit(self, slot: int) -> None:
        window = self.link.window
        if window is None or not 0 <= slot < window.num_slots or slot in self._slots:
            raise ProtocolError(f"a credit for window slot {slot}, which is not in use")
        self._slots.append(slot)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the interpreter lock (a slice assignment would)."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
