"""Messages of unknown size: nested values from rank to rank, without pickle."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass
from threading import TIMEOUT_MAX, Lock
from typing import Any, NamedTuple, NoReturn

import numpy as np

from potluck._core import hints
from potluck._core.backends.base import NUM_ASIDE_TAGS, Communicator
from potluck._core.checks import Duration, checked_rank, checked_tag
from potluck._core.context.neighbors import LAST_NEIGHBOR_TAG, NeighborCollectives
from potluck._core.context.uneven import left_until
from potluck._core.engine.work import Together
from potluck._core.wire.payload import MAX_HEADER_BYTES, pack, unpack
from potluck.errors import OperationTimeout, PotluckError

MAX_MESSAGE_BYTES = 1 << 30
MAX_WAITING = 1024

_ENVELOPE_TAG = LAST_NEIGHBOR_TAG + 1
_FIRST_BODY_TAG = _ENVELOPE_TAG + 1
_NUM_BODY_TAGS = NUM_ASIDE_TAGS - _FIRST_BODY_TAG
assert _NUM_BODY_TAGS > 2 * MAX_WAITING, "no two messages that wait may have the same tag"


@hints.of_init({}, "it is what ctx.recv_message returns: send by ctx.send_message(payload, dst)")
@dataclass(frozen=True, slots=True)
class Message:
    """What ``recv_message`` returns: the payload, the rank that sent it, and its tag."""

    payload: Any
    source: int
    tag: int


class _Envelope(NamedTuple):
    """What travels ahead of a message, as int64."""

    tag: int
    body_tag: int
    header_bytes: int
    body_bytes: int


class _Inbox:
    """Envelopes of one group that no ``recv_message`` has asked for yet, as (source, envelope)."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.numbers = itertools.count()
        self.lock = Lock()
        self.waiting: deque[tuple[int, _Envelope]] = deque()

    def take(self, src: int, tag: int) -> tuple[int, _Envelope] | None:
        for index, (source, envelope) in enumerate(self.waiting):
            if src in (-1, source) and tag in (-1, envelope.tag):
                del self.waiting[index]
                return source, envelope
        return None


