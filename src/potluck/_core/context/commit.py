"""The commit of a training step: all ranks vote and get the same outcome. Pure: votes in, outcome
out.

Every member of a group votes on every step; a step counts if all voted ok. A rank that does not get
the outcome, because a peer died during the vote, keeps the update that it would have applied and
asks the next group, which decides with ``reconcile``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of one rank on one step.

    ``state_hash`` is 0 if parameters are not compared at this step. ``next_epoch`` is the highest
    epoch that this rank knows. ``loss`` is this rank's, ``weight`` its share of the global batch.
    ``ends``: this rank was interrupted, and asks all to end the training after this step.
    """

    step: int
    ok: bool = True
    state_hash: int = 0
    next_epoch: int = 0
    loss: float = math.nan
    weight: float = 1.0
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a vote, equal on all ranks."""

    committed: bool
    next_epoch: int
    loss: float
    diverged: tuple[int, ...] = ()
    reason: str = ""
    ends: bool = False


def tally(votes: Sequence[Vote]) -> Outcome:
    """The outcome of the votes of all ranks, in rank order. Deterministic."""
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
    return Outcome(True, next_epoch, loss, ends=any(vote.ends for vote in votes))


@dataclass(frozen=True, slots=True)
class Standing:
    """The standing of a member of a new group: the steps that it has committed.

    ``committed`` is the number of steps that the member knows to be committed, -1 for a newcomer
    without state; ``history`` is the epoch of the vote on the last of them. ``pending`` is the
    epoch in which the member voted ok on the next step without an outcome, 0 if there is no such
    step. It must be set before the vote is sent.
    """

    committed: int
    history: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class Resolution:
    """The actions of the members of a new group before they go on training.

    ``committed`` and ``history`` are those of all members. ``apply``: the ranks that apply their
    pending step. ``drop``: the ranks whose pending step does not count and is run again.
    ``receivers`` get the state of ``source``, the most senior rank that is up to date (-1: no rank
    has a state).
    """

    committed: int
    history: int
    apply: tuple[int, ...]
    drop: tuple[int, ...]
    source: int
    receivers: tuple[int, ...]
    reason: str


def reconcile(standings: Sequence[Standing]) -> Resolution:
    """The resolution for members with these standings, in rank order.

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
    loss = total = 0.0
    for vote in told:  # by no sum(), which rounds otherwise from Python 3.12 on
        loss += vote.loss * vote.weight
        total += vote.weight
    return loss / total if total else math.nan


def _minority(hashes: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose hash is not the most common one (on a tie, that of the lowest rank)."""
    counts = {value: hashes.count(value) for value in hashes}
    if len(counts) == 1:
        return ()
    common = max(counts, key=lambda value: (counts[value], -hashes.index(value)))
    return tuple(rank for rank, value in enumerate(hashes) if value != common)
