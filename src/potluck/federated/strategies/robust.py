"""Median, TrimmedMean and Krum: aggregates that some wrong or hostile updates can't ruin.

Numbers of samples have no weight here: a hostile client could claim any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.federated.parameters import Array, Parameters, arrays_of, flat, like
from potluck.federated.strategies.averaging import FedAvg
from potluck.federated.strategies.base import Round
from potluck.federated.updates import Update


class Median(FedAvg):
    """The median of each single parameter (Yin et al. 2018, "Byzantine-robust distributed learning:
    towards optimal statistical rates", option I). Bears less than half of the updates being wrong.
    Memory: all updates at once."""

    takes_mean = False

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """The median over ``updates``."""
        medians = [np.median(stack, axis=0) for stack in _stacks(updates)]
        return like(round.parameters, medians)


class TrimmedMean(FedAvg):
    """The mean of each single parameter without the ``cut`` fraction of the smallest and of the
    largest values (Yin et al. 2018, option II). Bears less than ``cut`` of the updates being
    wrong."""

    takes_mean = False

    def __init__(self, cut: float = 0.1, fraction: float = 1.0, **options: Any) -> None:
        """``options`` are those of FedAvg."""
        if not 0 <= cut < 0.5:
            raise ValueError(f"cut is {cut!r}; it must be 0 or more and below 0.5")
        super().__init__(fraction, **options)
        self.cut = cut

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """The trimmed mean over ``updates``. Of ``n`` values ``ceil(cut * n)`` go at each end."""
        num = len(updates)
        num_cut = min(int(np.ceil(self.cut * num - 1e-9)), (num - 1) // 2)
        means = [
            np.sort(stack, axis=0)[num_cut : num - num_cut].mean(axis=0)
            for stack in _stacks(updates)
        ]
        return like(round.parameters, means)


class Krum(FedAvg):
    """The updates nearest to their neighbours (Blanchard et al. 2017, "Machine learning with
    adversaries: Byzantine tolerant gradient descent", section 4).

    Of ``n`` updates each scores the sum of its squared distances to the ``n - f - 2`` nearest
    others; the mean of the ``keep`` updates with the lowest scores is taken (1: Krum, more:
    Multi-Krum). Bears ``f`` wrong updates; a round needs ``2 * f + 3``. Cost: all pairs of updates.
    """

    takes_mean = False

    def __init__(self, f: int = 1, fraction: float = 1.0, *, keep: int = 1, **options: Any) -> None:
        """``options`` are those of FedAvg."""
        if f < 0 or keep < 1:
            raise ValueError(f"f={f!r} must be 0 or more, keep={keep!r} 1 or more")
        super().__init__(fraction, **options)
        self.f = f
        self.keep = keep
        self.min_updates = max(2 * f + 3, keep)

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """The mean of the best updates; ValueError for fewer than ``2 * f + 3``."""
        if len(updates) < self.min_updates:
            raise ValueError(
                f"Krum(f={self.f}) needs {self.min_updates} updates, not {len(updates)}"
            )
        scores = krum_scores(np.stack([flat(each.parameters) for each in updates]), self.f)
        best = sorted(np.argsort(scores, kind="stable")[: self.keep])
        stacks = _stacks([updates[number] for number in best])
        return like(round.parameters, [stack.mean(axis=0) for stack in stacks])


def krum_scores(vectors: Array, f: int) -> Array:
    """The score of each row of ``vectors``: float64, shape ``(n,)``; lower is better."""
    num = len(vectors)
    distances = np.full((num, num), np.inf)
    with np.errstate(over="ignore"):  # infinitely far is far
        for row in range(num - 1):
            # Not by |a|**2 + |b|**2 - 2ab, which cancels where both are far from 0.
            between = vectors[row + 1 :] - vectors[row]
            distances[row, row + 1 :] = np.einsum("ij,ij->i", between, between)
    distances = np.minimum(distances, distances.T)
    nearest = np.sort(distances, axis=1)[:, : num - f - 2]
    return np.asarray(nearest.sum(axis=1))


def _stacks(updates: Sequence[Update]) -> list[Array]:
    """The arrays of all updates, one on the other: first dimension the updates."""
    columns = zip(*(arrays_of(update.parameters) for update in updates), strict=True)
    return [np.stack(column) for column in columns]
