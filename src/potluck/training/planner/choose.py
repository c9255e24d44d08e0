"""Which strategy, and how many machines, by the predictions. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from potluck.training.planner.candidates import CANDIDATES, Candidate, candidates_for
from potluck.training.planner.measured import Measured
from potluck.training.planner.predict import Prediction, predict

ENOUGH = 0.95
"""An efficiency with which nothing more is to be gained."""
AS_FAST = 1.03
"""Steps of strategies that count as equally fast."""
SLOWED = 1.05
"""A machine is named if a step takes at least so many times as long with it."""
_MAX_RANKS = 16
"""In larger groups nobody is tried to be left out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The predictions for all ranks, the choice, and who makes the job slower."""

    predictions: tuple[Prediction, ...]
    """Empty where all ranks are on one machine: the model is one of links between machines."""
    choice: Candidate
    reason: str
    without: tuple[int, ...] = ()
    """Ranks without which a step of the choice is predicted to be faster."""
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
    choose the one that changes the least of those fast enough."""
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


def _slowing(measured: Measured, choice: Prediction) -> tuple[tuple[int, ...], float]:
    """The ranks without which the step is faster, found one after the other."""
    world = tuple(range(measured.world_size))
    left, step_s = world, choice.step_s
    while len(left) > 1 and len(world) <= _MAX_RANKS:
        tried = [tuple(rank for rank in left if rank != other) for other in left]
        times = [predict(measured, choice.candidate, ranks).step_s for ranks in tried]
        best = min(range(len(tried)), key=times.__getitem__)
        if times[best] * SLOWED > step_s:
            break
        left, step_s = tried[best], times[best]
    gone = tuple(rank for rank in world if rank not in left)
    return gone, step_s if gone else 0.0
