"""Where guests wait at the process that gathers a group, until it tells them what the group is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition

from potluck.errors import PotluckError
from potluck.transport.blocking import receive
from potluck.transport.listener import Admission
from potluck.transport.tcp import TcpLink
from potluck.types import Member
from potluck.wire.gathering import INSTANCE, JOINING, MAX_SEATS, Joining, Seat, checked
from potluck.wire.messages import Hello, Refusal, Welcome

_OPENS_S = 1.0
"""How long a guest may wait for the hall to open; then it asks again."""
_JOINING_S = 3.0

Objection = Callable[[Hello], Refusal | None]


@dataclass(frozen=True, slots=True)
class Guest:
    """A process that wants to be told what the group is. Its host is as seen from here."""

    seat: Seat
    joining: Joining
    link: TcpLink


class Hall:
    """Open while this process gathers a group; ``changed`` is notified of each guest."""

    def __init__(self, changed: Condition, me: str, objection: Objection) -> None:
        """``me``: this process's instance. ``objection(hello)``, called with ``changed`` held: why
        a guest may not come in."""
        self._changed = changed
        self._me = me
        self._objection = objection
        self._guests: dict[str, Guest] = {}
        self._is_open = False
        self._is_closed = False

    def admit(self, hello: Hello, node: str) -> Admission:
        """Admit or refuse a guest; waits a while for the hall to open."""
        with self._changed:
            until = time.monotonic() + _OPENS_S
            while (refusal := self._objection(hello)) is None and not self._is_open:
                left = until - time.monotonic()
                if left <= 0 or self._is_closed:
                    refusal = Refusal("not_ready", "that process does not gather a group now")
                    break
                self._changed.wait(left)
        if refusal is None and not (0 < hello.port < 65536 and INSTANCE.match(hello.worker)):
            refusal = Refusal("port", "that process listens nowhere")
        if refusal is not None:
            return Admission(refusal)
        return Admission(Welcome(), lambda link: self._take(hello, node, link))

    def open(self) -> None:
        """Guests may come in."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for news of any kind, at most so long."""
        with self._changed:
            self._changed.wait(seconds)

    def guests(self) -> dict[str, Guest]:
        """The guests that wait, by instance."""
        with self._changed:
            return dict(self._guests)

    def seat(self, instances: Iterable[str]) -> list[Guest]:
        """Close the hall: these guests, in this order. The others are sent away, to ask again."""
        with self._changed:
            self._is_open = False
            chosen = [self._guests.pop(instance) for instance in instances]
            self._send_away()
            return chosen

    def close(self) -> None:
        """Admit no more guests. Idempotent."""
        with self._changed:
            self._is_open, self._is_closed = False, True
            self._send_away()
            self._changed.notify_all()

    def _take(self, hello: Hello, node: str, link: TcpLink) -> None:
        try:
            joining = receive(link, JOINING, time.monotonic() + _JOINING_S)
            checked(joining.seats)
        except PotluckError:
            link.close()
            return
        member = Member(hello.worker, node, link.peer_host, hello.port)
        guest = Guest(Seat(hello.worker, member), joining, link)
        with self._changed:
            is_for_me = joining.host == self._me  # and not for a process that had this port before
            if not self._is_open or not is_for_me or len(self._guests) >= MAX_SEATS - 1:
                link.close()
                return
            old = self._guests.get(hello.worker)
            if old is not None:
                old.link.close()
            self._guests[hello.worker] = guest
            self._changed.notify_all()

    def _send_away(self) -> None:
        for guest in self._guests.values():
            with contextlib.suppress(OSError):
                guest.link.close()
        self._guests.clear()
