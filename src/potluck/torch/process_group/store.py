"""A torch Store over potluck's links, for worlds that were formed without a store server.

Rank 0 holds the values. Every other rank sends requests over one link (mutual TLS). The server
answers a request when its keys have values, so a rank that waits for a key does not poll. Messages
are msgpack with a length prefix.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from potluck.background import start_thread, why
from potluck.engine.mesh import Switchboard
from potluck.errors import LinkError, PotluckError, ProtocolError
from potluck.torch.process_group.store_waits import StoreWaits
from potluck.transport.blocking import recv_exactly, send_all
from potluck.transport.handshake import connect
from potluck.transport.listener import Admission
from potluck.transport.tcp import TcpLink
from potluck.types import Group
from potluck.wire.format import PREFIX_BYTES, MessageFormat
from potluck.wire.greeting import Hello, Refusal, Welcome

KIND = "store"
_MAX_MESSAGE = 16 << 20
_MESSAGE_S = 30.0
"""Seconds for the transfer of one message, without the wait for a key."""


class StoreRequest(msgspec.Struct, frozen=True):
    """A request: ``what`` is an operation of ``Values``, ``number`` is repeated in the answer, and
    the rank waits ``timeout_s`` for it."""

    number: int
    what: str
    keys: list[str]
    values: list[bytes]
    amount: int = 0
    timeout_s: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    number: int
    value: bytes | int | bool | None = None


_REQUEST: MessageFormat[StoreRequest] = MessageFormat(
    StoreRequest, limit=_MAX_MESSAGE, name="a request to the store"
)
_ANSWER: MessageFormat[Answer] = MessageFormat(
    Answer, limit=_MAX_MESSAGE, name="an answer of the store"
)


class Values:
    """The values of a store. ``ask`` returns the answer of a request, or None while a key of it has
    no value."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def has(self, key: str) -> bool:
        return key in self._values

    def ask(self, request: StoreRequest) -> Answer | None:
        values, keys = self._values, request.keys
        match request.what:
            case "set":
                values[keys[0]] = request.values[0]
                return Answer(request.number)
            case "add":
                total = int(values.get(keys[0], b"0")) + request.amount
                values[keys[0]] = str(total).encode()
                return Answer(request.number, total)
            case "compare_set":
                expected, desired = request.values
                if values.get(keys[0], expected or None) == expected or (
                    keys[0] not in values and not expected
                ):
                    values[keys[0]] = desired
                return Answer(request.number, values.get(keys[0], expected))
            case "check":
                return Answer(request.number, all(key in values for key in keys))
            case "wait":
                return Answer(request.number) if all(key in values for key in keys) else None
            case "get":
                return Answer(request.number, values[keys[0]]) if keys[0] in values else None
            case "delete":
                return Answer(request.number, values.pop(keys[0], None) is not None)
            case "count":
                return Answer(request.number, len(values))
            case _:
                raise ProtocolError(f"a store has no operation {request.what!r}")


