"""Point-to-point messages on their way: announced, granted, sent in pieces.

Runs on the progress loop. Who gets a message is decided in ``mailbox.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

from potluck.engine.failures.fate import Fate
from potluck.engine.failures.verdict import misfit, overdue
from potluck.engine.loop.mailbox import Arrived, Mailbox, Receiving, Sending, fits
from potluck.engine.loop.port import Outgoing, Port, Sink
from potluck.engine.loop.ports import NOTHING, Ports
from potluck.errors import ProtocolError
from potluck.wire import frames
from potluck.wire.frames import EAGER_BYTES, Frame, Kind


class Messages:
    """The sends and receives of one rank, over all channels of its group."""

    def __init__(self, fate: Fate, ports: Ports, segment_bytes: int) -> None:
        self._fate = fate
        self._group = fate.group
        self._ports = ports
        self._segment_bytes = segment_bytes
        self._mailbox = Mailbox()
        self._message = 0

    def pending(self) -> Iterable[Sending | Receiving]:
        return self._mailbox.pending()

    def check_deadlines(self, now: float) -> None:
        for item in self._mailbox.pending():
            if now >= item.deadline:
                self._fate.fail(overdue(self._group, item))

    # -- out

    def send(self, sending: Sending) -> None:
        """Send a message; its work ends when its memory may be reused."""
        self._ports.need((sending.peer,))
        self._message += 1
        frame = Frame(
            Kind.EAGER,
            self._group.epoch,
            sending.channel,
            operation=self._message,
            length=len(sending.data),
            source=self._group.rank,
            dtype=sending.dtype,
            tag=sending.tag,
        )
        sending.number = self._message
        self._mailbox.sending[self._message] = sending
        if self._ports.departed:
            self._ports.check_departed(sending)
            if self._fate.error is not None:
                return
        share = self._ports.share(sending.peer)
        if len(sending.data) <= EAGER_BYTES and share.has_room(len(sending.data)):
            share.sent(len(sending.data))
            done = partial(self._end_send, sending)
            self._ports.tell(sending.peer, Outgoing(frame, sending.data, done))
        else:
            share.sent(0)
            body = frames.encode_request(frames.Request(len(sending.data)))
            frame = frame._replace(kind=Kind.REQUEST, length=len(body))
            self._ports.tell(sending.peer, Outgoing(frame, memoryview(body)))

    def on_grant(self, port: Port, frame: Frame, _: memoryview) -> None:
        """The receiver of a large message is ready (GRANT)."""
        sending = self._mailbox.sending.get(frame.operation)
        if sending is None or sending.peer != port.rank or sending.is_granted:
            raise ProtocolError(f"a GRANT for message #{frame.operation}, which was not announced")
        sending.is_granted = True
        self._mailbox.granted.setdefault(port.rank, deque()).append(sending)
        self._ports.dirty.add(port.rank)

    def next_outgoing(self, port: Port) -> Outgoing | None:
        """The next piece of a granted message that may go over this link."""
        granted = self._mailbox.granted.get(port.rank)
        if not granted:
            return None
        sending = granted[0]
        start = sending.offset
        data = sending.data[start : start + self._segment_bytes]
        if not port.can_take(len(data)):
            return None
        sending.offset += len(data)
        is_last = sending.offset == len(sending.data)
        if is_last:
            granted.popleft()
        frame = Frame(
            Kind.PIECE,
            self._group.epoch,
            sending.channel,
            operation=sending.number,
            segment=start // self._segment_bytes,
            length=len(data),
            source=self._group.rank,
            dtype=sending.dtype,
        )
        return Outgoing(frame, data, partial(self._end_send, sending) if is_last else None)

    def _end_send(self, sending: Sending) -> None:
        if self._mailbox.sending.pop(sending.number, None) is not None:
            sending.work.finish()

    # -- in

    def receive(self, receiving: Receiving) -> None:
        """Take the first message that matches; its work ends when that is there."""
        if receiving.source >= 0:
            self._ports.need((receiving.source,))
        arrived = self._mailbox.post(receiving)
        if arrived is not None:
            self._match(receiving, arrived)
        elif self._ports.departed:
            self._ports.check_departed(receiving)

    def keep_eager(self, port: Port, frame: Frame) -> Sink:
        """Where the payload of a small message goes: it is kept until somebody asks for it."""
        self._ports.hold(port.rank, frame.length)
        return self._ports.keep(port, frame, self._on_eager)

    def _on_eager(self, port: Port, frame: Frame, payload: bytearray) -> None:
        self._arrive(Arrived(port.rank, frame, len(payload), payload))

    def on_request(self, port: Port, frame: Frame, payload: memoryview) -> None:
        """A large message asks to be received (REQUEST)."""
        nbytes = frames.decode_request(bytes(payload)).nbytes
        self._ports.hold(port.rank, 0)
        self._arrive(Arrived(port.rank, frame, nbytes, None))

    def _arrive(self, arrived: Arrived) -> None:
        receiving = self._mailbox.arrive(arrived)
        if receiving is not None:
            self._match(receiving, arrived)

    def _match(self, receiving: Receiving, arrived: Arrived) -> None:
        receiving.matched = arrived.source
        if not fits(receiving, arrived):
            self._mailbox.posted.append(receiving)
            sent = (arrived.nbytes, arrived.frame.dtype)
            self._fate.fail(misfit(self._group, arrived.source, receiving, *sent))
            return
        key = (arrived.source, arrived.frame.operation)
        if arrived.payload is None and key in self._mailbox.receiving:
            self._mailbox.posted.append(receiving)
            again = ProtocolError(f"it announced message #{key[1]} again before it had sent it")
            self._ports.violated(arrived.source, again)
            return
        self._ports.release(arrived.source, len(arrived.payload or b""))
        if arrived.payload is not None:
            receiving.data[:] = arrived.payload
            self._end_receive(receiving)
            return
        self._mailbox.receiving[key] = receiving
        self._ports.tell(
            arrived.source,
            Outgoing(
                Frame(
                    Kind.GRANT,
                    self._group.epoch,
                    receiving.channel,
                    operation=arrived.frame.operation,
                    source=self._group.rank,
                ),
                NOTHING,
            ),
        )

    def route_piece(self, port: Port, frame: Frame) -> Sink:
        """Where a piece of a large message goes (PIECE)."""
        key = (port.rank, frame.operation)
        receiving = self._mailbox.receiving.get(key)
        if (
            receiving is None
            or frame.segment != receiving.num_pieces
            or receiving.offset + frame.length > len(receiving.data)
        ):
            raise ProtocolError(f"a piece of message #{frame.operation} that is not due")

        def complete(_: memoryview) -> None:
            receiving.offset += frame.length
            receiving.num_pieces += 1
            if receiving.offset == len(receiving.data):
                del self._mailbox.receiving[key]
                self._end_receive(receiving)

        start = receiving.offset
        return Sink(receiving.data[start : start + frame.length], complete)

    def _end_receive(self, receiving: Receiving) -> None:
        receiving.work.source = receiving.ranks.index(receiving.matched)
        receiving.work.finish()
