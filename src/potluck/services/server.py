"""``Server``: runs the calls of a process's services on a few threads, for any number of clients.

Leader and followers: one thread, the leader, waits for all connections. When one of them has
bytes, the leader takes it out of the selector, lets another thread become the leader, and goes on
with that connection itself: receives, runs the method, replies. So a call passes through no queue
between threads, and a connection that has sent half a request costs no thread. A connection has one
call at a time; its next request is not read before the reply has left, so a client that stops
reading stops only itself.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from potluck.backends.doors import Caller
from potluck.background import start_thread
from potluck.errors import PotluckError, ProtocolError, SecurityError
from potluck.services.budget import Budget
from potluck.services.channel import Channel, State
from potluck.services.definition import Call, Service
from potluck.services.memory import Blocks
from potluck.services.running import Answer, failure_of, outcome, run, unknown
from potluck.system import wait_ready
from potluck.transport.bulk import BulkLink
from potluck.wire.payload import pack
from potluck.wire.services import Reply, Request

NUM_THREADS = 8
MAX_CLIENTS = 4096
STALL_S = 30.0
CLOSE_S = 5.0

_SWEEP_S = 1.0
_FLOW_S = 0.005
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_log = logging.getLogger(__name__)


class _Client:
    """One connection, and how far its present call is."""

    __slots__ = ("answer", "caller", "channel", "due", "is_replying", "is_waiting", "moved_at")

    def __init__(self, channel: Channel[Request], caller: Caller) -> None:
        self.channel = channel
        self.caller = caller
        self.is_replying = False
        self.is_waiting = False
        """In the selector: only the leader may touch it."""
        self.due: _Queue | None = None
        """The queue of the service whose method is to run now."""
        self.answer: Answer | None = None
        """What a Future has ended with, and is to be replied now."""
        self.moved_at = time.monotonic()


class _Queue:
    """A service, and the clients whose complete calls wait for it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._lock = threading.Lock()
        self._is_busy = False
        self._waiting: deque[_Client] = deque()

    def enter(self, client: _Client) -> bool:
        """Whether the call of ``client`` may run now; otherwise ``leave`` names it later."""
        if self.service.is_concurrent:
            return True
        with self._lock:
            if self._is_busy:
                self._waiting.append(client)
                return False
            self._is_busy = True
            return True

    def leave(self) -> _Client | None:
        """A call has ended: the client whose call may run next."""
        if self.service.is_concurrent:
            return None
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._is_busy = False
            return None


