"""``Remote``: the caller's side of one service of one process, with a ``Pool`` of connections, one
for each call under way."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from potluck._core.background import start_thread
from potluck._core.checks import Duration, checked_seconds
from potluck._core.engine.work import Work
from potluck._core.forks import Owner
from potluck._core.system import wait_readable, wait_ready
from potluck._core.transport.bulk import BulkLink
from potluck._core.wire.payload import Packed, pack
from potluck._core.wire.services import Failure, Reply, Request
from potluck.errors import (
    HandlerError,
    PotluckError,
    ServiceLost,
    ServiceTimeout,
    UnknownService,
)
from potluck.services.channel import Blocks, Channel, State
from potluck.services.poller import BusyWait

_LONGEST_WAIT_S = 60.0
"""Of one wait of many: poll() counts milliseconds in 32 bits."""


class Connection:
    """One connection of a client, for one call at a time. It blocks."""

    def __init__(self, link: BulkLink, max_bytes: int, memory: Blocks) -> None:
        self._channel: Channel[Reply] = Channel(link, Reply, max_bytes, memory)
        self._fd = link.fileno()
        self._wait_readable = wait_readable(self._fd)
        self._busy = BusyWait(self._fd)

    def is_intact(self) -> bool:
        """Whether the server has left it open. A server sends nothing between calls."""
        return not self._wait_readable(0.0)

    def call(self, request: Request, packed: Packed, deadline: float) -> tuple[Failure | None, Any]:
        """The failure or result of one call. TimeoutError at the deadline, LinkError if the
        connection ends; close the connection after either."""
        channel = self._channel
        channel.put(request, packed)
        while not channel.send():
            wait_ready(self._fd, write=True, timeout_s=_patience(deadline))
        sent_at = time.monotonic()
        if not self._busy.run():
            self._wait_readable(_patience(deadline))
            self._busy.note(time.monotonic() - sent_at)
        while (state := channel.receive()) is not State.COMPLETE:
            if state is State.WAITING:
                self._wait_readable(_patience(deadline))
        value, channel.value = channel.value, None
        return channel.head.failure, value

    def close(self) -> None:
        self._channel.close()


def _patience(deadline: float) -> float:
    """How long one wait may take; TimeoutError at the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, _LONGEST_WAIT_S)


class AllInUseError(Exception):
    """All connections of a pool were in use until the deadline."""


class Pool:
    """The connections of one remote, for any number of threads."""

    def __init__(
        self, dial: Callable[[float], Connection], may_use: Callable[[], bool], size: int
    ) -> None:
        """``dial(deadline)`` makes a connection; at most ``size`` are in use at one time.
        ``may_use()``: whether a connection made earlier may be used."""
        self._dial = dial
        self._may_use = may_use
        self._free: list[Connection | None] = [None] * size
        """Idle connections, the last used at the end, behind a None for each connection that may
        still be made. To append or pop takes no lock."""
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._is_closed = False
        weakref.finalize(self, _close_all, self._free)

    def take(self, deadline: float) -> Connection:
        """An idle or new connection, to be given back. AllInUseError at the deadline, and the
        errors of ``dial``."""
        while True:
            kept = self._pop(deadline)
            try:
                if kept is None:
                    return self._dial(deadline)
                if self._may_use() and kept.is_intact():
                    return kept
            except BaseException:
                self.discard(kept)
                raise
            self.discard(kept)

    def discard(self, connection: Connection | None) -> None:
        """Close the connection of a failed call; a new one may be made in its place."""
        if connection is not None:
            connection.close()
        self.give_back(None)

    def give_back(self, connection: Connection | None) -> None:
        """Return the connection of a call that has ended; None if it was closed."""
        self._free.insert(len(self._free) if connection else 0, connection)
        if connection is not None and self._is_closed:  # read last: ``close`` may have run
            self.close()
        if self._num_waiting:
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        """Close the connections that no call uses now, the others when their calls end.
        Idempotent."""
        self._is_closed = True
        for _ in range(_close_all(self._free)):
            self.give_back(None)

    def _pop(self, deadline: float) -> Connection | None:
        try:
            return self._free.pop()
        except IndexError:
            pass
        with self._changed:
            self._num_waiting += 1  # ``give_back`` appends before it looks at this number
            try:
                while True:
                    with contextlib.suppress(IndexError):
                        return self._free.pop()
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise AllInUseError
            finally:
                self._num_waiting -= 1
                if self._free:  # a notice may have come just as this wait ended: pass it on
                    self._changed.notify()


def _close_all(free: list[Connection | None]) -> int:
    """Close all of ``free``, and empty it; returns how many there were."""
    count = 0
    with contextlib.suppress(IndexError):
        while True:
            connection = free.pop()
            count += 1
            if connection is not None:
                connection.close()
    return count


MAX_IN_FLIGHT = 16

Dial = Callable[[float], BulkLink]
"""``dial(deadline)`` makes a connection to the process of the service."""


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
        """``where``: the process in errors, as ``worker 3``. ``may_use()``: whether a connection
        made earlier may be used; its node may be banned by now."""
        pool = Pool(
            lambda deadline: Connection(dial(deadline), max_bytes, memory), may_use, MAX_IN_FLIGHT
        )
        self._callee = _Callee(name, where, pool, timeout_s, max_bytes)

    def __repr__(self) -> str:
        return f"<Remote {self._callee.name!r} on {self._callee.where}>"

    def __call__(self, *args: object, **named: object) -> NoReturn:
        """TypeError: calls name a method."""
        raise TypeError(
            f"{self!r} is no function: name a method, as in remote.add(...). A function that is a "
            "service has one method, with the function's name"
        )

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        method = RemoteMethod(self._callee, name)
        self.__dict__[name] = method  # found at once from now on
        return method

    def close(self) -> None:
        """Close the connections that no call uses. Idempotent; nothing in a forked child."""
        if self._callee.owner.is_here:
            self._callee.pool.close()


