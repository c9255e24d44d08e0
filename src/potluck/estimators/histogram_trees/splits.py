"""The best split of each node, from the sums of its bins. Pure: no communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.estimators.histogram_trees.targets import Targets
from potluck.estimators.shards import Array


@dataclass(frozen=True)
class Rules:
    """When a node is split, in scikit-learn's terms. ``max_features`` counts the features that are
    tried for a node, ``min_weight_leaf`` is a weight of samples."""

    max_depth: int
    max_features: int
    min_samples_split: int
    min_samples_leaf: int
    min_weight_leaf: float
    min_impurity_decrease: float

    def may_split(self, depth: int, counts: Array, weights: Array, is_pure: Array) -> Array:
        """Which nodes of a level are split if there is a split for them."""
        least = max(self.min_samples_split, 2 * self.min_samples_leaf)
        is_large = (counts >= least) & (weights >= 2 * self.min_weight_leaf)
        return np.asarray(is_large & ~is_pure & (depth < self.max_depth))


NONE = (-np.inf, 0.0, 0.0, 0.0)


def best_splits(
    targets: Targets,
    rules: Rules,
    cells: Array,
    sums: Array,
    counts: Array | None,
    shape: tuple[int, int, int],
) -> Array:
    """The best split of each node, float64 of shape (nodes, 4).

    Its columns are the decrease of the impurity times the weight of the node, -inf if there is no
    split; the number of the feature among the tried features; the last bin on the left, and the
    first bin on the right that has samples.

    ``shape`` is (nodes, tried features, bins). ``cells`` are the numbers of the bins with samples
    in an array of that shape, ascending; ``sums`` are theirs. ``counts`` are their numbers of
    samples, which are needed if ``min_samples_leaf`` is more than 1. The first of equally good
    splits counts.
    """
    num_nodes, num_tried, num_bins = shape
    found = np.tile(np.array(NONE), (num_nodes, 1))
    if not len(cells):
        return found
    segments, bins = np.divmod(cells, num_bins)  # a segment is a feature of a node
    at = np.flatnonzero(segments[1:] == segments[:-1])  # the last row on the left
    if not len(at):
        return found
    left, right, whole = _sides(sums, segments, at)
    is_allowed = np.minimum(targets.weight(left), targets.weight(right)) >= rules.min_weight_leaf
    if counts is not None:
        sides = _sides(counts[:, None], segments, at)
        is_allowed &= np.minimum(sides[0], sides[1])[:, 0] >= rules.min_samples_leaf
    at, left, right, whole = (each[is_allowed] for each in (at, left, right, whole))
    if not len(at):
        return found
    decrease = targets.quality(left) + targets.quality(right) - targets.quality(whole)
    nodes = segments[at] // num_tried
    starts = np.flatnonzero(np.diff(nodes, prepend=-1))
    best = np.repeat(np.maximum.reduceat(decrease, starts), np.diff(starts, append=len(at)))
    winners = np.flatnonzero(decrease == best)
    winners = winners[np.flatnonzero(np.diff(nodes[winners], prepend=-1))]
    rows = at[winners]
    found[nodes[winners]] = np.column_stack(
        [decrease[winners], segments[rows] % num_tried, bins[rows], bins[rows + 1]]
    )
    return found


def _sides(sums: Array, segments: Array, at: Array) -> tuple[Array, Array, Array]:
    """The sums left and right of each split after a row of ``at``, and of both sides.

    Sums of integers are exact: a difference of two cumulative sums is the sum between them.
    """
    running = np.concatenate([np.zeros((1, sums.shape[1])), np.cumsum(sums, axis=0)])
    starts = np.flatnonzero(np.diff(segments, prepend=-1))
    ends = np.append(starts[1:], len(segments))
    segment = np.searchsorted(starts, at, side="right") - 1
    before, after = running[starts[segment]], running[ends[segment]]
    left = running[at + 1] - before
    whole = after - before
    return left, whole - left, whole
