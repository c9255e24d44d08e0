"""``Remote``: the caller's side of one service of one process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from potluck.background import start_thread
from potluck.engine.work import Work
from potluck.errors import (
    HandlerError,
    PotluckError,
    ServiceLost,
    ServiceTimeout,
    UnknownService,
)
from potluck.services.channel import Channel, State
from potluck.services.memory import Blocks
from potluck.system import wait_ready
from potluck.transport.bulk import BulkLink
from potluck.waiting import checked_seconds
from potluck.wire.payload import Packed, pack
from potluck.wire.services import Failure, Reply, Request

MAX_IN_FLIGHT = 16

_LONGEST_WAIT_S = 60.0
"""Of one wait of many: poll() counts milliseconds in 32 bits."""

Dial = Callable[[float], BulkLink]
"""``dial(deadline)`` makes a connection to the process of the service, ``may_use()`` says whether
one that was made before may be used: its node may be banned by now."""


class Connection:
    """One connection of a client, for one call at a time. It blocks."""

    def __init__(self, link: BulkLink, max_bytes: int, memory: Blocks) -> None:
        self._channel: Channel[Reply] = Channel(link, Reply, max_bytes, memory)
        self._link = link

    def is_intact(self) -> bool:
        """Whether the server, which has nothing to say between calls, has not hung up."""
        channel = self._channel
        try:
            # The native stream does not ask the kernel in the first look after a short read.
            looks = [channel.receive() for _ in range(2)]
        except PotluckError:
            return False
        return looks == [State.WAITING, State.WAITING] and not channel.is_receiving

    def call(self, request: Request, packed: Packed, deadline: float) -> tuple[Failure | None, Any]:
        """The failure or result of one call. TimeoutError at the deadline, LinkError if the
        connection ends; it is of no use after either."""
        channel = self._channel
        channel.put(request, packed)
        while not channel.send():
            self._wait(deadline, write=True)
        while (state := channel.receive()) is not State.COMPLETE:
            if state is State.WAITING:
                self._wait(deadline, write=False)
        value, channel.value = channel.value, None
        return channel.head.failure, value

    def close(self) -> None:
        self._channel.close()

    def _wait(self, deadline: float, *, write: bool) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        wait_ready(self._link.fileno(), write=write, timeout_s=min(left, _LONGEST_WAIT_S))


class Remote:
    """A service of another process: its methods are called as if they were here.

    Made by ``ctx.connect`` and ``NodeServices.connect``. ``remote.method(*arguments, timeout=5.0,
    **named)`` returns what the method returns there; ``remote.method.start(...)`` returns a
    [Work][potluck.Work] at once. Each call ends by its deadline. For any number of threads; calls
    of one remote that are under way at the same time have a connection each, and at most 16 run at
    once. An array that is passed must not change before its call has ended.
    """

    def __init__(
        self,
        name: str,
        where: str,
        dial: Dial,
        may_use: Callable[[], bool] = lambda: True,
        *,
        timeout_s: float,
        max_bytes: int,
        memory: Blocks,
    ) -> None:
        """``where``, in errors: ``worker 3``."""
        self._name = name
        self._where = where
        self._dial = dial
        self._may_use = may_use
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._memory = memory
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._slots = threading.BoundedSemaphore(MAX_IN_FLIGHT)
        self._started = threading.BoundedSemaphore(MAX_IN_FLIGHT)
        self._is_closed = False
        weakref.finalize(self, _close_all, self._idle)

    def __repr__(self) -> str:
        return f"<Remote {self._name!r} on {self._where}>"

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        return RemoteMethod(self, name)

    def _call(self, method: str, packed: Packed, timeout: float | None) -> Any:
        seconds = self._timeout_s if timeout is None else checked_seconds(timeout)
        deadline = time.monotonic() + seconds
        if not self._slots.acquire(timeout=seconds):
            raise ServiceTimeout(
                f"{self._named(method)} was not called within {seconds:g} s: {MAX_IN_FLIGHT} other "
                "calls of this remote were under way all the time"
            )
        try:
            return self._ask(Request(self._name, method, seconds), packed, deadline)
        finally:
            self._slots.release()

    def _start(self, method: str, packed: Packed, timeout: float | None) -> Work:
        result: list[Any] = []
        work = Work(self._named(method)).then(lambda _: result[0])

        def run() -> None:
            try:
                result.append(self._call(method, packed, timeout))
            except Exception as error:
                work.finish(error)
            else:
                work.finish()
            finally:
                self._started.release()

        self._started.acquire()
        start_thread(run, name=f"potluck-call-{self._name}.{method}", on_broken=work.finish)
        return work

    def _ask(self, request: Request, packed: Packed, deadline: float) -> Any:
        if packed.nbytes > self._max_bytes:
            raise ValueError(
                f"the arrays of the arguments take {packed.nbytes} bytes, above {self._max_bytes} "
                "(POTLUCK_MAX_CALL_BYTES)"
            )
        what = self._named(request.method)
        connection = self._connection(what, request.timeout_s, deadline)
        try:
            failure, value = connection.call(request, packed, deadline)
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise ServiceTimeout(
                    f"{what} gave no result within {request.timeout_s:g} s; it may have run, or "
                    "still run there"
                ) from None
            if isinstance(error, PotluckError):  # also bytes that are no reply
                raise ServiceLost(f"{what} was cut off, and may have run: {error}") from error
            raise
        self._keep(connection)
        if failure is None:
            return value
        if failure.is_unknown:
            raise UnknownService(f"{self._where}: {failure.text}")
        where = f" (at {failure.place})" if failure.place else ""
        raise HandlerError(
            f"{what} raised {failure.type}: {failure.text}{where}",
            type=failure.type,
            text=failure.text,
            place=failure.place,
        )

    def _connection(self, what: str, seconds: float, deadline: float) -> Connection:
        """A connection that no call uses. The request was not sent if there is none."""
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                break
            if self._may_use() and kept.is_intact():
                return kept
            kept.close()
        try:
            return Connection(self._dial(deadline), self._max_bytes, self._memory)
        except PotluckError as error:
            if time.monotonic() >= deadline:
                raise ServiceTimeout(
                    f"{what} was not called within {seconds:g} s: {error}"
                ) from error
            raise ServiceLost(f"{what} was not called: {error}") from error

    def _keep(self, connection: Connection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _named(self, method: str) -> str:
        return f"{self._name}.{method}() on {self._where}"

    def close(self) -> None:
        """Close the connections that no call uses. Idempotent."""
        with self._lock:
            self._is_closed = True
            _close_all(self._idle)


class RemoteMethod:
    """One method of a ``Remote``."""

    def __init__(self, remote: Remote, name: str) -> None:
        self._remote = remote
        self._name = name

    def __call__(self, *args: Any, timeout: float | None = None, **named: Any) -> Any:
        """Call the method there, and return its result.

        TypeError, with the place inside the arguments, for a value that a payload can't hold.
        HandlerError if the method raised, UnknownService if there is none, ServiceTimeout after
        ``timeout`` seconds (the context's ``timeout_s`` if None), ServiceLost if its worker ended.
        """
        return self._remote._call(self._name, _packed(args, named), timeout)

    def start(self, *args: Any, timeout: float | None = None, **named: Any) -> Work:
        """The same at once, as a Work. Waits while 16 calls of this remote are under way. Calls
        that run at the same time may arrive in any order."""
        packed = _packed(args, named)
        return self._remote._start(self._name, packed, timeout)


def _close_all(idle: list[Connection]) -> None:
    while idle:
        idle.pop().close()


def _packed(args: tuple[Any, ...], named: dict[str, Any]) -> Packed:
    return pack(dict(enumerate(args)) | named, "arguments")
