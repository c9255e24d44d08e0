"""The commit: all ranks agree that a training step happened. Pure: votes in, outcome out.

Every member of a group votes on every step; a step counts when all voted ok. A rank that lost the
outcome (a peer died during the vote) does not guess: it keeps what it would have applied and asks
the next group, which decides with ``reconcile``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's word on one step.

    ``state_hash`` is 0 when parameters are not compared at this step. ``next_epoch`` is the highest
    epoch this rank has heard of. ``loss`` is this rank's, ``weight`` its share of the global batch.
    """

    step: int
    ok: bool = True
    state_hash: int = 0
    next_epoch: int = 0
    loss: float = math.nan
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks conclude from the same votes."""

    committed: bool
    next_epoch: int
    loss: float
    diverged: tuple[int, ...] = ()
    reason: str = ""


def tally(votes: Sequence[Vote]) -> Outcome:
    """The outcome of one vote per rank, in rank order. Every rank gets the same from the same."""
    next_epoch = max(vote.next_epoch for vote in votes)
    loss = _weighted_loss(votes)
    steps = {vote.step for vote in votes}
    if len(steps) > 1:
        at = ", ".join(f"rank {rank} at {vote.step}" for rank, vote in enumerate(votes))
        return Outcome(False, next_epoch, loss, reason=f"ranks vote on different steps: {at}")
    diverged = _minority([vote.state_hash for vote in votes])
    if diverged:
        ranks = ", ".join(map(str, diverged))
        return Outcome(False, next_epoch, loss, diverged, f"the parameters of rank {ranks} differ")
    against = [str(rank) for rank, vote in enumerate(votes) if not vote.ok]
    if against:
        return Outcome(False, next_epoch, loss, reason=f"rank {', '.join(against)} voted no")
    return Outcome(True, next_epoch, loss)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one member of a new group stands.

    ``committed`` is the number of steps it knows to be committed, -1 for a newcomer without state;
    ``history`` is the epoch in which the last of them was voted on. ``pending`` is the epoch in
    which it voted ok on the next step without hearing the outcome, 0 if it holds no such step.
    It must be set before the vote leaves.
    """

    committed: int
    history: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the members of a new group do before they train on.

    ``committed`` and ``history`` become everyone's. ``apply``: the ranks that apply the step they
    hold. ``drop``: those whose held step does not count, to be run again. ``receivers`` get the
    state of ``source``, the most senior rank that is up to date (-1: nobody has a state).
    """

    committed: int
    history: int
    apply: tuple[int, ...]
    drop: tuple[int, ...]
    source: int
    receivers: tuple[int, ...]
    reason: str


def reconcile(standings: Sequence[Standing]) -> Resolution:
    """How members with these standings, in rank order, become equal again.

    Histories are ordered by (epoch, step); the newest one counts. A pending step of that history
    counts if any member knows that it was committed, or if every member of that history holds it:
    then no rank can know another outcome. Members that are still behind receive the state.
    """
    ranks = range(len(standings))
    holders = [rank for rank in ranks if standings[rank].committed >= 0]
    if not holders:
        return Resolution(0, 0, (), (), -1, tuple(ranks), "no member has a state yet")
    history, known = max((standings[rank].history, standings[rank].committed) for rank in holders)
    current = [
        rank
        for rank in holders
        if (standings[rank].history, standings[rank].committed) == (history, known)
    ]
    late = [
        rank
        for rank in holders
        if standings[rank].committed == known - 1 and 0 < standings[rank].pending == history
    ]
    pending = {standings[rank].pending for rank in current}
    if len(pending) == 1 and 0 not in pending and not late:
        committed, history, apply = known + 1, pending.pop(), tuple(current)
        drop: tuple[int, ...] = ()
        reason = f"every member holds step {known}: it counts"
    else:
        committed, apply = known, tuple(late)
        drop = tuple(rank for rank in current if standings[rank].pending)
        reason = f"{known} steps are committed"
        if late:
            reason += f"; rank {', '.join(map(str, late))} had not heard of the last one"
    ready = sorted({*current, *apply})
    receivers = tuple(rank for rank in ranks if rank not in ready)
    return Resolution(committed, history, apply, drop, ready[0], receivers, reason)


def _weighted_loss(votes: Sequence[Vote]) -> float:
    told = [vote for vote in votes if not math.isnan(vote.loss) and vote.weight > 0]
    total = sum(vote.weight for vote in told)
    return sum(vote.loss * vote.weight for vote in told) / total if total else math.nan


def _minority(hashes: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose hash is not the commonest one (the lowest rank's, on a tie)."""
    counts = {value: hashes.count(value) for value in hashes}
    if len(counts) == 1:
        return ()
    common = max(counts, key=lambda value: (counts[value], -hashes.index(value)))
    return tuple(rank for rank, value in enumerate(hashes) if value != common)
