"""Which chunks a fetching node asks of which member next. Pure: events in, requests out.

A node keeps ``LANES`` requests open at *every* member that has something it lacks. A limit per
receiver, the textbook's, would let all receivers wait for the one source until it is drained, while
the links between them stay empty (1.5 times the bound with two receivers). Of what a member has, a
node takes the chunk that the fewest members have or await, so the source first sends what nobody
has yet, about once each. Among equals it takes the chunks of which it is the first by rendezvous
hashing (Thaler and Ravishankar, 1998) over (place in the package, fetching node): nodes that begin
at the same time begin with different ones.

A member that is slower than ``LEAST_SHARE`` of another is asked only for what none of the faster
ones has, by one request at a time, and what was asked of it before goes to them.

What is fetched from ``OUTSIDE`` of the cluster, as from an index of packages, leaves it once: each
range of ``RANGE_BYTES`` is fetched by the one node that is the first by rendezvous hashing among
those that reach it, and by all others from there. A node that tells of no progress for
``TAKE_OVER_S`` is passed over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from potluck._core.wire.bulk import CHUNK_BYTES
from potluck.errors import ProtocolError

LANES = 2
"""Requests that are open at one member: while a chunk is verified, the next one arrives."""
PATIENCE_S = 2.0
"""A chunk that a member has not sent for so long, and for twice the time that another one took for
its last, is also asked of that one, if it has nothing else to send."""
LEAST_SHARE = 1 / 16
"""Of the rate of another member."""
REVIEW_S = 30.0
"""So long a member that was slow, and is not asked for anything, counts as slow."""
OUTSIDE = ""
"""In the place of a member's id."""
RANGE_BYTES = 16 << 20
TAKE_OVER_S = 10.0
_MAX_RUN = 1024
_NEVER = np.iinfo(np.int64).max

Mask = NDArray[np.bool_]


@dataclass(eq=False, slots=True)
class Run:
    """Consecutive chunks, together about one of full size, asked of ``member`` at ``began``."""

    first: int
    last: int
    member: str
    began: float
    is_doubled: bool = False
    num_bytes: int = 0
    """That came so far."""

    @property
    def chunks(self) -> range:
        return range(self.first, self.last + 1)


@dataclass(eq=False, slots=True)
class _Member:
    has: Mask
    awaits: Mask
    is_fetching: bool
    reaches: bool
    moved: float
    runs: list[Run] = field(default_factory=list)
    took_s: float = 0.0
    last_rate: float | None = None
    ended: float = 0.0

    def rate(self, now: float) -> float | None:
        """Bytes a second of one of its requests; None if it is not known (any more)."""
        began = max(min((run.began for run in self.runs), default=now), self.ended)
        if now - began > PATIENCE_S:
            return max(run.num_bytes for run in self.runs) / (now - began)
        return self.last_rate if self.runs or now - self.ended < REVIEW_S else None


