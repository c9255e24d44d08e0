"""Trees that grow level by level on the samples of all ranks.

Each level of a batch of trees takes these steps (PLANET, Panda et al. 2009, section 4; with the
sums scattered over the ranks as in LightGBM, Ke et al. 2017):

1. All ranks' totals of each node are summed: its value, its impurity, and whether it may be split.
2. For each node that may be split, some features that are not constant in it are drawn.
3. Each rank sums its samples by node, drawn feature and bin. The sums of all ranks are added.
4. Each rank finds the best splits of its part of the nodes, and sends them to the others.
5. Each rank moves its samples to the new nodes.

All sums are exact (`targets.py`), and what is drawn at random for a node follows from its tree's
seed and its path in the tree. So a tree depends neither on the cut of the samples nor on the other
trees of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from potluck.estimators.histogram_trees.splits import Rules, best_splits
from potluck.estimators.histogram_trees.targets import Targets
from potluck.estimators.shards import Array, blocks
from potluck.training.shard_order import GOLDEN, hashed

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

CELLS = 1 << 21
"""Sums that are exchanged at once: 16 MiB as float64."""

_SPARSE = 4
"""A node whose bins are at least this number of times its samples has a sparse histogram."""

_FLOAT32_LIMIT = float(1 << 24)
"""Integers below this are exact in float32."""


@dataclass(frozen=True)
class Samples:
    """This rank's samples: the bins of their values, uint8 of shape (features, n), and their
    targets. ``num_bins`` is the most bins of a feature. ``most`` bounds all sums of all ranks."""

    codes: Array
    targets: Targets
    num_bins: int
    most: float


@dataclass(frozen=True)
class Nodes:
    """The nodes of a batch of trees, level by level; equal on all ranks.

    ``tree`` is the number of a node's tree in the batch, ``left`` and ``right`` the numbers of its
    children in the batch, -1 for a leaf. ``feature`` and ``last_left``, ``first_right`` say its
    split: the last bin on the left and the first on the right.
    """

    tree: Array
    feature: Array
    last_left: Array
    first_right: Array
    left: Array
    right: Array
    totals: Array
    counts: Array


@dataclass
class _Level:
    """The nodes of a level, and this rank's samples in them in the order of the nodes.

    ``slots`` is the node of each sample, as a number in this level. ``keys`` are random numbers,
    one per node. ``roots`` are the weights of the nodes' trees.
    """

    tree: Array
    keys: Array
    roots: Array
    slots: Array
    rows: Array
    times: Array

    def chosen(self, nodes: Array) -> _Level:
        """The level with these nodes only, in this order."""
        numbers = np.full(len(self.tree), -1)
        numbers[nodes] = np.arange(len(nodes))
        return self.moved(
            numbers[self.slots], self.tree[nodes], self.keys[nodes], self.roots[nodes]
        )

    def moved(self, slots: Array, tree: Array, keys: Array, roots: Array) -> _Level:
        """A level with these nodes; the samples with a negative slot are in none."""
        order = np.argsort(slots, kind="stable")
        order = order[np.searchsorted(slots[order], 0) :]
        return _Level(tree, keys, roots, slots[order], self.rows[order], self.times[order])

    def part(self, start: int, stop: int) -> _Level:
        """The level with the nodes of a range only."""
        first, last = np.searchsorted(self.slots, [start, stop])
        nodes, own = slice(start, stop), slice(first, last)
        return _Level(
            *(self.tree[nodes], self.keys[nodes], self.roots[nodes]),
            *(self.slots[own] - start, self.rows[own], self.times[own]),
        )


def grow(
    ctx: DistributedContext,
    samples: Samples,
    rules: Rules,
    seeds: Sequence[int],
    bags: Sequence[Bag],
) -> Nodes:
    """Grow one tree for each of ``seeds``, from this rank's ``bags``. A collective call."""
    targets = samples.targets
    num_trees = len(seeds)
    level = _Level(
        np.arange(num_trees),
        mixed(np.array(seeds, np.uint64)),
        np.zeros(num_trees),
        np.repeat(np.arange(num_trees), [len(bag.rows) for bag in bags]),
        np.concatenate([bag.rows for bag in bags]),
        np.concatenate([bag.times for bag in bags]),
    )
    levels: list[Nodes] = []
    depth = num_nodes = 0
    while len(level.tree):
        totals, counts, is_pure = _totals(ctx, targets, level)
        weights = targets.weight(totals)
        if not depth:
            level.roots = weights
        may = np.flatnonzero(rules.may_split(depth, counts, weights, is_pure))
        is_small = counts[may] * _SPARSE <= samples.num_bins
        num_large = int(len(may) - is_small.sum())
        may = may[np.argsort(is_small, kind="stable")]  # nodes with many samples first
        tried = level.chosen(may)
        splits = _splits(ctx, samples, rules, tried, counts[may], num_large)
        gain = splits[:, 0] / tried.roots + np.finfo(np.float64).eps
        split = np.flatnonzero(gain >= rules.min_impurity_decrease)
        nodes = _leaves(level.tree, totals, counts)
        _note(nodes, may[split], splits[split], num_nodes + len(level.tree))
        levels.append(nodes)
        num_nodes += len(level.tree)
        level = _children(samples, tried.chosen(split), splits[split, 1:3].astype(np.int64))
        depth += 1
    names = [field.name for field in fields(Nodes)]
    columns = {name: np.concatenate([getattr(each, name) for each in levels]) for name in names}
    return Nodes(**columns)