class StoreServer:
    """The store on rank 0: the values, rank 0's own requests, and a thread that serves other
    ranks."""

    def __init__(self, switchboard: Switchboard | None) -> None:
        self._values = Values()
        self._waits = StoreWaits(self._values.has)
        self._changed = threading.Condition()
        self._clients: set[_Client] = set()
        self._arrived: deque[_Client] = deque()
        self._is_closed = False
        self._broken: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread = start_thread(self._serve, name="potluck-store", on_broken=self._broke)
        if switchboard is not None:  # None in a world of one rank
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

    def _admit(self, hello: Hello, node: str) -> Admission:
        if self._is_closed or self._broken is not None:
            return Admission(Refusal("left", "rank 0 has left"))
        return Admission(Welcome(rank=0), lambda link: self._take(hello.rank, link))

    def _take(self, rank: int, link: TcpLink) -> None:
        self._arrived.append(_Client(rank, link))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread will wake; closed: it has ended
            self._wake_writer.send(b"\0")

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                with self._changed:
                    patience = self._waits.tick()
                for key, _ in self._selector.select(patience):
                    if key.data is None:
                        self._wake_reader.recv(4096)
                    else:
                        key.data.is_ready = True
                while self._arrived:
                    client = self._arrived.popleft()
                    self._clients.add(client)
                    client.is_ready = True
                    self._selector.register(client.link.fileno(), selectors.EVENT_READ, client)
                for client in list(self._clients):
                    self._attend(client)
        finally:
            for client in [*self._clients, *self._arrived]:
                client.link.close()
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    def _attend(self, client: _Client) -> None:
        """Read a request of one rank, and answer it if its keys have values."""
        try:
            if client.is_ready:
                client.is_ready = False
                if client.take() and client.request is not None:
                    with self._changed:
                        self._waits.begin(
                            client.rank, client.request.keys, client.request.timeout_s
                        )
            if client.request is not None:
                with self._changed:
                    answer = self._values.ask(client.request)
                    if answer is not None:
                        self._waits.end(client.rank)
                    self._changed.notify_all()
                if answer is not None:
                    client.request = None
                    send_all(client.link, _ANSWER.encode(answer), time.monotonic() + _MESSAGE_S)
                    self._wake()  # other ranks may wait for a key that was just set
        except (PotluckError, ValueError, IndexError):  # invalid bytes, or a lost link
            self._selector.unregister(client.link.fileno())
            self._clients.remove(client)
            client.link.close()
            with self._changed:
                self._waits.end(client.rank)


class _Client:
    """The link of one rank at the server, with at most one request."""

    def __init__(self, rank: int, link: TcpLink) -> None:
        self.rank = rank
        self.link = link
        self.is_ready = False
        self.request: StoreRequest | None = None

    def take(self) -> bool:
        """Read a request if one has arrived; whether it has."""
        first = bytearray(1)
        if not self.link.recv_into(memoryview(first)):
            return False
        prefix = bytes(first) + recv_exactly(
            self.link, PREFIX_BYTES - 1, time.monotonic() + _MESSAGE_S
        )
        body = recv_exactly(self.link, _REQUEST.length(prefix), time.monotonic() + _MESSAGE_S)
        self.request = _REQUEST.decode(body)
        return True


class StoreClient:
    """The store on another rank, with its link to rank 0."""

    def __init__(self, group: Group, switchboard: Switchboard, timeout_s: float) -> None:
        server = group.members[0]
        hello = Hello(
            kind=KIND,
            namespace=switchboard.credentials.namespace,
            job=group.job,
            epoch=group.epoch,
            rank=group.rank,
            to_rank=0,
            worker=group.me.worker,
        )
        self._link, _ = connect(
            server.host,
            server.port,
            hello,
            switchboard.credentials,
            deadline=time.monotonic() + timeout_s,
            max_retries=None,
        )
        self._lock = threading.Lock()

    def ask(self, request: StoreRequest, deadline: float) -> Answer:
        with self._lock:
            send_all(self._link, _REQUEST.encode(request), time.monotonic() + _MESSAGE_S)
            while True:
                length = _ANSWER.length(recv_exactly(self._link, PREFIX_BYTES, deadline))
                body = recv_exactly(self._link, length, time.monotonic() + _MESSAGE_S)
                answer = _ANSWER.decode(body)
                if answer.number == request.number:
                    return answer

    def close(self) -> None:
        self._link.close()


class LinkStore(Store):
    """The Store for torch, on any rank."""

    def __init__(self, asker: StoreServer | StoreClient, timeout_s: float) -> None:
        super().__init__()
        self._asker = asker
        self._timeout_s = timeout_s
        self._number = 0

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        return self._ask("get", [key])  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount=amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(  # type: ignore[no-any-return]
            "compare_set", [key], [_bytes(expected), _bytes(desired)]
        )

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), timeout=timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:
        return int(self._ask("count", []))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _ask(
        self, what: str, keys: list[str], values: list[bytes] | None = None, *, amount: int = 0,
        timeout: timedelta | None = None,
    ) -> Any:  # fmt: skip
        self._number += 1
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        request = StoreRequest(self._number, what, keys, values or [], amount, timeout_s)
        try:
            return self._asker.ask(request, time.monotonic() + timeout_s).value
        except LinkError as error:
            raise dist.DistStoreError(
                f"{what} of {', '.join(keys)} had no answer within {timeout_s:g} s: {error}"
            ) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
