"""Bags: the samples of one tree, drawn from those of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.estimators.shards import Array, blocks

_DRAWS = 1 << 20


@dataclass(frozen=True)
class Bag:
    """This rank's samples of one tree: their rows, ascending, and how often each was drawn."""

    rows: Array
    times: Array


@dataclass(frozen=True)
class Urn:
    """What a rank draws from: all ranks' samples in rank order, each as often as its weight says.

    ``weights`` are this rank's, integers in float64; None stands for ones, of ``own`` samples.
    ``start`` is the weight of the ranks before this one, ``total`` that of all.
    """

    own: int
    start: int
    total: int
    weights: Array | None = None

    def everything(self) -> Bag:
        """The bag of a tree without bootstrap: each sample with a weight, once."""
        is_in = np.ones(self.own, bool) if self.weights is None else self.weights > 0
        rows = np.flatnonzero(is_in)
        return Bag(rows, np.ones(len(rows)))

    def draw(self, seed: int, num_draws: int) -> Bag:
        """``num_draws`` of all ranks' samples with replacement, by weight. Every rank draws all of
        them alike, and keeps its own: the same samples for every cut."""
        random = np.random.RandomState(seed)  # its numbers are the same in all versions of NumPy
        times = np.zeros(self.own)
        ends = None if self.weights is None else np.cumsum(self.weights).astype(np.int64)
        size = self.own if ends is None else int(ends[-1]) if self.own else 0
        for part in blocks(num_draws, _DRAWS):
            drawn = random.randint(0, self.total, part.stop - part.start, np.int64) - self.start
            rows = drawn[(drawn >= 0) & (drawn < size)]
            if ends is not None:
                rows = np.searchsorted(ends, rows, side="right")
            times += np.bincount(rows, minlength=self.own)
        found = np.flatnonzero(times)
        return Bag(found, times[found])
