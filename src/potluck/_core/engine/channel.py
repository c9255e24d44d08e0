"""``Channel``: the calls of one communicator, in their order."""

from __future__ import annotations

from potluck._core.engine.call import Call
from potluck._core.engine.shm.channel import ChannelMemory


class Channel:
    """The number that keeps a communicator's frames apart, the sequence numbers of its calls, and
    its shared memory. Methods are called with the lock of the group's communicators held."""

    __slots__ = ("_sequence", "memory", "number")

    def __init__(self, number: int, sequence: int) -> None:
        """``sequence`` is the number of the first call."""
        self.number = number
        self.memory: ChannelMemory | None = None
        """None if the ranks are not all on one node. Else it counts the calls."""
        self._sequence = sequence

    def take_sequence(self, call: Call) -> int:
        """The sequence number of the next call, one that goes over links."""
        if self.memory is not None:
            sequence = self.memory.take_sequence()
            self.memory.note_link_call(sequence, call.fingerprint)
            return sequence
        self._sequence += 1
        return self._sequence - 1

    def leave(self) -> int:
        """This rank makes no more calls; those under way end. Returns the sequence number that the
        next call would have."""
        return self._sequence if self.memory is None else self.memory.leave()
