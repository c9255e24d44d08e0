"""What is to be rehearsed for a plan, and how much of it. Pure: all ranks decide alike."""

from __future__ import annotations

from potluck.training.planner.candidates import Candidate, candidates_for
from potluck.training.planner.choose import in_best_buckets
from potluck.training.planner.measured import Measured
from potluck.training.planner.model import times_of
from potluck.training.planner.predict import Basis, predict, whole

LONGEST_S = 1.5
"""A step, or an exchange, that the model takes for longer is rehearsed in two parts."""
MOST_ELEMENTS = 1 << 25
"""And so is a larger model: a rehearsal needs up to eight arrays of this many float32, 1 GiB."""
_SMALLER = 4
"""How many times as large the larger part is."""
_LEAST_ELEMENTS = 1024


def to_rehearse(measured: Measured) -> tuple[Candidate, ...]:
    """What is tried first: none where all ranks are on one machine, for which nothing is
    predicted."""
    return candidates_for(measured.nodes) if len(set(measured.nodes)) > 1 else ()


def in_other_buckets(measured: Measured) -> tuple[Candidate, ...]:
    """After that: candidates in buckets of another size, if the model takes them for faster. Not
    those of which only parts were rehearsed: the network bounds these, whatever the buckets."""
    found = []
    for each in to_rehearse(measured):
        if each.every is None and predict(measured, each).basis is Basis.REHEARSED:
            best = in_best_buckets(measured, each).candidate
            if best is not each:
                found.append(best)
    return tuple(found)


def parts(measured: Measured, candidate: Candidate) -> tuple[int, ...]:
    """The elements of each rehearsal of a candidate: of all that it sends at a time, or of two
    parts, from which a line leads to the whole."""
    total = whole(measured, candidate)
    longest = _within(measured, candidate, total)
    large = min(total, longest, MOST_ELEMENTS)
    return (total,) if large == total else (large // _SMALLER, large)


def _within(measured: Measured, candidate: Candidate, total: int) -> int:
    """The elements of a rehearsal that takes no longer than it should, but enough of them to be
    seen."""
    took_s = _seconds(measured, candidate, total)
    if took_s <= LONGEST_S:
        return total
    least = max(1, total // 64)
    early_s = _seconds(measured, candidate, least)
    slope = (took_s - early_s) / max(1, total - least)
    return max(round(least + (LONGEST_S - early_s) / slope), _SMALLER * _LEAST_ELEMENTS)


def _seconds(measured: Measured, candidate: Candidate, elements: int) -> float:
    """What a rehearsal of so many elements takes, by the model."""
    own_s, way_s = times_of(measured, candidate, elements)
    if not candidate.strategy.in_rounds:
        own_s += measured.part(elements).step_compute_s
    return own_s + way_s