# ------------------------------------------------------------------ the nodes of a level


def _totals(ctx: DistributedContext, targets: Targets, level: _Level) -> tuple[Array, Array, Array]:
    """Of each node on all ranks: its sums, its number of samples, and whether it is pure."""
    num = len(level.tree)
    own = targets.totals(level.slots, num, level.rows, level.times)
    counts = np.bincount(level.slots, minlength=num)
    message = np.ascontiguousarray(np.column_stack([own, counts]))
    ctx.all_reduce(message)
    extremes = targets.extremes(level.slots, num, level.rows)
    if extremes is not None:
        ctx.all_reduce(extremes, "max")
    totals = np.ascontiguousarray(message[:, :-1])
    return totals, message[:, -1].astype(np.int64), targets.is_pure(totals, extremes)


def _leaves(tree: Array, totals: Array, counts: Array) -> Nodes:
    feature, last_left, first_right, left, right = np.full((5, len(tree)), -1)
    return Nodes(tree, feature, last_left, first_right, left, right, totals, counts)


def _note(nodes: Nodes, at: Array, splits: Array, first_child: int) -> None:
    """Write the splits of the nodes ``at``."""
    _, feature, last_left, first_right = splits.T
    nodes.feature[at] = feature
    nodes.last_left[at], nodes.first_right[at] = last_left, first_right
    nodes.left[at] = first_child + 2 * np.arange(len(at))
    nodes.right[at] = nodes.left[at] + 1


def _children(samples: Samples, level: _Level, splits: Array) -> _Level:
    """The next level: two nodes for each of ``level``, split by (feature, last bin on the left)."""
    features, last = splits.T[:, level.slots]
    is_right = samples.codes[features, level.rows] > last
    keys = np.column_stack([level.keys + np.uint64(1), level.keys + np.uint64(2)])
    return level.moved(
        2 * level.slots + is_right,
        np.repeat(level.tree, 2),
        mixed(keys.ravel()),
        np.repeat(level.roots, 2),
    )


# ------------------------------------------------------------------ random numbers


def mixed(numbers: Array) -> Array:
    """A random number for each of ``numbers``, uint64: SplitMix64's first from that state."""
    return hashed(numbers + GOLDEN)


def drawn_features(keys: Array, is_constant: Array, num: int) -> Array:
    """``num`` features for each node, drawn without replacement; features that are constant in the
    node come last. int64 of shape (nodes, num)."""
    features = np.arange(is_constant.shape[1], dtype=np.uint64)
    numbers = mixed(keys[:, None] + mixed(features)[None, :])
    numbers[is_constant] = np.iinfo(np.uint64).max
    return np.argsort(numbers, axis=1, kind="stable")[:, :num]


# ------------------------------------------------------------------ sums by bins