class Remotes:
    """Makes the remotes of a process, and closes their connections at its end."""

    def __init__(self, *, timeout_s: float, max_bytes: int, memory: Blocks) -> None:
        self._options: dict[str, Any] = {
            "timeout_s": timeout_s,
            "max_bytes": max_bytes,
            "memory": memory,
        }
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()

    def make(self, name: str, where: str, dial: Dial, may_use: Callable[[], bool]) -> Remote:
        """See ``Remote``."""
        remote = Remote(name, where, dial, may_use, **self._options)
        self._pools.add(remote._callee.pool)  # which its methods keep as well
        return remote

    def close(self) -> None:
        """Close the connections that no call uses. Idempotent."""
        for pool in list(self._pools):
            pool.close()


class _Callee:
    """The service that a ``Remote`` calls."""

    def __init__(self, name: str, where: str, pool: Pool, timeout_s: float, max_bytes: int) -> None:
        self.name = name
        self.where = where
        self.pool = pool
        self.owner = Owner(f"this Remote of {name!r}")
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._started = threading.BoundedSemaphore(MAX_IN_FLIGHT)

    def call(self, method: str, packed: Packed, timeout: Duration | None) -> Any:
        self.owner.check()
        seconds = self._timeout_s if timeout is None else checked_seconds(timeout)
        deadline = time.monotonic() + seconds
        if packed.nbytes > self._max_bytes:
            raise ValueError(
                f"the arrays of the arguments take {packed.nbytes} bytes, above {self._max_bytes} "
                "(POTLUCK_MAX_CALL_BYTES)"
            )
        connection = self._connection(method, seconds, deadline)
        try:
            failure, value = connection.call(Request(self.name, method, seconds), packed, deadline)
        except BaseException as error:
            self.pool.discard(connection)
            what = self._named(method)
            if isinstance(error, TimeoutError):
                raise ServiceTimeout(
                    f"{what} gave no result within {seconds:g} s; it may have run, or still run "
                    "there"
                ) from None
            if isinstance(error, PotluckError):  # also bytes that are no reply
                raise ServiceLost(f"{what} was cut off, and may have run: {error}") from error
            raise
        self.pool.give_back(connection)
        if failure is not None:
            self._raise(method, failure)
        return value

    def start(self, method: str, packed: Packed, timeout: Duration | None) -> Work:
        self.owner.check()
        result: list[Any] = []
        work = Work(self._named(method)).then(lambda _: result[0])

        def run() -> None:
            try:
                result.append(self.call(method, packed, timeout))
            except Exception as error:
                work.finish(error)
            else:
                work.finish()
            finally:
                self._started.release()

        self._started.acquire()
        start_thread(run, name=f"potluck-call-{self.name}.{method}", on_broken=work.finish)
        return work

    def _connection(self, method: str, seconds: float, deadline: float) -> Connection:
        """A connection for one call. An error means that the request was not sent."""
        try:
            return self.pool.take(deadline)
        except AllInUseError:
            raise ServiceTimeout(
                f"{self._named(method)} was not called within {seconds:g} s: {MAX_IN_FLIGHT} other "
                "calls of this remote were under way all the time"
            ) from None
        except PotluckError as error:
            what = self._named(method)
            if time.monotonic() >= deadline:
                raise ServiceTimeout(
                    f"{what} was not called within {seconds:g} s: {error}"
                ) from error
            raise ServiceLost(f"{what} was not called: {error}") from error

    def _raise(self, method: str, failure: Failure) -> NoReturn:
        if failure.is_unknown:
            raise UnknownService(f"{self.where}: {failure.text}")
        where = f" (at {failure.place})" if failure.place else ""
        raise HandlerError(
            f"{self._named(method)} raised {failure.type}: {failure.text}{where}",
            type=failure.type,
            text=failure.text,
            place=failure.place,
        )

    def _named(self, method: str) -> str:
        return f"{self.name}.{method}() on {self.where}"


class RemoteMethod:
    """One method of a ``Remote``."""

    def __init__(self, callee: _Callee, name: str) -> None:
        self._callee = callee
        self._name = name

    def __call__(self, *args: Any, timeout: Duration | None = None, **named: Any) -> Any:
        """Call the method there, and return its result.

        TypeError, with the place inside the arguments, for a value that a payload can't hold.
        HandlerError if the method raised, UnknownService if there is none, ServiceTimeout after
        ``timeout`` seconds (the context's ``timeout_s`` if None), ServiceLost if its worker ended.
        """
        return self._callee.call(self._name, _packed(args, named), timeout)

    def start(self, *args: Any, timeout: Duration | None = None, **named: Any) -> Work:
        """The same at once, as a Work. Waits while 16 calls of this remote are under way. Calls
        that run at the same time may arrive in any order."""
        return self._callee.start(self._name, _packed(args, named), timeout)


def _packed(args: tuple[Any, ...], named: dict[str, Any]) -> Packed:
    return pack(dict(enumerate(args)) | named, "arguments")
