"""The samples of rounds: which are dealt, which were computed, which are owed. Pure.

An epoch is a permutation of the data set. A *span* is a range of its positions. A round is dealt
the spans that earlier rounds still owe, then the next ones. What no member of the committing group
has computed of it is owed to a later round of the same epoch, so that each sample of an epoch is
committed exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]
"""Positions from the first number up to, not including, the second."""


@dataclass(frozen=True, slots=True)
class Deal:
    """The samples of one round: ``spans`` of the permutation of ``epoch``. *Offsets* count through
    all spans, from 0 to ``size``."""

    epoch: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return total(self.spans)

    def part(self, start: int, stop: int) -> tuple[Span, ...]:
        """The spans of the offsets from ``start`` up to ``stop``."""
        found, offset = [], 0
        for first, end in self.spans:
            low = max(first, first + start - offset)
            high = min(end, first + stop - offset)
            if low < high:
                found.append((low, high))
            offset += end - first
        return tuple(found)

    def rest(self, done: Iterable[Span]) -> tuple[Span, ...]:
        """The spans without those of the offsets ``done``; ValueError if these overlap."""
        found: list[Span] = []
        at = 0
        for start, stop in sorted(span for span in done if span[0] < span[1]):
            if start < at or stop > self.size:
                raise ValueError(f"the samples {start} to {stop} of a round are reported twice")
            found += self.part(at, start)
            at = stop
        found += self.part(at, self.size)
        return tuple(found)


def total(spans: Iterable[Span]) -> int:
    """The number of positions in ``spans``."""
    return sum(stop - start for start, stop in spans)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """``spans`` in ascending order, neighbours as one."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def cut(start: int, stop: int, num_parts: int) -> Sequence[Span]:
    """Cut a range into near-equal parts, none of them empty: at most ``num_parts``."""
    size = stop - start
    num = max(1, min(num_parts, size))
    edges = [start + size * part // num for part in range(num + 1)]
    return list(pairwise(edges)) if size else []
