"""Link memory: memory shared by the two ends of one link on one node, so that payloads do not cross
a socket.

Each direction of a link has ``num_slots`` slots of ``slot_bytes``. The sender copies a segment into
a free slot and sends a frame that names the slot; the receiver reads it there and returns the slot
with a SLOT_FREE frame. The socket orders memory accesses and carries failures, so the memory itself
needs no locks.

The client of a connection makes the memory (``offer_link_memory``) and names it in its ``Hello``;
the server opens it through ``/proc/<pid>/fd/<fd>``, checks that it is what the offer says, maps it
(``map_link_memory``) and answers yes or no in its ``Welcome``. The memory is anonymous
(``memory.py``). Where it can't be had (another host, another container, another user, macOS) the
link works without it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import mmap
import os
import secrets
import struct

from potluck._core.forks import close_in_children
from potluck._core.transport import memory
from potluck._core.wire.greeting import LinkMemoryOffer
from potluck.errors import LinkError, ProtocolError

_log = logging.getLogger(__name__)

NUM_SLOTS = 4
SLOT_BYTES = 1 << 20
MAX_LINK_MEMORY_BYTES = 1 << 30

_MAGIC = b"potluck\x01"
_HEADER = struct.Struct("<8s32sIQ")
_HEADER_BYTES = mmap.PAGESIZE


class LinkMemory:
    """Mapped link memory: a header page, the client's slots, then the server's.

    Slots are flat byte views that ``numpy.frombuffer`` takes as they are. A view that is still held
    when the memory closes stays valid: the memory is unmapped with its last view.
    """

    def __init__(self, memory: mmap.mmap, num_slots: int, slot_bytes: int, *, client: bool) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._memory = memory
        with memoryview(memory) as whole:
            slots = [
                whole[start : start + slot_bytes]
                for start in range(_HEADER_BYTES, len(whole), slot_bytes)
            ]
        first, second = slots[:num_slots], slots[num_slots:]
        self._outgoing, self._incoming = (first, second) if client else (second, first)
        close_in_children(self)

    def outgoing(self, slot: int) -> memoryview:
        """My slot ``slot``, writable, ``slot_bytes`` long."""
        self._check(slot)
        return self._outgoing[slot]

    def incoming(self, slot: int) -> memoryview:
        """The peer's slot ``slot``. ProtocolError if there is no such slot."""
        self._check(slot)
        return self._incoming[slot]

    def _check(self, slot: int) -> None:
        if not self._outgoing:
            raise LinkError("this link's shared memory is closed")
        if not 0 <= slot < self.num_slots:
            raise ProtocolError(f"link-memory slot {slot} was named; there are {self.num_slots}")

    def close(self) -> None:
        """Unmap. Idempotent."""
        slots, self._outgoing, self._incoming = self._outgoing + self._incoming, [], []
        for view in slots:
            # BufferError: an array still has this view, and keeps its part of the memory mapped.
            with contextlib.suppress(BufferError):
                view.release()
        with contextlib.suppress(BufferError):
            self._memory.close()


class OfferedLinkMemory:
    """Link memory made here, until the peer has answered whether it mapped the memory."""

    def __init__(self, fd: int, memory: LinkMemory, offer: LinkMemoryOffer) -> None:
        self._fd = fd
        self._memory = memory
        self.offer = offer

    def settle(self, accepted: bool) -> LinkMemory | None:
        """The memory if the peer ``accepted`` it; else None, and the memory is released. Call
        exactly once."""
        os.close(self._fd)
        if accepted:
            return self._memory
        self._memory.close()
        return None


def offer_link_memory(
    num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES
) -> OfferedLinkMemory | None:
    """Make link memory to offer: ``2 * num_slots * slot_bytes`` of memory, used as it is touched.

    None where the system has no memfd or gives none (debug log).
    """
    size = _size_of(num_slots, slot_bytes)
    boot = memory.boot_id()
    if not boot:
        return None
    try:
        fd, mapped = memory.create(size)
    except OSError as error:
        _log.debug("no link memory: %s", error)
        return None
    token = secrets.token_bytes(32)
    mapped[: _HEADER.size] = _HEADER.pack(_MAGIC, token, num_slots, slot_bytes)
    shared = LinkMemory(mapped, num_slots, slot_bytes, client=True)
    return OfferedLinkMemory(
        fd, shared, LinkMemoryOffer(boot, os.getpid(), fd, token, num_slots, slot_bytes)
    )


def map_link_memory(offer: LinkMemoryOffer) -> LinkMemory | None:
    """The memory that a client offered, mapped here; None if it can't be mapped (debug log).

    The offer comes from another process and may name anything; ``memory.open_shared`` says what is
    checked.
    """
    try:
        size = _size_of(offer.num_slots, offer.slot_bytes)
        mapped = memory.open_shared(offer.boot, offer.pid, offer.fd, size)
        expected = _HEADER.pack(_MAGIC, offer.token, offer.num_slots, offer.slot_bytes)
        if not hmac.compare_digest(mapped[: _HEADER.size], expected):
            mapped.close()
            raise ValueError("its token is not the one offered")
    except (OSError, ValueError) as error:
        _log.debug("no link memory with process %d: %s", offer.pid, error)
        return None
    return LinkMemory(mapped, offer.num_slots, offer.slot_bytes, client=False)


def _size_of(num_slots: int, slot_bytes: int) -> int:
    if num_slots < 1 or slot_bytes < 1 or slot_bytes % mmap.PAGESIZE:
        raise ValueError(
            f"link memory needs slots of whole pages ({mmap.PAGESIZE} bytes), "
            f"not {num_slots} of {slot_bytes} bytes"
        )
    size = _HEADER_BYTES + 2 * num_slots * slot_bytes
    if size > MAX_LINK_MEMORY_BYTES:
        raise ValueError(
            f"link memory of {size} bytes; at most {MAX_LINK_MEMORY_BYTES} are allowed"
        )
    return size
