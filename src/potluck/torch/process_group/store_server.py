"""The store on rank 0: the values, rank 0's own requests, and a thread that serves other ranks.

Only the ranks of the group are let in, each with one link. The thread never waits for one link: it
reads and writes what a link gives and takes, and drops a link whose message is not complete after
``MESSAGE_S``. Memory is bounded: that of the values (``store_values.py``), and for each rank one
request and one answer.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections import deque

from potluck._core.background import start_thread, why
from potluck._core.engine.mesh import Switchboard, objection_to
from potluck._core.transport.listener import Admission
from potluck._core.transport.tcp import TcpLink
from potluck._core.types import Group
from potluck._core.wire.format import PREFIX_BYTES
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck.errors import LinkError, PotluckError
from potluck.torch.process_group.store_messages import (
    ANSWER,
    KIND,
    MESSAGE_S,
    REQUEST,
    Answer,
    StoreRequest,
)
from potluck.torch.process_group.store_values import MAX_BYTES, Values
from potluck.torch.process_group.store_waits import StoreWaits

_PART_BYTES = 64 << 10


class StoreServer:
    """The store on rank 0."""

    def __init__(
        self,
        group: Group,
        switchboard: Switchboard | None,
        *,
        max_bytes: int = MAX_BYTES,
        message_s: float = MESSAGE_S,
    ) -> None:
        """``switchboard`` is None in a world of one rank."""
        self._group = group
        self._message_s = message_s
        self._values = Values(max_bytes)
        self._waits = StoreWaits(self._values.has)
        self._changed = threading.Condition()
        self._linked: set[int] = set()
        self._clients: set[_Client] = set()
        self._arrived: deque[_Client] = deque()
        self._is_closed = False
        self._broken: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread = start_thread(self._serve, name="potluck-store", on_broken=self._broke)
        if switchboard is not None:
            switchboard.answer(KIND, self._admit)

    def ask(self, request: StoreRequest, deadline: float) -> Answer:
        """The answer to a request of rank 0; LinkError if there is none by ``deadline``."""
        with self._changed:
            answer = self._values.ask(request)
            if answer is None:
                self._waits.begin(0, request.keys, request.timeout_s)
                self._wake()
                try:
                    answer = self._await(request, deadline)
                finally:
                    self._waits.end(0)
            self._changed.notify_all()
        self._wake()
        return answer

    def _await(self, request: StoreRequest, deadline: float) -> Answer:
        while (answer := self._values.ask(request)) is None:
            if self._broken is not None:
                raise LinkError(
                    f"the thread that serves the other ranks broke ({why(self._broken)}): they "
                    "can't set it any more"
                ) from self._broken
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                raise LinkError("no rank has set it")
        return answer

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
        self._wake()
        self._thread.join()

    def _broke(self, error: BaseException) -> None:
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    # -- links; called on the threads of the listener

    def _admit(self, hello: Hello, node: str) -> Admission:
        group = self._group
        if hello.epoch != group.epoch:
            return Admission(
                Refusal("stale", f"this store is of epoch {group.epoch}, not {hello.epoch}")
            )
        refusal = objection_to(group, hello, node)
        if refusal is not None:
            return Admission(refusal)
        with self._changed:
            if self._is_closed or self._broken is not None:
                return Admission(Refusal("left", "rank 0 has left"))
            if hello.rank in self._linked:
                reason = f"rank {hello.rank} has a link to the store already"
                return Admission(Refusal("duplicate", reason))
            self._linked.add(hello.rank)
        return Admission(
            Welcome(rank=0),
            lambda link: self._take(hello.rank, link),
            lambda: self._withdraw(hello.rank),
        )

    def _withdraw(self, rank: int) -> None:
        with self._changed:
            self._linked.discard(rank)

    def _take(self, rank: int, link: TcpLink) -> None:
        self._arrived.append(_Client(rank, link, self._message_s))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread will wake; closed: it has ended
            self._wake_writer.send(b"\0")

    # -- the thread

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        self._wake_reader.recv(4096)
                    else:
                        key.data.is_ready = True
                while self._arrived:
                    client = self._arrived.popleft()
                    self._clients.add(client)
                    self._selector.register(client.link.fileno(), selectors.EVENT_READ, client)
                for client in list(self._clients):
                    self._attend(client)
        finally:
            for client in [*self._clients, *self._arrived]:
                client.link.close()
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    def _patience(self) -> float | None:
        """Seconds until there is something to do, if no link is ready before; None: nothing."""
        if any(client.may_receive for client in self._clients):
            return 0.0  # bytes that TLS has decrypted do not show at the descriptor
        with self._changed:
            patience = self._waits.tick()
        deadlines = [client.deadline for client in self._clients]
        times = [] if patience is None else [patience]
        if deadlines and min(deadlines) < math.inf:
            times.append(max(0.0, min(deadlines) - time.monotonic()))
        return min(times, default=None)

    def _attend(self, client: _Client) -> None:
        """Read a request of one rank, and answer it if its keys have values."""
        try:
            client.check_deadline()
            if client.may_receive and (request := client.receive()) is not None:
                client.request = request
                with self._changed:
                    self._waits.begin(client.rank, request.keys, request.timeout_s)
            if client.request is not None and not client.is_sending:
                with self._changed:
                    answer = self._values.ask(client.request)
                    if answer is not None:
                        self._waits.end(client.rank)
                    self._changed.notify_all()
                if answer is not None:
                    client.request = None
                    client.begin(ANSWER.encode(answer))
                    self._wake()  # other ranks may wait for a key that was just set
            if client.is_sending:
                client.send()
            events = selectors.EVENT_WRITE if client.is_sending else selectors.EVENT_READ
            if self._selector.get_key(client.link.fileno()).events != events:
                self._selector.modify(client.link.fileno(), events, client)
        except PotluckError:  # invalid bytes, a slow link, or a lost one
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.link.fileno())
        self._clients.remove(client)
        client.link.close()
        with self._changed:
            self._waits.end(client.rank)
            self._linked.discard(client.rank)


class _Client:
    """The link of one rank at the server: at most one request, and one answer. Never waits."""

    def __init__(self, rank: int, link: TcpLink, message_s: float) -> None:
        self.rank = rank
        self.link = link
        self.is_ready = True
        """Whether there may be bytes to receive."""
        self.request: StoreRequest | None = None
        self.deadline = math.inf
        """When the message under way, in or out, must be complete."""
        self._message_s = message_s
        self._incoming = bytearray()
        self._outgoing = memoryview(b"")

    @property
    def is_sending(self) -> bool:
        return bool(self._outgoing)

    @property
    def may_receive(self) -> bool:
        # Not while an answer is being sent: a rank that does not read must not send more.
        return self.is_ready and not self.is_sending

    def check_deadline(self) -> None:
        if time.monotonic() > self.deadline:
            raise LinkError(f"a message of rank {self.rank} took more than {self._message_s:g} s")

    def receive(self) -> StoreRequest | None:
        """The next request; None while it is not complete."""
        part = memoryview(bytearray(_PART_BYTES))
        while missing := self._missing():
            taken = self.link.recv_into(part[:missing])
            if not taken:
                self.is_ready = self.link.readable
                return None
            self._incoming += part[:taken]  # grows by what came, not by what was announced
            self._hurry()
        body, self._incoming = bytes(self._incoming[PREFIX_BYTES:]), bytearray()
        self._rest()
        return REQUEST.decode(body)

    def _missing(self) -> int:
        """Bytes of the message that have not come, as far as is known."""
        count = len(self._incoming)
        if count < PREFIX_BYTES:
            return PREFIX_BYTES - count
        return PREFIX_BYTES + REQUEST.length(bytes(self._incoming[:PREFIX_BYTES])) - count

    def begin(self, answer: bytes) -> None:
        self._outgoing = memoryview(answer)
        self._hurry()

    def send(self) -> None:
        """Send what the link takes of the answer."""
        while self._outgoing:
            taken = self.link.send(self._outgoing)
            if not taken:
                return
            self._outgoing = self._outgoing[taken:]
        self._rest()

    def _hurry(self) -> None:
        if self.deadline == math.inf:
            self.deadline = time.monotonic() + self._message_s

    def _rest(self) -> None:
        if not self._incoming and not self._outgoing:
            self.deadline = math.inf
