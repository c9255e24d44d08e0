"""``Server``: runs the calls of a process's services on a few threads, for any number of clients.

All threads wait for all connections (``poller.py``). The thread that gets the notice of a
connection goes on with it: receives, runs the method, replies. So a call passes through no queue
between threads, wakes one thread up, and a connection with half a request costs no thread. Behind
the reply one thread at a time waits busily for the next request of a quick client. A connection has
one call at a time; its next request is not read before the reply has left, so a client that stops
reading stops only itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from potluck._core.backends.service_transport import Caller
from potluck._core.background import start_thread
from potluck._core.system import wait_ready
from potluck._core.transport.bulk import BulkLink
from potluck._core.wire.payload import pack
from potluck._core.wire.services import Reply, Request
from potluck.errors import PotluckError, ProtocolError, SecurityError
from potluck.services.channel import SMALL_BYTES, Blocks, Channel, State
from potluck.services.definition import (
    Answer,
    Call,
    Service,
    failure_of,
    outcome,
    place_of,
    run,
    unknown,
)
from potluck.services.poller import BusyWait, poller

T = TypeVar("T")


class Budget(Generic[T]):
    """A limit on the bytes of the requests and replies under way, of all clients together.

    A client whose request does not fit waits in a queue, and its bytes stay in the network until
    other calls have ended. A single request always fits. Replies are counted, not refused: their
    size is known when the method has run. Small requests (``channel.SMALL_BYTES``) are not counted,
    and wait only while the replies alone reach the limit. So a client that announces a long request
    and then stops delays long requests only.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests = self._replies = 0
        self._charged: dict[T, tuple[int, int]] = {}
        """The bytes of a client's request, and of its reply."""
        self._waiting: deque[tuple[T, int]] = deque()
        self._small: deque[T] = deque()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """The bytes of requests and replies under way."""
        return self._requests + self._replies

    @property
    def is_full(self) -> bool:
        """Whether small requests must wait as well."""
        return self._replies >= self._limit

    def enter(self, client: T, nbytes: int) -> bool:
        """Charge a request; False if ``client`` must wait until ``leave`` names it."""
        with self._lock:
            if self._waiting or not self._fits(nbytes):
                self._waiting.append((client, nbytes))
                return False
            self._charge(client, nbytes, 0)
            return True

    def enter_small(self, client: T) -> bool:
        """The same for a small request, which is not charged."""
        with self._lock:
            if self.is_full:
                self._small.append(client)
                return False
            return True

    def add(self, client: T, nbytes: int) -> None:
        """Charge a reply."""
        with self._lock:
            self._charge(client, 0, nbytes)

    def leave(self, client: T) -> list[T]:
        """The call of ``client`` has ended. Returns the clients that leave the queue, charged."""
        with self._lock:
            request, reply = self._charged.pop(client, (0, 0))
            self._requests -= request
            self._replies -= reply
            self._waiting = deque(each for each in self._waiting if each[0] is not client)
            self._small = deque(each for each in self._small if each is not client)
            admitted = []
            while self._waiting and self._fits(self._waiting[0][1]):
                other, nbytes = self._waiting.popleft()
                self._charge(other, nbytes, 0)
                admitted.append(other)
            if not self.is_full:
                admitted.extend(self._small)
                self._small.clear()
            return admitted

    def _fits(self, nbytes: int) -> bool:
        return not self.used or self.used + nbytes <= self._limit

    def _charge(self, client: T, request: int, reply: int) -> None:
        before = self._charged.get(client, (0, 0))
        self._charged[client] = before[0] + request, before[1] + reply
        self._requests += request
        self._replies += reply


NUM_THREADS = 8
MAX_CLIENTS = 4096
STALL_S = 30.0
CLOSE_S = 5.0

