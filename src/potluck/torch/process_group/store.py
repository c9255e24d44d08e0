"""A torch Store over potluck's links, for worlds that were formed without a store server.

Rank 0 holds the values and serves them to the other ranks as a service (``potluck.services``). A
call for a key without a value is answered when the key is set, so that a rank does not poll; once a
second it is answered in any case and made again, so that the store forgets a rank that is gone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from potluck._core.backends.launchers import listed
from potluck._core.forks import Owner
from potluck._core.types import Group
from potluck._core.waiting import FIRST_S, Reminder, to_stderr
from potluck.errors import HandlerError, ServiceLost, ServiceTimeout, UnknownService
from potluck.services.access import Services
from potluck.services.definition import Call, service
from potluck.services.waits import SLICE_S, WaitingCalls

MAX_BYTES = 64 << 20
"""What all keys and values may take together."""

KEY_OVERHEAD = 256
"""Bytes that a key costs beside its text and its value."""

_ANSWER_S = 2.0
"""How much longer than the wait for a key a call for it may take."""

_FORGET_S = 2 * SLICE_S
"""A rank whose last call is so long ago does not wait any more."""

_TORCHS_PREFIX = "default_pg/0//"
"""torch's prefix of a script's keys in the store of the default group."""


class LinkStore(Store):
    """The Store for torch, on any rank."""

    def __init__(
        self, group: Group, services: Services, timeout_s: float, *, max_bytes: int = MAX_BYTES
    ) -> None:
        """``services`` are those of this rank of ``group``. Rank 0 serves the values, of at most
        ``max_bytes``; other ranks connect with their first call."""
        super().__init__()
        self._owner = Owner("this store")
        self._timeout_s = timeout_s
        name = f"torch-store-{group.epoch}"  # a process of an earlier group finds no service
        self._call: Callable[..., Any]
        if group.rank == 0:
            values = Values(max_bytes)
            self._call = _caller(values, Call("", group.me.worker, 0, name, "", timeout_s))
            if group.world_size > 1:
                services.serve(service(name, concurrent=True)(values))
        else:
            remote = services.remote(name, group.members[0].worker)
            self._call = lambda what, timeout_s, *arguments: getattr(remote, what)(
                *arguments, timeout=timeout_s
            )

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._await("get", [key], key, self._timeout_s)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(  # type: ignore[no-any-return]
            "compare_set", [key], key, _bytes(expected), _bytes(desired)
        )

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys, list(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._await("wait", keys, list(keys), timeout_s)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", [key], key))

    def num_keys(self) -> int:
        return int(self._ask("num_keys", []))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _ask(self, what: str, keys: list[str], *arguments: Any) -> Any:
        with _errors(what, keys, self._timeout_s):
            self._owner.check()
            return self._call(what, self._timeout_s, *arguments)

    def _await(self, what: str, keys: list[str], argument: Any, timeout_s: float) -> Any:
        """The same for a method that returns None while a key has no value."""
        deadline = time.monotonic() + timeout_s
        with _errors(what, keys, timeout_s):
            self._owner.check()
            while True:
                left = max(0.0, deadline - time.monotonic())
                value = self._call(what, left + _ANSWER_S, argument, min(left, SLICE_S))
                if value is not None:
                    return value
                if not left:
                    raise ServiceTimeout("no rank has set it")


def _caller(values: Values, me: Call) -> Callable[..., Any]:
    """Calls of ``values`` in this process, as a Remote's methods make them in others."""

    def call(what: str, timeout_s: float, *arguments: Any) -> Any:
        reply = getattr(values, what)(me, *arguments)
        return reply.result(timeout_s) if isinstance(reply, Future) else reply

    return call


