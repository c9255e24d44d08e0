"""Flow control of one link by credits: bounds what a rank must keep for a peer that is ahead of it.

A receiver must keep the payload of a collective that it has not begun, and of a message that it has
not asked for. So a sender starts with ``limit`` bytes of credit and pays for each frame; the
receiver returns the credit when the frame has been used, by CREDIT frames. It collects credit up to
a quarter of the limit first, so that small frames do not each cost a CREDIT. With the default
settings a full segment is a quarter by itself, and returns its credit at once.

Credits alone would deadlock: bytes of later operations can take all credit while the receiver still
waits for an earlier operation's. Hence one exception: a frame of an operation that the receiver is
known to have begun needs no credit, because its memory is the caller's own array, or, while it
waits for an earlier step, bounded by the plan (``Plans._keep_waiting``). The sender knows it from
the receiver's own frames of that operation or of a later one on the same channel; a receiver that
holds a quarter of the limit says so by BEGUN frames, because it may be about to send nothing else.

Each frame costs ``FRAME_OVERHEAD`` bytes beside its payload, so that empty frames are bounded too.
This module only counts; it sends nothing.
"""

from __future__ import annotations

from potluck.errors import ProtocolError

FRAME_OVERHEAD = 256
_MAX_CHANNELS = 1 << 16


class FlowControl:
    """The credit of both directions of one link, as one end counts it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        """Bytes sent whose credit the peer has not returned."""
        self.held_bytes = 0
        """Bytes that are held here: of early frames of calls that have not begun, and of messages
        that nothing receives yet. What waits of a call that has begun is bounded by its plan."""
        self._begun: dict[int, int] = {}
        self._unreturned = 0

    # -- sending

    def has_begun(self, channel: int, sequence: int) -> None:
        """The peer has begun this call, hence all before it on its channel too."""
        if sequence >= self._begun.get(channel, 0):
            self._begun[channel] = sequence + 1
            if len(self._begun) > _MAX_CHANNELS:
                raise ProtocolError(f"it uses more than {_MAX_CHANNELS} channels")

    def forget(self, channel: int) -> None:
        """No call of this channel is under way on this rank, and none is expected."""
        self._begun.pop(channel, None)

    def may_send(self, channel: int, sequence: int, nbytes: int) -> bool:
        """Whether a frame of a collective may be sent now."""
        return sequence < self._begun.get(channel, 0) or self.has_credit(nbytes)

    def has_credit(self, nbytes: int) -> bool:
        """Whether a payload of ``nbytes`` may be sent to a peer that may have to keep it."""
        # With nothing in flight any size may go, or a frame above the limit would wait for ever.
        return self.in_flight == 0 or self.in_flight + nbytes + FRAME_OVERHEAD <= self.limit

    def sent(self, nbytes: int) -> None:
        """A frame was sent: its credit is spent, also if it needed none."""
        self.in_flight += nbytes + FRAME_OVERHEAD

    def add_credit(self, nbytes: int) -> None:
        """The peer returns credit. ProtocolError if that is more than was spent."""
        if nbytes > self.in_flight:
            raise ProtocolError(
                f"it returned credit for {nbytes} bytes, but only {self.in_flight} were sent"
            )
        self.in_flight -= nbytes

    # -- receiving

    @property
    def is_filling(self) -> bool:
        """Whether the peer may run out of credit soon, so that it must know what has begun here."""
        return 4 * self.held_bytes >= self.limit

    def hold(self, nbytes: int) -> None:
        """A frame must be kept. ProtocolError if the peer has sent beyond its credit."""
        self.held_bytes += nbytes + FRAME_OVERHEAD
        # Twice the limit: RTS frames are sent without asking for credit (a large message must be
        # announced, or its receiver would wait for ever), and each of them is held as well.
        if self.held_bytes > 2 * self.limit:
            raise ProtocolError(
                f"it has sent {self.held_bytes} bytes for operations that this rank has not begun "
                f"(is max_early_bytes, here {self.limit}, the same on all ranks?)"
            )

    def release(self, nbytes: int) -> None:
        """A kept frame is kept no longer; ``consume`` returns its credit."""
        self.held_bytes -= nbytes + FRAME_OVERHEAD

    def consume(self, nbytes: int) -> int:
        """A frame has been used. Returns the credit to send back now, 0 while it is too little."""
        self._unreturned += nbytes + FRAME_OVERHEAD
        if 4 * self._unreturned < self.limit:
            return 0
        credit, self._unreturned = self._unreturned, 0
        return credit
