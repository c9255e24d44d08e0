"""Which strategy, and how many machines, by the predictions; before that, what is rehearsed. Pure:
all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from potluck.training.planner.candidates import CANDIDATES, Candidate, candidates_for
from potluck.training.planner.measured import Measured
from potluck.training.planner.model import times_of
from potluck.training.planner.predict import Basis, Prediction, predict, whole

ENOUGH = 0.95
"""An efficiency with which nothing more is to be gained."""
AS_FAST = 1.03
"""Steps of strategies that count as equally fast."""
SLOWED = 1.05
"""A machine is named if a step takes at least so many times as long with it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The predictions for all ranks, the choice, and which machines make the job slower."""

    predictions: tuple[Prediction, ...]
    """Empty where all ranks are on one machine: the model is one of links between machines."""
    choice: Candidate
    reason: str
    without: tuple[str, ...] = ()
    """Machines without which, and without all their workers, a step of the choice is predicted to
    be faster."""
    without_s: float = 0.0
    """The step without them."""
    proportional_s: float = 0.0
    """The step of the choice with shares by speed, where ranks are so unlike that it is shorter."""

    @property
    def chosen(self) -> Prediction | None:
        """The prediction of the choice."""
        return next((each for each in self.predictions if each.candidate is self.choice), None)


def make_plan(measured: Measured, candidates: tuple[Candidate, ...] | None = None) -> Plan:
    """Predict each candidate, by default all that make sense, in its best buckets or rounds, and
    choose, of the candidates that are fast enough, the one that changes the least."""
    if len(set(measured.nodes)) == 1:
        what = "all workers are on one machine, and share its memory"
        reason = "one worker sends nothing" if measured.world_size == 1 else what
        return Plan((), CANDIDATES[0], reason)
    if candidates is None:
        candidates = candidates_for(measured.nodes)
    predictions = tuple(_in_best_form(measured, each) for each in candidates)
    choice, reason = _choose(predictions)
    return Plan(
        predictions,
        choice.candidate,
        reason,
        *_slowing(measured, choice),
        proportional_s=_in_proportion_s(measured, choice),
    )


def _in_proportion_s(measured: Measured, choice: Prediction) -> float:
    """The step if ranks computed as many samples as their speed allows; 0 where that is not
    clearly shorter, or is so already."""
    other = msgspec.structs.replace(measured, shares="proportional")
    step_s = predict(other, choice.candidate).step_s
    return step_s if step_s * SLOWED < choice.step_s else 0.0


def _in_best_form(measured: Measured, candidate: Candidate) -> Prediction:
    """The prediction in the best buckets, or in the shortest rounds that are fast enough."""
    if candidate.every is None:
        return in_best_buckets(measured, candidate)
    return _choose(tuple(predict(measured, each) for each in candidate.forms))[0]


def in_best_buckets(measured: Measured, candidate: Candidate) -> Prediction:
    """The prediction of data parallelism with buckets of the usual size, or of another that is
    clearly faster."""
    usual, *others = (predict(measured, each) for each in candidate.forms)
    best = min(others, key=lambda each: each.step_s)
    return best if best.step_s * AS_FAST < usual.step_s else usual


def _choose(predictions: tuple[Prediction, ...]) -> tuple[Prediction, str]:
    for each in predictions:
        if each.efficiency >= ENOUGH:
            kept = f"computation is {each.efficiency:.0%} of a step"
            is_first = each is predictions[0]
            return each, kept + ("" if is_first else ", and less of it with all above in the table")
    fastest = min(predictions, key=lambda each: each.step_s)
    first = next(each for each in predictions if each.step_s <= fastest.step_s * AS_FAST)
    if first is fastest:
        return first, f"no other is faster; computation is {first.efficiency:.0%} of a step"
    return first, f"within {AS_FAST - 1:.0%} of the fastest, and changes less"


def _slowing(measured: Measured, choice: Prediction) -> tuple[tuple[str, ...], float]:
    """The machines without which the step is faster, and that step. They are left out one after the
    other, also where only several together make a difference."""
    left, gone = measured, list[str]()
    found, found_s = tuple[str, ...](), choice.step_s
    while len(set(left.nodes)) > 1 and _least_compute_s(left) * SLOWED <= found_s:
        tried = {
            node: predict(measured, choice.candidate, _ranks_without(measured, {*gone, node}))
            for node in _worst(left)
        }
        best = min(tried, key=lambda node: tried[node].step_s)
        gone.append(best)
        left = measured.of(_ranks_without(measured, gone))
        if tried[best].step_s * SLOWED <= found_s:
            found, found_s = tuple(gone), tried[best].step_s
    return found, found_s if found else 0.0


def _least_compute_s(group: Measured) -> float:
    """No ranks of this group compute the samples of a step in less."""
    return group.world_size / sum(1 / seconds for seconds in group.compute_s)


def _ranks_without(measured: Measured, gone: Collection[str]) -> tuple[int, ...]:
    return tuple(rank for rank, node in enumerate(measured.nodes) if node not in gone)


def _worst(group: Measured) -> Iterable[str]:
    """Candidates for removal: among machines with equally many workers, the slowest processor and
    the slowest links. Removing any other machine can't be faster, for it is dominated by one of
    these."""
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(group.nodes):
        ranks.setdefault(node, []).append(rank)
    alike: dict[int, list[str]] = {}
    for node, mine in ranks.items():
        alike.setdefault(len(mine), []).append(node)
    speeds = tuple(1 / seconds for seconds in group.compute_s)
    together = sum if group.shares == "proportional" else min
    figures: list[tuple[tuple[float, ...], Callable[[Iterator[float]], float]]] = [
        (speeds, together),
        (group.bytes_per_s, min),
        (group.crossing_bytes_per_s, min),
    ]
    return {
        min(nodes, key=lambda node: of(figure[rank] for rank in ranks[node])): None
        for nodes in alike.values()
        for figure, of in figures
    }


LONGEST_S = 1.5
"""A step or an exchange with a longer predicted time is rehearsed in two parts."""
MOST_ELEMENTS = 1 << 25
"""A larger model is also rehearsed in two parts: a rehearsal needs up to eight arrays of this many
float32, 1 GiB."""
_SMALLER = 4
"""The ratio of the two parts' sizes."""
_LEAST_ELEMENTS = 1024


def to_rehearse(measured: Measured) -> tuple[Candidate, ...]:
    """Candidates of the first pass; none where all ranks are on one machine, for which nothing is
    predicted."""
    return candidates_for(measured.nodes) if len(set(measured.nodes)) > 1 else ()


def in_other_buckets(measured: Measured) -> tuple[Candidate, ...]:
    """Candidates of the second pass: in buckets of another size, if the model predicts them to be
    faster. Not a candidate that was rehearsed in parts: the network bounds it, whatever the
    buckets."""
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