_SWEEP_S = 1.0
_PAUSE_S = 0.1
_FLOW_S = 0.005
_STAY_S = 0.05
"""How long a thread stays with one connection whose bytes flow; then others have their turn."""
_FRESH_S = 0.001
"""The list of bans is asked when a call comes in, and if it takes longer before the reply again."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Client:
    """One connection, and the state of its present call."""

    channel: Channel[Request]
    caller: Caller
    fd: int = field(init=False)
    busy: BusyWait = field(init=False)
    is_charged: bool = False
    """Whether bytes of its call are in the budget."""
    is_replying: bool = False
    due: _Queue | None = None
    """The queue of the service whose method is to run now."""
    answer: Answer | None = None
    """The answer of a Future that has ended, to be replied now."""
    moved_at: float = field(default_factory=time.monotonic)
    replied_at: float = 0.0
    checked_at: float = 0.0
    """When the list of bans was last read."""

    def __post_init__(self) -> None:
        self.fd = self.channel.link.fileno()
        self.busy = BusyWait(self.fd)


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


@dataclass(eq=False, repr=False, kw_only=True)
class Server:
    """Serves the calls of one process's services.

    ``rank_of(worker)`` is the worker's present rank, -1 if it has none. ``max_bytes``: the
    arrays of one call, and of all calls under way together. A client that stops in the middle
    of a request or reply for ``stall_s`` is dropped. ``objects_to(node)`` is the reason to drop
    the clients of a node, or None; it is called every second, and at each call.
    """

    rank_of: Callable[[str], int]
    max_bytes: int
    memory: Blocks
    num_threads: int = NUM_THREADS
    max_clients: int = MAX_CLIENTS
    stall_s: float = STALL_S
    objects_to: Callable[[str], str | None] = lambda node: None

    def __post_init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._budget: Budget[_Client] = Budget(self.max_bytes)
        self._lock = threading.Lock()
        self._parking = threading.Lock()
        self._parked: dict[int, _Client] = {}
        """The clients that wait for bytes, by descriptor. Each other client belongs to a thread, a
        queue, the budget or a Future. A client belongs to the thread that takes it out, under
        ``_parking``."""
        self._clients: set[_Client] = set()
        self._ready: deque[_Client] = deque()
        """The clients that only wait for a thread."""
        self._waiting_busily = threading.Lock()
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
        """Withdraw the services of these ``names``. A call that has arrived is still answered.
        ValueError, and nothing is removed, for a name that is not served."""
        gone = set(names)
        with self._lock:
            if unknown_names := sorted(gone - self._queues.keys()):
                there = ", ".join(map(repr, sorted(self._queues))) or "none"
                raise ValueError(
                    f"this process serves no {unknown_names[0]!r:.80}; its services: {there}"
                )
            self._queues = {name: its for name, its in self._queues.items() if name not in gone}

    def names(self) -> list[str]:
        """The names of all services."""
        return sorted(self._queues)

    def objection(self, caller: Caller) -> str | None:
        """The reason to refuse a new connection of ``caller``; None: it is accepted."""
        if self._is_closed:
            return "this process ends"
        with self._lock:
            num, nodes = len(self._clients), [each.caller.node for each in self._clients]
        if num >= self.max_clients:
            return f"{self.max_clients} clients are connected to this process, as many as it takes"
        of_one_node = max(1, self.max_clients // 2)  # which leaves the rest to others
        if caller.node and nodes.count(caller.node) >= of_one_node:
            return f"{of_one_node} clients of this node are connected, as many as one node may have"
        return None

    def take(self, link: BulkLink, caller: Caller) -> None:
        """Serve a connection whose greeting has ended."""
        client = _Client(Channel(link, Request, self.max_bytes, self.memory), caller)
        try:
            with self._lock:
                if self._is_closed:
                    link.close()
                    return
                self._clients.add(client)
                self._start_threads()
                self._park(client)
        except Exception:
            with self._lock:
                self._clients.discard(client)
            link.close()
            raise

    def close(self) -> None:
        """End all connections, and the threads. Waits at most ``CLOSE_S`` for methods that run, and
        their replies. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            threads = list(self._threads)
        if not threads:
            return
        self._poller.wake()
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
        self._poller.close()

    # -- the threads

    def _start_threads(self) -> None:
        """With the first service or connection: most contexts have neither."""
        if not self._threads:
            self._poller = poller()
        while len(self._threads) < self.num_threads:
            name = f"potluck-service-{len(self._threads)}"
            self._threads.append(start_thread(self._run, name=name, on_broken=lambda error: None))

    def _run(self) -> None:
        while not self._is_closed:
            client = self._next()
            if client is None:
                continue
            try:
                leave_at = time.monotonic() + _STAY_S
                while self._go_on(client):
                    if time.monotonic() > leave_at:
                        self._park(client)
                        break
            except PotluckError as error:
                self._drop(client, error)
            except Exception as error:
                _log.exception("the call of %s broke", client.channel.link.peer)
                self._drop(client, error)
        self._poller.wake()  # the next thread, to end as well

    def _next(self) -> _Client | None:
        """The next client whose call can go on; None after a wait in vain."""
        try:
            return self._ready.popleft()
        except IndexError:
            fd = self._wait()
        if time.monotonic() - self._swept_at > _SWEEP_S:
            self._sweep()
        if fd is None:
            return None
        with self._parking:
            return self._parked.pop(fd, None)  # None: it was dropped meanwhile

    def _wait(self) -> int | None:
        """The descriptor of a connection that is ready. A failure of the poller (the system is out
        of memory) delays this thread, and does not end it."""
        try:
            return self._poller.wait(_SWEEP_S)
        except OSError:
            _log.exception("the connections of services can't be waited for")
            time.sleep(_PAUSE_S)
            return None

    def _share(self) -> None:
        """This thread may block: wake another one for the ready clients."""
        if self._ready:
            self._poller.wake()

    def _sweep(self) -> None:
        """Drop the connections that have stopped in the middle of a call, and those of banned
        nodes."""
        self._swept_at = now = time.monotonic()
        with self._lock:
            nodes = {each.caller.node for each in self._clients}
        reasons = {node: self._objection_to(node) for node in nodes}
        dropped = []
        with self._parking:
            for client in list(self._parked.values()):
                error = self._end_of(client, reasons.get(client.caller.node), now)
                if error is not None:
                    del self._parked[client.fd]
                    dropped.append((client, error))
        for client, error in dropped:
            self._drop(client, error)

    def _objection_to(self, node: str) -> str | None:
        """Why the clients of ``node`` must be dropped; also if the list of bans can't be read."""
        try:
            return self.objects_to(node)
        except Exception as error:
            _log.exception("can't find out whether machine %s is banned", node)
            return f"can't find out whether machine {node} is banned: {error}"

    def _end_of(self, client: _Client, objection: str | None, now: float) -> PotluckError | None:
        """Why the connection of ``client``, which waits for bytes, is to end."""
        if objection is not None:
            return SecurityError(objection)
        is_in_a_call = client.is_replying or client.channel.is_receiving
        if is_in_a_call and now - client.moved_at > self.stall_s:
            doing = "reading its reply" if client.is_replying else "sending its request"
            return ProtocolError(f"it stopped {doing} for {self.stall_s:g} s")
        return None

    def _park(self, client: _Client) -> None:
        """Return ``client`` to the poller until its connection is ready."""
        if self._is_closed:
            return client.channel.close()
        with self._parking:
            self._parked[client.fd] = client
            try:
                self._poller.watch(client.fd, write=client.is_replying)
            except Exception:
                del self._parked[client.fd]  # no notice of it comes
                raise

    def _flows(self, client: _Client, leave_at: float) -> bool:
        """Whether more bytes of a call can be moved at once. While they can, its thread stays with
        it until ``leave_at``: the way through the poller and another thread would halve the
        bandwidth."""
        if client.moved_at > leave_at:
            self._check_banned(client)
            return False
        self._share()
        return wait_ready(client.fd, write=client.is_replying, timeout_s=_FLOW_S)

    # -- one connection

    def _go_on(self, client: _Client) -> bool:
        """Advance the call of ``client`` as far as its bytes flow. Returns whether its next request
        has arrived."""
        if not client.is_replying:
            if client.due is None and client.answer is None and not self._receive(client):
                return False
            if client.due is not None:
                answer = self._answer(client, client.due)
                if isinstance(answer.result, Future):
                    self._defer(client, answer)
                    return False
            else:
                assert client.answer is not None
                answer, client.answer = client.answer, None
            self._reply(client, answer)
        return self._send(client)

    def _receive(self, client: _Client) -> bool:
        """Whether the request is complete, and its method may run or its answer is known. If not,
        ``client`` waits for bytes, the budget or its turn."""
        channel = client.channel
        leave_at = time.monotonic() + _STAY_S
        while True:
            client.moved_at = time.monotonic()
            state = channel.receive()
            if state is State.COMPLETE:
                break
            if state is State.WAITING:
                is_over = self._is_closed or not channel.is_receiving
                if is_over or not self._flows(client, leave_at):
                    self._park(client)
                    return False
            elif channel.nbytes > SMALL_BYTES:
                client.is_charged = True
                if not self._budget.enter(client, channel.memory_bytes):
                    return False
            elif self._budget.is_full and not self._budget.enter_small(client):
                return False
        client.busy.note(client.moved_at - client.replied_at)
        head = channel.head
        queue = self._queues.get(head.service)
        if queue is None or head.method not in queue.service.methods:
            channel.value = None
            client.answer = unknown(head, {n: q.service for n, q in self._queues.items()})
            return True
        client.due = queue
        return queue.enter(client)

    def _send(self, client: _Client) -> bool:
        """Send the reply. Returns whether the next request has arrived; a client sends none before
        it has the whole reply."""
        leave_at = time.monotonic() + _STAY_S
        while not client.channel.send():
            client.moved_at = time.monotonic()
            if not self._flows(client, leave_at):
                self._park(client)
                return False
        client.is_replying = False
        if client.is_charged:
            client.is_charged = False
            self._ready.extend(self._budget.leave(client))
        client.replied_at = time.monotonic()
        if self._comes_at_once(client):
            return True
        self._park(client)
        return False

    def _comes_at_once(self, client: _Client) -> bool:
        """Wait busily for the next request of a quick ``client``: one thread at a time, and only
        while no other client is ready. Returns whether the request has arrived."""
        if not client.busy.is_due or not self._waiting_busily.acquire(blocking=False):
            return False
        try:
            return client.busy.run(lambda: self._ready or self._is_closed)
        finally:
            self._waiting_busily.release()

    def _answer(self, client: _Client, queue: _Queue) -> Answer:
        """Run the method that is due."""
        client.due = None
        head, arguments = client.channel.head, client.channel.value
        client.channel.value = None
        caller = client.caller
        try:
            rank = self.rank_of(caller.worker)
            call = Call(caller.node, caller.worker, rank, head.service, head.method, head.timeout_s)
            self._share()
            self._check_banned(client)
            return run(queue.service, call, arguments)
        finally:
            after = queue.leave()
            if after is not None:
                self._ready.append(after)

    def _defer(self, client: _Client, answer: Answer) -> None:
        """Reply to ``client`` when the Future that its method returned has ended. Until then no
        thread works for it."""
        client.checked_at = 0.0

        def ended(future: Future[Any]) -> None:
            client.answer = outcome(future, answer.method)
            self._ready.append(client)
            self._poller.wake()

        answer.result.add_done_callback(ended)

    def _check_banned(self, client: _Client) -> None:
        """SecurityError if the client's node was banned since it connected."""
        client.checked_at = time.monotonic()
        if reason := self.objects_to(client.caller.node):
            raise SecurityError(reason)

    def _reply(self, client: _Client, answer: Answer) -> None:
        if time.monotonic() - client.checked_at > _FRESH_S:
            self._check_banned(client)
        try:
            packed = pack(answer.result, "result")
            if packed.nbytes > self.max_bytes:
                raise ValueError(
                    f"the arrays of the result take {packed.nbytes} bytes, above {self.max_bytes} "
                    "(POTLUCK_MAX_CALL_BYTES)"
                )
            failure = answer.failure
        except (TypeError, ValueError) as error:
            packed, failure = pack(None), failure_of(error, place_of(answer.method))
        nbytes = len(packed.header) + packed.nbytes
        if nbytes > SMALL_BYTES:
            client.is_charged = True
            self._budget.add(client, nbytes)
        client.channel.put(Reply(failure), packed)
        client.is_replying = True

    def _drop(self, client: _Client, error: Exception) -> None:
        _log.debug("dropped %s: %s", client.channel.link.peer, error)
        self._poller.forget(client.fd)
        client.channel.close()
        with self._lock:
            self._clients.discard(client)
        self._ready.extend(self._budget.leave(client))
