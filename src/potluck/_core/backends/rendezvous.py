"""A rendezvous: the processes of a future group wait at one of them, which then sends the group to
all.

Rank 0 of a launcher's world gathers the other ranks (``environment.py``); of processes that found
each other, one gathers the rest (``discovery_gather.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition
from typing import Generic, TypeVar

from potluck._core.transport.listener import Admission
from potluck._core.transport.tcp import TcpLink
from potluck._core.types import Member
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck.errors import PotluckError

_OPENS_S = 1.0
"""Seconds that a process waits for the rendezvous to open; after that it must connect again."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrival(Generic[T]):
    """A process that waits at this rendezvous. Its member has the host as this machine sees it."""

    member: Member
    link: TcpLink
    said: T
    """The first message of the process after WELCOME."""


class Rendezvous(Generic[T]):
    """Holds arrivals by the name in their HELLO while the rendezvous is open. Thread-safe."""

    def __init__(
        self,
        objection: Callable[[Hello], Refusal | None],
        read: Callable[[TcpLink], T],
        *,
        changed: Condition | None = None,
        capacity: int = 65535,
    ) -> None:
        """``objection(hello)`` returns the refusal of a process, or None; it is called with
        ``changed`` held, which is notified of each arrival. ``read(link)`` reads the first message
        of an admitted process; if it raises PotluckError, the link is closed."""
        self._objection = objection
        self._read = read
        self._changed = changed or Condition()
        self._capacity = capacity
        self._arrivals: dict[str, Arrival[T]] = {}
        self._coming: set[str] = set()
        self._is_open = False
        self.is_closed = False

    def knows(self, name: str) -> bool:
        """Whether a process of this name has arrived or was admitted."""
        with self._changed:
            return name in self._arrivals or name in self._coming

    def admit(self, hello: Hello, node: str) -> Admission:
        """Admit or refuse a process; waits up to ``_OPENS_S`` for the rendezvous to open."""
        name = hello.worker
        with self._changed:
            until = time.monotonic() + _OPENS_S
            while (refusal := self._objection(hello)) is None and not self._is_open:
                left = until - time.monotonic()
                if left <= 0 or self.is_closed:
                    refusal = Refusal("not_ready", "that process does not gather a group now")
                    break
                self._changed.wait(left)
            if refusal is None and not 0 < hello.port < 65536:
                refusal = Refusal("port", f"the process does not listen: {hello.port} is no port")
            if refusal is not None:
                return Admission(refusal)
            self._coming.add(name)
        return Admission(
            Welcome(rank=0), lambda link: self._take(hello, node, link), lambda: self._forget(name)
        )

    def open(self) -> None:
        """Begin to admit processes."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for any change, at most ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    def wait_for(self, count: int, seconds: float) -> None:
        """Wait until ``count`` processes have arrived, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._arrivals) >= count, seconds)

    def arrivals(self) -> dict[str, Arrival[T]]:
        """The arrivals by name."""
        with self._changed:
            return dict(self._arrivals)

    def take(self, names: Iterable[str]) -> list[Arrival[T]]:
        """Stop admitting; return the arrivals of ``names`` in that order, and close the links of
        the others."""
        with self._changed:
            self._is_open = False
            chosen = [self._arrivals.pop(name) for name in names]
            self._send_away()
            return chosen

    def close(self) -> None:
        """Stop admitting, and close the links of all arrivals. Idempotent."""
        with self._changed:
            self._is_open, self.is_closed = False, True
            self._send_away()
            self._changed.notify_all()

    def _take(self, hello: Hello, node: str, link: TcpLink) -> None:
        try:
            said = self._read(link)
        except PotluckError:
            self._forget(hello.worker)
            link.close()
            return
        member = Member(
            hello.worker,
            node,
            link.peer_host,
            hello.port,
            hello.local_rank,
            hello.engine,
            site=hello.site,
        )
        with self._changed:
            self._coming.discard(hello.worker)
            if not self._is_open or len(self._arrivals) >= self._capacity:
                link.close()
                return
            old = self._arrivals.get(hello.worker)
            if old is not None:
                old.link.close()
            self._arrivals[hello.worker] = Arrival(member, link, said)
            self._changed.notify_all()

    def _forget(self, name: str) -> None:
        """Forget a process that closed its link before it arrived; it may connect again."""
        with self._changed:
            self._coming.discard(name)

    def _send_away(self) -> None:
        for arrival in self._arrivals.values():
            with contextlib.suppress(OSError):
                arrival.link.close()
        self._arrivals.clear()
