"""A window: memory shared by two workers of one node, so payloads need not cross a socket.

Each direction of a link has ``num_slots`` slots of ``slot_bytes``. The sender copies a segment into
a free slot and sends a frame that names the slot; the receiver reads it there and returns the slot
with a credit frame. The socket orders memory accesses and carries failures, so the window itself
needs no locks. (Mapping, offering and verifying: see below.)
"""

from __future__ import annotations

from typing import Protocol


class Window(Protocol):
    num_slots: int
    slot_bytes: int

    def outgoing(self, slot: int) -> memoryview:
        """My slot ``slot``, writable, ``slot_bytes`` long."""

    def incoming(self, slot: int) -> memoryview:
        """The peer's slot ``slot``. ProtocolError if there is no such slot."""

    def close(self) -> None:
        """Unmap. Idempotent."""