class Server:
    """The services of one process."""

    def __init__(
        self,
        *,
        rank_of: Callable[[str], int],
        max_bytes: int,
        memory: Blocks,
        num_threads: int = NUM_THREADS,
        max_clients: int = MAX_CLIENTS,
        stall_s: float = STALL_S,
        objects_to: Callable[[str], str | None] = lambda node: None,
    ) -> None:
        """``rank_of(worker)`` is the worker's present rank, -1 if it has none. ``max_bytes``: the
        arrays of one call, and of all calls under way together. A client that stops in the middle
        of a request or reply for ``stall_s`` is dropped. ``objects_to(node)`` says why the clients
        of a node must go, or None; it is asked every second, and at each call."""
        self._objects_to = objects_to
        self._rank_of = rank_of
        self._max_bytes = max_bytes
        self._memory = memory
        self._num_threads = num_threads
        self._max_clients = max_clients
        self._stall_s = stall_s
        self._queues: dict[str, _Queue] = {}
        self._budget: Budget[_Client] = Budget(max_bytes)
        self._lock = threading.Lock()
        self._leading = threading.Lock()
        self._parking = threading.Lock()
        """Held while a connection enters or leaves the selector, with its ``is_waiting``."""
        self._clients: set[_Client] = set()
        self._ready: deque[_Client] = deque()
        self._swept_at = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    # -- what the context calls

    def add(self, services: Iterable[Service]) -> None:
        """Offer ``services`` from now on. ValueError for a name that is taken."""
        new = {each.name: _Queue(each) for each in services}
        with self._lock:
            taken = sorted(new.keys() & self._queues)
            if taken:
                raise ValueError(f"this process serves {taken[0]!r} already")
            self._queues = self._queues | new
            self._start_threads()

    def remove(self, names: Iterable[str]) -> None:
        """Offer the services of these ``names`` no more. A call that runs goes on."""
        gone = set(names)
        with self._lock:
            self._queues = {name: its for name, its in self._queues.items() if name not in gone}

    def names(self) -> list[str]:
        """The names of all services."""
        return sorted(self._queues)

    def objection(self) -> str | None:
        """Why another connection is not taken now."""
        if self._is_closed:
            return "this process ends"
        if len(self._clients) >= self._max_clients:
            return f"{self._max_clients} clients are connected to this process, as many as it takes"
        return None

    def take(self, link: BulkLink, caller: Caller) -> None:
        """Serve a connection whose greeting has ended."""
        client = _Client(Channel(link, Request, self._max_bytes, self._memory), caller)
        with self._lock:
            if self._is_closed:
                link.close()
                return
            self._clients.add(client)
            self._start_threads()
            self._wait(client, _READ)

    def close(self) -> None:
        """End all connections, and the threads. A method that runs, and its reply, are waited for,
        at most ``CLOSE_S``. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            threads = list(self._threads)
        if not threads:
            return
        self._wake()
        deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    _log.warning("a method of a service still runs after %g s", CLOSE_S)
        with self._lock:
            clients, self._clients = self._clients, set()
        for client in clients:
            client.channel.close()
        self._selector.close()
        self._wakes.close()
        self._woken.close()

    # -- the threads

    def _start_threads(self) -> None:
        """With the first service or connection: most contexts have neither."""
        if not self._threads:
            self._selector = selectors.DefaultSelector()
            self._wakes, self._woken = socket.socketpair()
            for end in (self._wakes, self._woken):
                end.setblocking(False)
            self._selector.register(self._woken, _READ, None)
        while len(self._threads) < self._num_threads:
            name = f"potluck-service-{len(self._threads)}"
            self._threads.append(start_thread(self._run, name=name, on_broken=lambda error: None))

    def _run(self) -> None:
        while (client := self._next()) is not None:
            try:
                self._go_on(client)
            except PotluckError as error:
                self._drop(client, error)
            except Exception as error:
                _log.exception("the call of %s broke", client.channel.link.peer)
                self._drop(client, error)

    def _next(self) -> _Client | None:
        """The next connection to go on with; None when the server is closed. One thread at a time
        waits here."""
        with self._leading:
            while not self._is_closed:
                if self._ready:
                    return self._ready.popleft()
                for key, _ in self._selector.select(_SWEEP_S):
                    if key.data is None:
                        self._drain()
                    else:
                        self._unregister(key.data)
                        self._ready.append(key.data)
                if time.monotonic() - self._swept_at > _SWEEP_S:
                    self._sweep()
        self._wake()  # the next leader
        return None

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, and wakes; or the server is closed
            self._wakes.send(b"\0")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _sweep(self) -> None:
        """Drop the connections that have stopped in the middle of a call, and those of nodes that
        were banned. Only the leader takes connections out of the selector, so those in it are no
        other thread's."""
        self._swept_at = now = time.monotonic()
        with self._lock:
            waiting = [each for each in self._clients if each.is_waiting]
        reasons = {node: self._objects_to(node) for node in {each.caller.node for each in waiting}}
        for client in waiting:
            reason = reasons[client.caller.node]
            if reason is not None:
                self._unregister(client)
                self._drop(client, SecurityError(reason))
                continue
            is_in_a_call = client.is_replying or client.channel.is_receiving
            if is_in_a_call and now - client.moved_at > self._stall_s:
                self._unregister(client)
                doing = "reading its reply" if client.is_replying else "sending its request"
                stalled = ProtocolError(f"it stopped {doing} for {self._stall_s:g} s")
                self._drop(client, stalled)

    def _wait(self, client: _Client, event: int) -> None:
        if self._is_closed:
            return client.channel.close()
        with self._parking:  # from then on the leader has it
            self._selector.register(client.channel.link.fileno(), event, client)
            client.is_waiting = True

    def _flows(self, client: _Client, event: int) -> bool:
        """Whether the bytes of a call go on at once. While they do, its thread stays with it: the
        way through the selector and another thread would halve the bandwidth."""
        fd = client.channel.link.fileno()
        return wait_ready(fd, write=event == _WRITE, timeout_s=_FLOW_S)

    def _unregister(self, client: _Client) -> None:
        with self._parking:
            client.is_waiting = False
            self._selector.unregister(client.channel.link.fileno())

    def _resume(self, clients: Iterable[_Client]) -> None:
        for client in clients:
            self._ready.append(client)
            self._wake()

    # -- one connection

    def _go_on(self, client: _Client) -> None:
        """Go on with the call of ``client`` as far as its bytes flow."""
        channel = client.channel
        while True:
            client.moved_at = time.monotonic()
            if client.due is not None:
                answer = self._answer(client, client.due)
                if isinstance(answer.result, Future):
                    return self._defer(client, answer.result, answer.place)
                self._reply(client, answer)
            elif client.answer is not None:
                answer, client.answer = client.answer, None
                self._reply(client, answer)
            if client.is_replying:
                if not channel.send():
                    if self._flows(client, _WRITE):
                        continue
                    return self._wait(client, _WRITE)
                client.is_replying = False
                self._resume(self._budget.leave(client))
            if self._is_closed:
                return channel.close()
            state = channel.receive()
            if state is State.WAITING:
                if channel.is_receiving and self._flows(client, _READ):
                    continue
                return self._wait(client, _READ)
            if state is State.ANNOUNCED:
                if not self._budget.enter(client, channel.lengths.total):
                    return None
                continue
            head = channel.head
            queue = self._queues.get(head.service)
            if queue is None or head.method not in queue.service.methods:
                self._reply(client, unknown(head, {n: q.service for n, q in self._queues.items()}))
            else:
                client.due = queue
                if not queue.enter(client):
                    return None

    def _answer(self, client: _Client, queue: _Queue) -> Answer:
        """Run the method that is due."""
        client.due = None
        head, arguments = client.channel.head, client.channel.value
        client.channel.value = None
        caller = client.caller
        rank = self._rank_of(caller.worker)
        call = Call(caller.node, caller.worker, rank, head.service, head.method, head.timeout_s)
        try:
            self._check_welcome(client)
            return run(queue.service, call, arguments)
        finally:
            after = queue.leave()
            if after is not None:
                self._resume([after])

    def _defer(self, client: _Client, future: Future[Any], place: str) -> None:
        """Go on with ``client`` when ``future`` has ended: until then no thread has it."""

        def ended(_: Future[Any]) -> None:
            client.answer = outcome(future, place)
            self._resume([client])

        future.add_done_callback(ended)

    def _check_welcome(self, client: _Client) -> None:
        """SecurityError if the client's node was banned since it connected."""
        if reason := self._objects_to(client.caller.node):
            raise SecurityError(reason)

    def _reply(self, client: _Client, answer: Answer) -> None:
        self._check_welcome(client)
        try:
            packed = pack(answer.result, "result")
            if packed.nbytes > self._max_bytes:
                raise ValueError(
                    f"the arrays of the result take {packed.nbytes} bytes, above {self._max_bytes} "
                    "(POTLUCK_MAX_CALL_BYTES)"
                )
            failure = answer.failure
        except (TypeError, ValueError) as error:
            packed, failure = pack(None), failure_of(error, answer.place)
        self._budget.add(client, packed.nbytes)
        client.channel.put(Reply(failure), packed)
        client.is_replying = True

    def _drop(self, client: _Client, error: Exception) -> None:
        _log.debug("dropped %s: %s", client.channel.link.peer, error)
        client.channel.close()
        with self._lock:
            self._clients.discard(client)
        self._resume(self._budget.leave(client))