def _splits(
    ctx: DistributedContext,
    samples: Samples,
    rules: Rules,
    level: _Level,
    counts: Array,
    num_large: int,
) -> Array:
    """The best split of each node on all ranks, of shape (nodes, 4): as ``best_splits``, but with
    the numbers of features among all. The first ``num_large`` nodes have dense histograms."""
    parts = []
    width = samples.targets.width
    per_feature = np.where(np.arange(len(counts)) < num_large, samples.num_bins, counts)
    costs = per_feature * rules.max_features * width
    for start, stop in [*_parts(costs, 0, num_large), *_parts(costs, num_large, len(counts))]:
        part = level.part(start, stop)
        drawn = drawn_features(part.keys, _constant(ctx, samples.codes, part), rules.max_features)
        share = -(-len(drawn) // ctx.world_size)
        wanted = _Wanted(samples, part, drawn, rules.min_samples_leaf > 1, share)
        cells, sums = (_dense if start < num_large else _sparse)(ctx, wanted)
        bins = best_splits(
            *(samples.targets, rules, cells, sums[:, :width]),
            sums[:, width] if wanted.needs_counts else None,
            (share, *wanted.shape[1:]),
        )
        found = ctx.all_gather(bins).reshape(-1, 4)[: len(drawn)]
        found[:, 1] = drawn[np.arange(len(drawn)), found[:, 1].astype(np.int64)]
        parts.append(found)
    return np.concatenate([np.zeros((0, 4)), *parts])


def _parts(costs: Array, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of nodes from ``start`` to ``end`` whose costs are at most CELLS, or one node."""
    ends = np.cumsum(costs)
    while start < end:
        before = ends[start - 1] if start else 0
        stop = min(max(int(np.searchsorted(ends, before + CELLS, "right")), start + 1), end)
        yield start, stop
        start = stop


def _constant(ctx: DistributedContext, codes: Array, level: _Level) -> Array:
    """Whether a feature has one bin only in a node on all ranks, of shape (nodes, features)."""
    extremes = np.zeros((2, len(codes), len(level.tree)), np.uint8)
    starts = np.flatnonzero(np.diff(level.slots, prepend=-1))
    if len(starts):
        nodes = level.slots[starts]
        for feature, column in enumerate(codes):
            own = column[level.rows]
            extremes[0, feature, nodes] = np.maximum.reduceat(own, starts)
            extremes[1, feature, nodes] = 255 - np.minimum.reduceat(own, starts)
    ctx.all_reduce(extremes, "max")
    return np.asarray(extremes[0] == 255 - extremes[1]).T


@dataclass(frozen=True)
class _Wanted:
    """The sums that are wanted: of the samples of a part of a level, by node, ``drawn`` feature
    (of shape (nodes, tried features)) and bin; with ``needs_counts`` also how many samples they are
    of. A rank decides on ``share`` nodes."""

    samples: Samples
    level: _Level
    drawn: Array
    needs_counts: bool
    share: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(nodes, tried features, bins)."""
        return *self.drawn.shape, self.samples.num_bins

    def sums(self, groups: Array, num_groups: int, rows: Array, times: Array) -> Array:
        """The sums of groups of samples and, if asked for, in a last column their counts."""
        found = self.samples.targets.sums(groups, num_groups, rows, times)
        if not self.needs_counts:
            return found
        return np.column_stack([found, np.bincount(groups, minlength=num_groups)])


def _dense(ctx: DistributedContext, wanted: _Wanted) -> tuple[Array, Array]:
    """The cells that this rank decides on, ascending, and their sums. Each rank sends all sums;
    zeros, too."""
    samples, level, drawn = wanted.samples, wanted.level, wanted.drawn
    num_nodes, num_tried, num_bins = wanted.shape
    width = samples.targets.width + wanted.needs_counts
    sums = np.zeros((ctx.world_size * wanted.share, num_tried, num_bins, width), _dtype(samples))
    for tried in range(num_tried):
        codes = samples.codes[drawn[level.slots, tried], level.rows]
        cells = level.slots * num_bins + codes
        found = wanted.sums(cells, num_nodes * num_bins, level.rows, level.times)
        sums[:num_nodes, tried] = found.reshape(num_nodes, num_bins, width)
    if ctx.world_size > 1:
        sums = ctx.reduce_scatter(sums.reshape(ctx.world_size, -1))
    own = sums.reshape(-1, width)
    cells = np.flatnonzero(own.any(axis=1))
    return cells, own[cells].astype(np.float64)


def _sparse(ctx: DistributedContext, wanted: _Wanted) -> tuple[Array, Array]:
    """As ``_dense``. Each rank sends the sums of bins in which it has samples, with the numbers of
    the bins."""
    samples, level = wanted.samples, wanted.level
    _, num_tried, num_bins = wanted.shape
    features = wanted.drawn[level.slots].T
    segments = level.slots * num_tried + np.arange(num_tried)[:, None]
    cells = (segments * num_bins + samples.codes[features, level.rows]).ravel()
    cells, groups = np.unique(cells, return_inverse=True)
    rows, times = np.tile(level.rows, num_tried), np.tile(level.times, num_tried)
    sums = wanted.sums(groups, len(cells), rows, times)
    if ctx.world_size > 1:
        all_cells = np.concatenate(ctx.all_gather_uneven(cells))
        all_sums = np.concatenate(ctx.all_gather_uneven(sums.astype(_dtype(samples))))
        num_own = wanted.share * num_tried * num_bins
        first = ctx.rank * num_own
        is_own = (all_cells >= first) & (all_cells < first + num_own)
        cells, groups = np.unique(all_cells[is_own] - first, return_inverse=True)
        sums = np.zeros((len(cells), sums.shape[1]))
        np.add.at(sums, groups, all_sums[is_own])
    return cells, sums


def _dtype(samples: Samples) -> type[np.floating]:
    """The dtype in which sums are sent."""
    return np.float32 if samples.most < _FLOAT32_LIMIT else np.float64


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