class Messages(NeighborCollectives):
    """Sending and receiving of payloads whose size only the sender knows."""

    _inbox: _Inbox | None = None

    @hints.arguments({}, same=hints.SENT)
    def send_message(
        self,
        payload: Any,
        dst: int,
        tag: int = 0,
        *,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send ``payload`` to rank ``dst``, which takes it by ``recv_message``.

        A payload is any nesting of dict, list and tuple over NumPy arrays, torch tensors, NumPy
        scalars, int, float, bool, str, bytes and None. Returns None when its arrays may be changed.
        Messages from one rank arrive in order; they never match a ``recv``. TypeError, with the
        place inside the payload (``payload["a"][3]``), for other types; ValueError for more than
        1,048,576 values or 65,536 arrays. Cost: 32 bytes, a header, and the bytes of the arrays,
        each as a message of its own without a copy.
        """
        peer = checked_rank("dst", dst, self.world_size)
        number, patience = checked_tag(tag), self._patience(timeout)
        header, buffers, nbytes = pack(payload)
        inbox, aside = self._present_inbox(), self.communicator.aside()
        parts: list[bytes | memoryview] = [header, *buffers]
        body_tag = _FIRST_BODY_TAG + next(inbox.numbers) % _NUM_BODY_TAGS
        envelope = np.array(_Envelope(number, body_tag, len(header), nbytes), np.int64)
        works = [aside.send(envelope, peer, _ENVELOPE_TAG, timeout_s=patience)]
        works += [
            aside.send(np.frombuffer(part, np.uint8), peer, body_tag, timeout_s=patience)
            for part in parts
            if len(part)
        ]
        call = f"send_message({nbytes} bytes, to rank {peer}, tag {number})"
        return self._end(Together(call, works), lambda _: None, async_op)

    @hints.arguments({}, same=hints.RECEIVED)
    def recv_message(
        self,
        src: int = -1,
        tag: int = -1,
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
        timeout: Duration | None = None,
    ) -> Message:
        """Wait for the next message from rank ``src`` with this tag; -1 takes any.

        Returns a [Message][potluck.Message]: ``payload``, ``source`` and ``tag``. Its arrays are
        new memory; tensors arrive on the CPU. Desync, which ends the group, if the arrays of the
        message take more than ``max_bytes`` together (by default 1 GiB; compared before memory is
        taken), or if more than 1,024 messages wait that no call has asked for. What is not in
        arrays takes at most 164 MiB, whatever the sender packs. If several threads
        receive, they take turns: one that has no turn by its deadline gets an OperationTimeout, and
        the group goes on. TypeError or ValueError for ``max_bytes`` that is no int of at least 0.
        """
        if not isinstance(max_bytes, int) or max_bytes < 0:
            kind = ValueError if isinstance(max_bytes, int) else TypeError
            raise kind(f"max_bytes is {max_bytes!r}; it must be an int of at least 0")
        peer = checked_rank("src", src, self.world_size)
        wanted = tag if tag == -1 else checked_tag(tag)
        inbox, aside = self._present_inbox(), self.communicator.aside()
        patience = self._patience(timeout)
        deadline = time.monotonic() + patience
        if not inbox.lock.acquire(timeout=min(patience, TIMEOUT_MAX)):
            raise OperationTimeout(
                f"recv_message had no turn within {patience:g} s: another thread of this rank "
                "waited for a message all the time",
                operation="recv_message",
            )
        try:
            found = inbox.take(peer, wanted)
            while found is None:
                words = np.zeros(len(_Envelope._fields), np.int64)
                work = aside.recv(words, peer, _ENVELOPE_TAG, timeout_s=left_until(deadline))
                self._end(work, lambda value: value, False)
                if len(inbox.waiting) == MAX_WAITING:
                    self._refuse(work.source, f"{MAX_WAITING} messages that nobody receives")
                inbox.waiting.append((work.source, _Envelope(*map(int, words))))
                found = inbox.take(peer, wanted)
        finally:
            inbox.lock.release()
        source, envelope = found
        return Message(self._body(source, envelope, max_bytes, deadline), source, envelope.tag)

    # -- inside

    def _present_inbox(self) -> _Inbox:
        if self.communicator.device is not None:
            raise ValueError(
                f"messages need links that move host memory, and this group's move tensors on "
                f"{self.communicator.device}; make a second context with backend='gloo' for them"
            )
        inbox = self._inbox
        if inbox is None or inbox.communicator is not self.communicator:
            inbox = self._inbox = _Inbox(self.communicator)
        return inbox

    def _body(self, source: int, envelope: _Envelope, max_bytes: int, deadline: float) -> Any:
        if envelope.body_bytes > max_bytes or envelope.header_bytes > MAX_HEADER_BYTES:
            self._refuse(
                source,
                f"a message of {envelope.body_bytes} bytes with tag {envelope.tag}, and this call "
                f"takes at most {max_bytes} (max_bytes)",
            )
        aside = self.communicator.aside()

        def fill(array: Any) -> None:
            left = left_until(deadline)
            work = aside.recv(array, source, envelope.body_tag, timeout_s=left)
            self._end(work, lambda value: value, False)

        header = np.empty(envelope.header_bytes, np.uint8)
        fill(header)
        try:
            value, buffers, _ = unpack(header.data, envelope.body_bytes)
        except PotluckError as error:
            self._refuse(source, f"a message that can't be read: {error}")
        for buffer in buffers:
            if len(buffer):
                fill(np.frombuffer(buffer, np.uint8))
        return value

    def _refuse(self, source: int, what: str) -> NoReturn:
        self._end_group(f"rank {source} sent rank {self.rank} {what}", "recv_message", source)
