"""The transfer of point-to-point messages: eager, or rendezvous (RTS, CTS, then pieces).

Runs on the progress loop. Which receive a message goes to is decided in ``mailbox.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

from potluck._core.engine.failures.group_errors import GroupState, message_mismatch, overdue
from potluck._core.engine.loop.connections import NOTHING, Connection, Connections, Outgoing, Sink
from potluck._core.engine.loop.mailbox import Arrived, Mailbox, Receiving, Sending, fits
from potluck._core.wire import frames
from potluck._core.wire.frames import EAGER_BYTES, Frame, Kind
from potluck.errors import ProtocolError


class Messages:
    """The sends and receives of one rank, over all channels of its group."""

    def __init__(self, state: GroupState, connections: Connections, segment_bytes: int) -> None:
        self._state = state
        self._group = state.group
        self._connections = connections
        self._segment_bytes = segment_bytes
        self._mailbox = Mailbox()
        self._message = 0

    def pending(self) -> Iterable[Sending | Receiving]:
        return self._mailbox.pending()

    def check_deadlines(self, now: float) -> None:
        for item in self._mailbox.pending():
            if now >= item.deadline:
                self._state.fail(overdue(self._group, item))

    # -- out

    def send(self, sending: Sending) -> None:
        """Send a message; its work ends when its memory may be reused."""
        self._connections.need((sending.peer,))
        self._message += 1
        frame = Frame(
            Kind.EAGER,
            self._group.epoch,
            sending.channel,
            sequence=self._message,
            length=len(sending.data),
            source=self._group.rank,
            dtype=sending.dtype,
            tag=sending.tag,
        )
        sending.number = self._message
        self._mailbox.sending[self._message] = sending
        if self._connections.departed:
            self._connections.check_departed(sending)
            if self._state.error is not None:
                return
        flow = self._connections.flow(sending.peer)
        if len(sending.data) <= EAGER_BYTES and flow.has_credit(len(sending.data)):
            flow.sent(len(sending.data))
            done = partial(self._end_send, sending)
            self._connections.send_control(sending.peer, Outgoing(frame, sending.data, done))
        else:
            # Announced even without credit: its receiver could not ask for it otherwise. The frame
            # is small, and its bytes wait here until the receive gives them a place.
            flow.sent(0)
            body = frames.encode_rts(frames.Rts(len(sending.data)))
            frame = frame._replace(kind=Kind.RTS, length=len(body))
            self._connections.send_control(sending.peer, Outgoing(frame, memoryview(body)))

    def on_cts(self, connection: Connection, frame: Frame, _: memoryview) -> None:
        """The receive that matches a large message was called (CTS)."""
        sending = self._mailbox.sending.get(frame.sequence)
        if sending is None or sending.peer != connection.rank or sending.is_clear:
            raise ProtocolError(f"a CTS for message #{frame.sequence}, which was not announced")
        sending.is_clear = True
        self._mailbox.cleared.setdefault(connection.rank, deque()).append(sending)
        self._connections.dirty.add(connection.rank)

    def next_outgoing(self, connection: Connection) -> Outgoing | None:
        """The next piece of a cleared message that may go over this link."""
        cleared = self._mailbox.cleared.get(connection.rank)
        if not cleared:
            return None
        sending = cleared[0]
        start = sending.offset
        data = sending.data[start : start + self._segment_bytes]
        if not connection.can_start(len(data)):
            return None
        sending.offset += len(data)
        is_last = sending.offset == len(sending.data)
        if is_last:
            cleared.popleft()
        frame = Frame(
            Kind.PIECE,
            self._group.epoch,
            sending.channel,
            sequence=sending.number,
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
            self._connections.need((receiving.source,))
        arrived = self._mailbox.post(receiving)
        if arrived is not None:
            self._match(receiving, arrived)
        elif self._connections.departed:
            self._connections.check_departed(receiving)

    def keep_eager(self, connection: Connection, frame: Frame) -> Sink:
        """The sink of an eager message: memory of its own, because whether a receive matches it is
        decided when it has come completely."""
        self._connections.hold(connection.rank, frame.length)
        return self._connections.keep(connection, frame, self._on_eager)

    def _on_eager(self, connection: Connection, frame: Frame, payload: bytearray) -> None:
        self._arrive(Arrived(connection.rank, frame, len(payload), payload))

    def on_rts(self, connection: Connection, frame: Frame, payload: memoryview) -> None:
        """A large message is announced (RTS)."""
        nbytes = frames.decode_rts(bytes(payload)).nbytes
        self._connections.hold(connection.rank, 0)
        self._arrive(Arrived(connection.rank, frame, nbytes, None))

    def _arrive(self, arrived: Arrived) -> None:
        receiving = self._mailbox.arrive(arrived)
        if receiving is not None:
            self._match(receiving, arrived)

    def _match(self, receiving: Receiving, arrived: Arrived) -> None:
        receiving.matched = arrived.source
        if not fits(receiving, arrived):
            self._mailbox.posted.append(receiving)
            sent = (arrived.nbytes, arrived.frame.dtype)
            self._state.fail(message_mismatch(self._group, arrived.source, receiving, *sent))
            return
        key = (arrived.source, arrived.frame.sequence)
        if arrived.payload is None and key in self._mailbox.receiving:
            self._mailbox.posted.append(receiving)
            again = ProtocolError(f"it announced message #{key[1]} again before it had sent it")
            self._connections.violated(arrived.source, again)
            return
        # Only now the credit returns: what waits here unasked for is what credit bounds.
        self._connections.release(arrived.source, len(arrived.payload or b""))
        if arrived.payload is not None:
            receiving.data[:] = arrived.payload
            self._end_receive(receiving)
            return
        self._mailbox.receiving[key] = receiving
        self._connections.send_control(
            arrived.source,
            Outgoing(
                Frame(
                    Kind.CTS,
                    self._group.epoch,
                    receiving.channel,
                    sequence=arrived.frame.sequence,
                    source=self._group.rank,
                ),
                NOTHING,
            ),
        )

    def route_piece(self, connection: Connection, frame: Frame) -> Sink:
        """Where a piece of a large message goes (PIECE)."""
        key = (connection.rank, frame.sequence)
        receiving = self._mailbox.receiving.get(key)
        if (
            receiving is None
            or frame.segment != receiving.num_pieces
            or receiving.offset + frame.length > len(receiving.data)
        ):
            raise ProtocolError(f"a piece of message #{frame.sequence} that is not due")

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
