"""The time of a step by a strategy: from its rehearsal where there is one, else by the model. Pure.

A rehearsal of the whole model is taken as it is. Of a long step two parts of the model were
rehearsed: the line through them leads to the whole, for what both have in common (latency, what a
burst lets pass) is in neither's difference. What was not rehearsed, a group with fewer ranks or
buckets of another size, is as much longer or shorter than the rehearsal as the model says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from potluck.training.planner.candidates import BUCKET_SIZE_MB, Candidate, named
from potluck.training.planner.measured import Measured
from potluck.training.planner.model import Times, bytes_of, times_of
from potluck.training.policy import Policy

_LEAST_S = 1e-4
"""Modelled times below this are too short to scale another time by."""


class Basis(StrEnum):
    """What a prediction is made from."""

    REHEARSED = "rehearsed"
    """The strategy was tried with gradients of the model's sizes."""
    EXTENDED = "extended"
    """It was tried with two parts of the model, from which the line leads to the whole."""
    MODELLED = "modelled"
    """By the measured links and work only."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected of one strategy."""

    candidate: Candidate
    step_s: float
    efficiency: float
    """The computation's part of a step, 0 to 1."""
    bytes_per_step: float
    """That a rank sends, on average over the steps of a round."""
    basis: Basis = Basis.MODELLED


def predict(
    measured: Measured, candidate: Candidate, ranks: tuple[int, ...] | None = None
) -> Prediction:
    """The step of ``candidate`` in the measured group, or with only these ``ranks`` of it, which
    then compute the samples of the others, too. A world of one sends nothing."""
    times, basis = _times(measured, candidate)
    group = measured
    if ranks is not None and len(ranks) < measured.world_size:
        group = measured.of(ranks)
        times = _carried(times, times_of(measured, candidate), times_of(group, candidate))
        basis = Basis.MODELLED
    compute_s = group.step_compute_s
    if group.world_size == 1:
        return Prediction(candidate, compute_s, 1.0, 0.0)
    hash_s = group.num_elements * group.hash_s / Policy().hash_every
    added_s = _added_s(candidate, times, compute_s) / candidate.strategy.round_steps
    step_s = compute_s + added_s + hash_s
    sent = bytes_of(group, candidate)
    return Prediction(candidate, step_s, compute_s / step_s, sent, basis)


def whole(measured: Measured, candidate: Candidate) -> int:
    """The elements of a rehearsal that leaves nothing out."""
    return max(1, measured.num_elements // candidate.strategy.fragments)


def _added_s(candidate: Candidate, times: Times, compute_s: float) -> float:
    """What a step, or a round, is longer than its computation."""
    return times.own_s + max(0.0, times.way_s - candidate.strategy.delay * compute_s)


def _times(measured: Measured, candidate: Candidate) -> tuple[Times, Basis]:
    """What the candidate adds in the whole group."""
    mine = [each for each in measured.rehearsed if each.name == candidate.name]
    found = [each for each in mine if each.bucket_size_mb == candidate.bucket_size_mb]
    found.sort(key=lambda each: each.elements)
    total = whole(measured, candidate)
    if found and found[-1].elements >= total:
        return Times(found[-1].own_s, found[-1].way_s), Basis.REHEARSED
    if len(found) > 1:
        small, large = found[-2:]
        more = (total - large.elements) / (large.elements - small.elements)
        own_s, way_s = (
            late + more * max(0.0, late - early)
            for early, late in ((small.own_s, large.own_s), (small.way_s, large.way_s))
        )
        return Times(own_s, way_s), Basis.EXTENDED
    modelled = times_of(measured, candidate)
    if not mine or candidate.bucket_size_mb == BUCKET_SIZE_MB:
        return modelled, Basis.MODELLED
    usual = named(candidate.name)
    return _carried(_times(measured, usual)[0], times_of(measured, usual), modelled), Basis.MODELLED


def _carried(known: Times, modelled: Times, wanted: Times) -> Times:
    """``wanted``, corrected by how far the model was off where times are ``known``."""
    own_s, way_s = (
        new * have / old if old > _LEAST_S else new
        for have, old, new in zip(known, modelled, wanted, strict=True)
    )
    return Times(own_s, way_s)
