"""The hint book: which of the known addresses to call next. Pure; times are monotonic seconds.

Hints are cheap to forge, so the book is bounded, and an address at which a peer was reached is
never dropped for another address. Calls of an address without an answer have growing pauses, from
``_FIRST_PAUSE_S`` to ``_MAX_PAUSE_S``, but at most ``_PEER_PAUSE_S`` if a peer was reached there
lately or advertises the address again, so that the heal of a partition is noticed. At most
``_MAX_PLACES`` addresses of an advertised instance are kept. So an attacker that replays a member's
advert from many addresses displaces only other addresses of that member, and never the first one.

Addresses of adverts end: one at which no peer was reached is called for ``_FORGET_S`` after it was
last heard, one at which a peer was reached for ``_REMEMBER_S``. Adverts that are not current don't
count while a peer was reached by a current one, so replays of old adverts lead nowhere then.
Without such a peer they count, because the own clock may be the wrong one: such a machine hears no
current advert at all, calls the others, and so gets its links. Written addresses stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck._core.cluster.discovery.advert import Hint

MAX_HINTS = 256

_MAX_PLACES = 8
_FIRST_PAUSE_S = 0.25
_HEAD_START_S = 0.2
_MAX_PAUSE_S = 5.0
_PEER_PAUSE_S = 1.0
_MAX_PAST = 8
_FORGET_S = 60.0
_REMEMBER_S = 3600.0

Place = tuple[str, int]


@dataclass(slots=True)
class _Entry:
    hint: Hint
    heard: float
    due: float
    current: float = float("-inf")
    """When a current advert named it last."""
    pause_s: float = _FIRST_PAUSE_S
    failed: float = float("-inf")
    lost: float = float("-inf")
    past: tuple[str, ...] = ()
    node: str = ""
    tried: bool = False
    calling: bool = False
    is_written: bool = False
    """It does not come from an advert alone."""


class HintBook:
    """At most ``MAX_HINTS`` addresses, each with the outcome of its last call."""

    def __init__(self) -> None:
        self._entries: dict[Place, _Entry] = {}
        self._linked: set[str] = set()
        self._preferred: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def heard(self, hint: Hint, now: float) -> bool:
        """Add ``hint``, or note that it was found again. It is dropped if the book is full. False
        if it is of another time and does not count."""
        if not hint.is_current and self._has_reached_a_current(now):
            return False
        self._add(hint, now)
        return True

    def _add(self, hint: Hint, now: float) -> None:
        place = (hint.host, hint.port)
        entry = self._entries.get(place)
        if entry is not None:
            if hint.instance in entry.past:
                return  # mDNS advertises a killed agent for two more minutes
            entry.heard = now
            entry.is_written |= not hint.instance
            if hint.instance and hint.is_current:
                entry.current = now
            if hint.instance and entry.hint.instance not in ("", hint.instance):
                # Another process has taken over the address, so the old entry is not valid.
                past = (*entry.past, entry.hint.instance)[-_MAX_PAST:]
                self._entries[place] = _new(hint, now, max(now, entry.due), past)
            elif entry.node:
                entry.due = min(entry.due, max(now, entry.failed + _PEER_PAUSE_S))
            return
        if self._make_room(hint, now):
            self._entries[place] = _new(hint, now, now)

    def due(self, now: float) -> list[Hint]:
        """The addresses to call now; first those at which a peer was reached. A called address is
        not due again before ``reached`` or ``failed``."""
        ready = [entry for entry in self._to_call(now) if entry.due <= now]
        ready.sort(key=lambda entry: (not entry.node, entry.tried, entry.due))
        return [entry.hint for entry in ready]

    def calling(self, hint: Hint) -> None:
        """Note that a call of ``hint`` begins."""
        entry = self._entries.get((hint.host, hint.port))
        if entry is not None:
            entry.calling = entry.tried = True

    def reached(self, hint: Hint, node: str, now: float) -> None:
        """Note that ``node`` answered at this address and proved its identity."""
        entry = self._entries.get((hint.host, hint.port))
        if entry is not None:
            entry.calling = False
            entry.node = node
            entry.pause_s = _FIRST_PAUSE_S
            entry.due = now + _FIRST_PAUSE_S

    def failed(self, hint: Hint, now: float) -> None:
        """Note that no node of this cluster answered at this address."""
        entry = self._entries.get((hint.host, hint.port))
        if entry is not None:
            entry.calling = False
            entry.failed, entry.due = now, now + entry.pause_s
            was_lately = bool(entry.node) and now - entry.lost < _FORGET_S
            limit = _PEER_PAUSE_S if was_lately else _MAX_PAUSE_S
            entry.pause_s = min(2 * entry.pause_s, limit)

    def linked(self, node: str) -> None:
        """Note a link to ``node``, whose addresses then need no call."""
        self._linked.add(node)

    def unlinked(self, node: str, now: float) -> None:
        """Note the end of the link to ``node``: its addresses are due now, the preferred one
        first."""
        self._linked.discard(node)
        best = self._preferred.get(node)
        for place, entry in self._entries.items():
            if entry.node == node and not entry.calling:
                entry.pause_s = _FIRST_PAUSE_S
                entry.due = entry.lost = now
                if best in self._entries and place != best:
                    entry.due += _HEAD_START_S

    def prefer(self, node: str, hint: Hint) -> None:
        """Prefer this address of ``node`` after its link is lost."""
        self._preferred[node] = (hint.host, hint.port)

    def places_of(self, node: str) -> list[Hint]:
        """The addresses at which ``node`` was reached."""
        return [entry.hint for entry in self._entries.values() if entry.node == node]

    def next_due(self, now: float) -> float | None:
        """The time at which the next address is due; None without one."""
        return min((entry.due for entry in self._to_call(now)), default=None)

    def _to_call(self, now: float) -> list[_Entry]:
        """The entries that are to be called, now or later."""
        return [
            entry
            for entry in self._entries.values()
            if not entry.calling
            and (not entry.node or entry.node not in self._linked)
            and (entry.is_written or now - max(entry.heard, entry.lost) <= _kept_s(entry))
        ]

    def _has_reached_a_current(self, now: float) -> bool:
        return any(
            entry.node and now - entry.current < _FORGET_S for entry in self._entries.values()
        )

    def _make_room(self, hint: Hint, now: float) -> bool:
        siblings = [
            entry
            for entry in self._entries.values()
            if hint.instance and entry.hint.instance == hint.instance
        ]
        if len(siblings) >= _MAX_PLACES:
            # The first address is kept: a replay comes after the advert that it repeats.
            return self._drop_one(siblings[1:], now)
        if len(self._entries) >= MAX_HINTS:
            return self._drop_one(list(self._entries.values()), now)
        return True

    def _drop_one(self, among: list[_Entry], now: float) -> bool:
        """Drop the least promising entry of ``among``; False if none may be dropped."""
        spare = [
            entry
            for entry in among
            if not entry.calling
            and ((entry.tried and not entry.node) or now - entry.heard > _FORGET_S)
        ]
        if not spare:
            return False
        worst = min(spare, key=lambda entry: (bool(entry.node), entry.heard))
        del self._entries[worst.hint.host, worst.hint.port]
        return True


def _new(hint: Hint, now: float, due: float, past: tuple[str, ...] = ()) -> _Entry:
    is_advert = bool(hint.instance)
    current = now if is_advert and hint.is_current else float("-inf")
    return _Entry(hint, now, due, current, past=past, is_written=not is_advert)


def _kept_s(entry: _Entry) -> float:
    return _REMEMBER_S if entry.node else _FORGET_S