class Swarm:
    """The state of one fetch by node ``me``: of the chunks of these ``sizes`` it ``has`` some. It
    fetches those that are ``wanted`` (None: all)."""

    def __init__(
        self, sizes: NDArray[np.int64], has: Mask, *, me: str, wanted: Mask | None = None
    ) -> None:
        self.has = has.copy()
        self.wanted = np.ones(len(sizes), bool) if wanted is None else wanted.copy()
        self.awaits = np.zeros(len(sizes), bool)
        self.known = np.ones(len(sizes), bool)
        """Chunks that can be verified; others are asked of ``OUTSIDE`` only."""
        self._sizes = sizes
        self._me = me
        ends = np.cumsum(sizes).astype(np.uint64)
        self._window = ends // np.uint64(CHUNK_BYTES)
        self._range = (ends - np.uint64(1)) // np.uint64(RANGE_BYTES)
        self._members: dict[str, _Member] = {}
        self._count = np.zeros(len(sizes), np.int64)
        self._rank = np.zeros(len(sizes), np.int64)
        self._later = np.full(len(sizes), 1 << 22, np.int64)

    @property
    def is_done(self) -> bool:
        """Whether all that is wanted is here."""
        return not bool((self.wanted & ~self.has).any())

    @property
    def members(self) -> tuple[str, ...]:
        """Those that are in."""
        return tuple(self._members)

    @property
    def num_open(self) -> int:
        """Requests that are open."""
        return sum(len(member.runs) for member in self._members.values())

    @property
    def fetching(self) -> tuple[str, ...]:
        """Members that want to hear what this node has."""
        return tuple(node for node, each in self._members.items() if each.is_fetching)

    def prefer(self, chunks: Iterable[int], turn: int = 0) -> None:
        """Fetch these, and want them, before all that were not preferred, or for a later turn."""
        index = list(chunks)
        self._later[index] = np.minimum(self._later[index], turn)
        self.wanted[index] = True

    # What members tell.

    def joined(
        self,
        node: str,
        has: Mask,
        awaits: Mask,
        *,
        is_fetching: bool,
        reaches: bool = False,
        now: float = 0.0,
    ) -> None:
        """``node`` has and awaits these chunks; ``reaches``: it gets some from ``OUTSIDE``."""
        before = self._members.get(node)
        member = _Member(has.copy(), awaits & ~has, is_fetching, reaches, now)
        if before is not None:
            self._count -= before.has.astype(np.int64) + before.awaits
            member.runs, member.took_s = before.runs, before.took_s
            member.last_rate, member.ended = before.last_rate, before.ended
        self._members[node] = member
        self._count += member.has.astype(np.int64) + member.awaits
        if before is None or before.is_fetching != is_fetching:
            self._order()

    def left(self, node: str) -> list[Run]:
        """``node`` sends nothing more; what was asked of it."""
        member = self._members.pop(node, None)
        if member is None:
            return []
        self._count -= member.has.astype(np.int64) + member.awaits
        for run in member.runs:
            self._give_up(run)
        self._order()
        return member.runs

    def heard(
        self,
        node: str,
        got: Iterable[tuple[int, int]] = (),
        awaits: Iterable[tuple[int, int]] = (),
        given_up: Iterable[tuple[int, int]] = (),
        now: float = 0.0,
    ) -> None:
        """``node`` announced changes, as disjoint ranges (first, last). ProtocolError if there are
        no such chunks."""
        member = self._members.get(node)
        if member is None:
            return
        member.moved = now
        self._count -= member.has.astype(np.int64) + member.awaits
        try:
            for mask, ranges, value in (
                (member.awaits, awaits, True),
                (member.awaits, given_up, False),
                (member.has, got, True),
            ):
                left = len(mask)  # no chunk is announced twice
                for first, last in ranges:
                    left -= last - first + 1
                    if not first <= last < len(mask) or left < 0:
                        raise ProtocolError(f"node {node[:12]} announced a chunk that is none")
                    mask[first : last + 1] = value
            member.awaits &= ~member.has
        finally:
            self._count += member.has.astype(np.int64) + member.awaits

    # What this node asks.

    def next(self, node: str, now: float) -> Run | None:
        """What to ask of ``node`` next; None if it has nothing to ask for now, or ``LANES``
        requests are open there (one, if it is slow)."""
        member, faster = self._members.get(node), self._faster(node, now)
        if member is None or len(member.runs) >= (1 if faster else LANES):
            return None
        open_ = member.has & self.wanted & ~self.has & ~self.awaits
        for other in faster:
            open_ &= ~other.has
        open_ &= self._mine(now) if node == OUTSIDE else self.known
        if not open_.any():
            return None if node == OUTSIDE or faster else self._again(node, member, now)
        cost = (self._later << 40) + (self._count << 20) + self._rank
        first = int(np.where(open_, cost, _NEVER).argmin())
        return self._ask(node, member, first, self._end(open_, first), now)

    def _faster(self, node: str, now: float) -> list[_Member]:
        """The members beside which ``node`` is slow."""
        rates = {name: each.rate(now) for name, each in self._members.items() if name != OUTSIDE}
        rate, found = rates.get(node), self._members
        if rate is None:
            return []
        return [found[name] for name, each in rates.items() if each and each * LEAST_SHARE > rate]

    def is_void(self, run: Run, now: float, *, is_full: bool = False) -> bool:
        """Whether ``run`` is no longer to be waited for: what it brings is here, or another member
        is to send it. ``is_full``: no more requests may be open at any member; then the slowest one
        makes room for a member of which nothing was asked yet."""
        index = slice(run.first, run.last + 1)
        if self.has[index].all():
            return True
        if run.member == OUTSIDE or now - run.began <= PATIENCE_S:
            return False
        others = self._faster(run.member, now)
        open_ = [each for name, other in self._members.items() if name for each in other.runs]
        if is_full and run is min(open_, key=lambda each: each.num_bytes / (now - each.began + 1)):
            idle = (each for each in self._members.values() if not each.runs)
            others += [each for each in idle if each.rate(now) is None]
        return any(other.has[index].all() for other in others)

    def _end(self, open_: Mask, first: int) -> int:
        """The last chunk of the run that begins with ``first``: no longer than a full chunk, and of
        chunks that are as rare."""
        last, total = first, int(self._sizes[first])
        alike = open_ & (self._count == self._count[first]) & (self._later == self._later[first])
        while last + 1 < len(open_) and alike[last + 1] and last + 1 - first < _MAX_RUN:
            total += int(self._sizes[last + 1])
            if total > CHUNK_BYTES:
                break
            last += 1
        return last

    def _mine(self, now: float) -> Mask:
        """What this node is to fetch from ``OUTSIDE``."""
        mine, free = _scores(self._range, self._me), np.ones(len(self.has), bool)
        began = self._members[OUTSIDE].moved  # before that all may have waited for each other
        for node, member in self._members.items():
            if node != OUTSIDE:
                free &= ~member.has
                if member.reaches and now - max(member.moved, began) < TAKE_OVER_S:
                    free &= ~member.awaits & (_scores(self._range, node) <= mine)
        return free

    def _again(self, node: str, member: _Member, now: float) -> Run | None:
        """The oldest request that another member is slow to answer."""
        slow = [
            run
            for name, other in self._members.items()
            for run in other.runs
            if name != node
            and not run.is_doubled
            and now - run.began > PATIENCE_S + 2 * member.took_s
            and bool(member.has[run.first : run.last + 1].all())
        ]
        if not slow:
            return None
        run = min(slow, key=lambda each: each.began)
        run.is_doubled = True
        again = self._ask(node, member, run.first, run.last, now)
        again.is_doubled = True
        return again

    def _ask(self, node: str, member: _Member, first: int, last: int, now: float) -> Run:
        run = Run(first, last, node, now)
        member.runs.append(run)
        self.awaits[first : last + 1] = True
        return run

    def arrived(self, run: Run, now: float, chunks: Sequence[int] | None = None) -> None:
        """``run`` has ended: these of its chunks (None: all) are here by it, and verified."""
        if (member := self._members.get(run.member)) is not None:
            member.took_s = now - run.began
            # A member answers in order: before, it sent what was asked first.
            began_s = now - max(run.began, member.ended)
            if (size := int(self._sizes[run.first : run.last + 1].sum())) >= CHUNK_BYTES // 4:
                member.last_rate, member.ended = size / max(began_s, 1e-9), now
        self.has[run.chunks if chunks is None else chunks] = True
        self.awaits[run.first : run.last + 1] = False
        self._forget(run)

    def lacks(self, chunks: Iterable[int]) -> None:
        """These chunks are not here after all."""
        self.has[list(chunks)] = False

    def failed(self, run: Run, now: float = 0.0) -> None:
        """``run`` is not waited for any more."""
        member = self._members.get(run.member)
        began_s = 0.0 if member is None else now - max(run.began, member.ended)
        if member is not None and began_s > PATIENCE_S:
            member.last_rate, member.ended = run.num_bytes / began_s, now
        self._forget(run)
        self._give_up(run)

    def _forget(self, run: Run) -> None:
        member = self._members.get(run.member)
        if member is not None and run in member.runs:
            member.runs.remove(run)

    def _give_up(self, run: Run) -> None:
        others = [
            each
            for member in self._members.values()
            for each in member.runs
            if each is not run and each.first == run.first
        ]
        for each in others:
            each.is_doubled = False
        if not others:
            self.awaits[run.first : run.last + 1] = False

    def _order(self) -> None:
        """How many fetching members come before this node, by chunk."""
        mine = _scores(self._window, self._me)
        self._rank = np.zeros(len(mine), np.int64)
        for node in self.fetching:
            self._rank += _scores(self._window, node) > mine


def _scores(places: NDArray[np.uint64], node: str) -> NDArray[np.uint64]:
    """A hash of each place and ``node`` (the finalizer of splitmix64)."""
    seed = np.frombuffer(hashlib.sha256(node.encode()).digest()[:8], np.uint64)
    with np.errstate(over="ignore"):
        mixed = (places + seed) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
