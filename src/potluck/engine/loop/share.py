"""How far two ranks may run apart: flow control per link, so that nobody's memory fills up.

What arrives for an operation that its receiver has not begun (or a message nobody receives yet)
must be kept. A sender therefore has at most ``limit`` bytes on their way that it does not know to
be used; the receiver reports what it has used (USED), a quarter of the limit at a time. That alone
could deadlock: the share is full of later operations' bytes while the receiver waits for an earlier
one's. So frames of operations that the receiver is known to have begun need no share. It is known
from its own frames of that operation or a later one, or because it says so (BEGUN), which it does
once it holds a quarter of the limit. Per frame ``OVERHEAD`` bytes are counted beside the payload,
so empty frames have a bound too. Counts only; sends nothing.
"""

from __future__ import annotations

from potluck.errors import ProtocolError

OVERHEAD = 256
_MAX_CHANNELS = 1 << 16


class Share:
    """Both directions of one link, as one end sees them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ahead = 0
        """Bytes sent that the peer has not reported as used."""
        self.held = 0
        """Bytes received and kept, for operations not begun and messages not received here."""
        self._begun: dict[int, int] = {}
        self._unreported = 0

    # -- sending

    def has_begun(self, channel: int, operation: int) -> None:
        """The peer has begun this operation, so all before it on its channel too."""
        if operation >= self._begun.get(channel, 0):
            self._begun[channel] = operation + 1
            if len(self._begun) > _MAX_CHANNELS:
                raise ProtocolError(f"it uses more than {_MAX_CHANNELS} channels")

    def may_send(self, channel: int, operation: int, nbytes: int) -> bool:
        """Whether a frame of a collective may go now."""
        return operation < self._begun.get(channel, 0) or self.has_room(nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether the peer will keep that much more; anything, if it keeps nothing yet."""
        return self.ahead == 0 or self.ahead + nbytes + OVERHEAD <= self.limit

    def sent(self, nbytes: int) -> None:
        self.ahead += nbytes + OVERHEAD

    def reported(self, used: int) -> None:
        """The peer has used so much of what was sent. ProtocolError if that can't be."""
        if used > self.ahead:
            raise ProtocolError(f"it has used {used} bytes, but only {self.ahead} were sent")
        self.ahead -= used

    # -- receiving

    @property
    def is_filling(self) -> bool:
        """Whether the peer may soon have to wait, so that it must know what has begun here."""
        return 4 * self.held >= self.limit

    def hold(self, nbytes: int) -> None:
        """A frame must be kept. ProtocolError if the peer takes more than its share."""
        self.held += nbytes + OVERHEAD
        if self.held > 2 * self.limit:
            raise ProtocolError(
                f"it has sent {self.held} bytes for operations that this rank has not begun (is "
                f"max_early_bytes, here {self.limit}, the same on all ranks?)"
            )

    def release(self, nbytes: int) -> None:
        """A kept frame has found its use; ``use`` counts it."""
        self.held -= nbytes + OVERHEAD

    def use(self, nbytes: int) -> int:
        """A frame has found its use: the bytes to report now, 0 while it is too few."""
        self._unreported += nbytes + OVERHEAD
        if 4 * self._unreported < self.limit:
            return 0
        report, self._unreported = self._unreported, 0
        return report