@contextlib.contextmanager
def _errors(what: str, keys: list[str], timeout_s: float) -> Iterator[None]:
    """Raise the failure of a call as DistStoreError, as torch's stores do."""
    name = f"{what} of {', '.join(keys)}"
    try:
        yield
    except HandlerError as error:
        raise dist.DistStoreError(f"{name}: {error.text}") from error
    except ValueError as error:
        raise dist.DistStoreError(f"{name}: {error}") from error
    except (ServiceTimeout, ServiceLost, UnknownService) as error:
        raise dist.DistStoreError(
            f"{name} had no answer within {timeout_s:g} s: {error}"
        ) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Values:
    """The values of a store, in a bounded amount of memory: the service on rank 0.

    Methods have the names of the Store's. Of ``get`` and ``wait`` a Future is the reply while a key
    has no value, and its result None if that is so for ``wait_s``. For any number of threads.
    """

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self._limit = limit
        self._values: dict[str, bytes] = {}
        self._nbytes = 0
        self._changed = threading.Condition()
        self._calls = WaitingCalls(self._changed, self._tick, thread="potluck-store")
        self._waits = KeyWaits(self._values.__contains__)

    def set(self, call: Call, key: str, value: bytes) -> None:
        with self._changed:
            self._put(key, value)

    def add(self, call: Call, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, call: Call, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._changed:
            if self._values.get(key, b"") == expected:
                self._put(key, desired)
            return self._values.get(key, expected)

    def check(self, call: Call, keys: list[str]) -> bool:
        with self._changed:
            return self._has(keys)

    def delete_key(self, call: Call, key: str) -> bool:
        with self._changed:
            value = self._values.pop(key, None)
            if value is not None:
                self._nbytes -= _size(key, value)
            return value is not None

    def num_keys(self, call: Call) -> int:
        return len(self._values)

    def get(self, call: Call, key: str, wait_s: float) -> Any:
        return self._when_set(call, [key], wait_s, lambda: self._values[key])

    def wait(self, call: Call, keys: list[str], wait_s: float) -> Any:
        return self._when_set(call, keys, wait_s, lambda: True)

    def _when_set(
        self, call: Call, keys: list[str], wait_s: float, value: Callable[[], Any]
    ) -> Any:
        with self._changed:
            if self._has(keys):
                return value()  # a Future would pass through another thread
            self._waits.note(call.rank, keys)
            return self._calls.add(
                lambda: value() if self._has(keys) else None, lambda: None, min(wait_s, SLICE_S)
            )

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _put(self, key: str, value: bytes) -> None:
        before = _size(key, self._values[key]) if key in self._values else 0
        nbytes = self._nbytes - before + _size(key, value)
        if nbytes > self._limit:
            raise ValueError(
                f"the store is full: with this value of {len(value)} bytes its "
                f"{len(self._values)} keys would take {nbytes} bytes, of at most {self._limit}; "
                "delete keys that no rank needs any more, or send the data by a collective"
            )
        self._values[key] = value
        self._nbytes = nbytes
        self._calls.look()

    def _tick(self) -> None:
        self._waits.tick()
        self._calls.look()


def _size(key: str, value: bytes) -> int:
    if not isinstance(value, bytes):  # of another program than a LinkStore
        raise TypeError(f"a value of the store is bytes, not {type(value).__qualname__}")
    return KEY_OVERHEAD + len(key.encode()) + len(value)


@dataclass(eq=False, repr=False)
class KeyWaits:
    """Lines on stderr that name the keys for which ranks wait. ``is_set(key)``: whether the key
    has a value. Not thread-safe."""

    is_set: Callable[[str], bool]
    _: KW_ONLY
    say: Callable[[str], None] = to_stderr
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._waits: dict[tuple[int, tuple[str, ...]], tuple[float, float]] = {}
        """By rank and keys: the times of its first and last call for them."""
        self._reminder: Reminder | None = None

    def note(self, rank: int, keys: Sequence[str]) -> None:
        """``rank`` calls for ``keys``, of which one or more have no value."""
        wait, now = (rank, tuple(keys)), self.clock()
        since, _ = self._waits.get(wait, (now, now))
        self._waits[wait] = since, now
        if self._reminder is None:
            self._reminder = Reminder(self._describe, say=self.say, clock=self.clock)

    def tick(self) -> None:
        """Write a line with the waiting ranks if it is due."""
        now = self.clock()
        self._waits = {
            wait: (since, last)
            for wait, (since, last) in self._waits.items()
            if now - last < _FORGET_S and not all(map(self.is_set, wait[1]))
        }
        if not self._waits:
            self._reminder = None
        elif self._reminder is not None:
            self._reminder.tick()

    def _describe(self) -> str:
        """The keys for which ranks have waited for several seconds, in words; empty without any."""
        now = self.clock()
        by_key: dict[str, list[int]] = {}
        for (rank, keys), (since, _) in self._waits.items():
            for key in keys if now - since >= FIRST_S else ():
                if not self.is_set(key) and rank not in by_key.setdefault(key, []):
                    by_key[key].append(rank)
        if not by_key:
            return ""
        first, *more = by_key
        shown = first.removeprefix(_TORCHS_PREFIX)
        others = f" (and {len(more)} more)" if more else ""
        return (
            f"no rank has set the key {shown!r}{others} in the store, which rank "
            f"{listed(by_key[first])} asked for; has every rank reached the line that sets it?"
        )
