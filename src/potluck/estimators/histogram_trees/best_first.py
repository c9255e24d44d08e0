"""Boosted trees, which grow best first on the samples of all ranks.

Gains, values of leaves and missing values are those of XGBoost (Chen and Guestrin 2016, "XGBoost: A
Scalable Tree Boosting System", equations 5 to 7 and algorithm 3). Growth by leaves, histograms as
differences and sums that are scattered over features are those of LightGBM (Ke et al. 2017,
"LightGBM: A Highly Efficient Gradient Boosting Decision Tree"). scikit-learn's kernels sum a rank's
samples by bins, and find the best split of a node's histograms.

A step expands some nodes, of all trees of an iteration:

1. Each rank moves its samples of these nodes to their children.
2. Each rank sums its samples of the smaller child, by feature and bin. The sums of all ranks are
   added; each rank gets those of its part of the features. The larger child's are its parent's less
   its sibling's.
3. Each rank finds the best splits by its features, and sends them to the others.

Gradients and hessians are multiples of a power of two, so that all sums are exact: a tree is the
same for every cut of the samples. Which nodes a step expands does not change the tree, for the
nodes that are kept in the end are chosen best first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.ensemble._hist_gradient_boosting.histogram import HistogramBuilder
from sklearn.ensemble._hist_gradient_boosting.splitting import SplitInfo, Splitter
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads

from potluck.estimators.histogram_trees.growing import CELLS, drawn_features, mixed
from potluck.estimators.shards import Array

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_INTEGERS = {1, 2, 3, 8, 9, 12}
_NUMBERS = 13
"""The numbers of a SplitInfo, and which of them are integers. It is sent as float64, with its set
of categories behind these, which has eight words of 32 bits."""


@dataclass(frozen=True)
class Samples:
    """This rank's samples: ``codes`` are bins, uint8 of shape (n, features) in Fortran order.

    The rest is equal on all ranks. ``num_bins`` counts the bins of each feature; ``missing`` is the
    code of a missing value, and ``has_missing`` says which features have some; codes of a feature
    with ``is_categorical`` have no order. ``monotonic`` is the sign of each feature's effect, or 0;
    ``interactions`` are sets of features that may be used together, none for any. ``model`` has
    scikit-learn's parameters; ``is_constant`` says that all hessians are 1.
    """

    model: Any
    is_constant: bool
    codes: Array
    num_bins: Array
    missing: int
    has_missing: Array
    is_categorical: Array
    monotonic: Array
    interactions: Sequence[set[int]]


class Node:
    """A node of a growing tree. Attributes that scikit-learn reads have its names.

    The count ``n_samples``, the sums and ``split_info`` are those of all ranks, ``rows`` this
    rank's samples, a view of its tree's partition. ``histograms`` is valid for this rank's features
    only. ``bounds`` limit the children's values; ``groups`` are the interactions that are possible.
    """

    def __init__(self, depth: int, rows: Array, start: int, facts: Sequence[Any]) -> None:
        self.depth, self.is_leaf = depth, True
        self.n_samples, self.sum_gradients, self.sum_hessians, self.value = facts
        self.rows, self.partition_start, self.partition_stop = rows, start, start + len(rows)
        self.split_info: Any = None
        self.histograms: Any = None
        self.left_child: Node | None = None
        self.right_child: Node | None = None
        self.bounds = (-math.inf, math.inf)
        self.groups: list[int] = []
        self.key = np.zeros(1, np.uint64)


class Tree:
    """A tree that grows on this rank's ``pair`` of gradients and hessians, float32 of shape (n,).

    ``sums`` are the count, gradient and hessian of all ranks' samples. Random draws follow from
    ``key``.
    """

    def __init__(self, samples: Samples, pair: Sequence[Array], sums: Array, key: int) -> None:
        model, is_constant = samples.model, samples.is_constant
        self.samples, self.model, (gradients, hessians) = samples, model, pair
        self.max_leaves = model.max_leaf_nodes or math.inf
        num, codes, num_threads = len(gradients), samples.codes, _openmp_effective_n_threads()
        if not num:  # scikit-learn's kernels need one sample, which is then in no node
            gradients = hessians = np.zeros(1, np.float32)
            codes = np.zeros((1, codes.shape[1]), np.uint8, order="F")
        self.builder = HistogramBuilder(
            *(codes, samples.missing + 1, gradients, hessians, is_constant, num_threads)
        )
        self.splitter = Splitter(
            X_binned=codes,
            n_bins_non_missing=samples.num_bins,
            missing_values_bin_idx=samples.missing,
            has_missing_values=samples.has_missing,
            is_categorical=samples.is_categorical,
            monotonic_cst=samples.monotonic,
            l2_regularization=model.l2_regularization,
            min_samples_leaf=model.min_samples_leaf,
            hessians_are_constant=is_constant,
            n_threads=num_threads,
        )
        facts = int(sums[0]), *sums[1:].tolist(), 0.0
        self.root = Node(0, np.asarray(self.splitter.partition)[:num], 0, facts)
        self.root.groups = list(range(len(samples.interactions)))
        self.root.key = mixed(np.array([key], np.uint64))
        self.finalized_leaves: list[Node] = []

    def may_split(self, node: Node) -> bool:
        """Whether the best split of ``node`` is worth to be looked for."""
        least, depth = 2 * self.model.min_samples_leaf, self.model.max_depth
        return node.n_samples >= least and (depth is None or node.depth < depth)

    def divide(self, node: Node) -> tuple[Node, Node]:
        """Make the children of ``node``, and move this rank's samples to them."""
        split, depth = node.split_info, node.depth + 1
        own, others, _ = self.splitter.split_indices(split, node.rows)
        sums = split.n_samples_left, split.sum_gradient_left, split.sum_hessian_left
        left = Node(depth, np.asarray(own), node.partition_start, (*sums, split.value_left))
        sums = split.n_samples_right, split.sum_gradient_right, split.sum_hessian_right
        right = Node(depth, np.asarray(others), left.partition_stop, (*sums, split.value_right))
        if self.model.max_features < 1:
            left.key, right.key = mixed(node.key + np.uint64(1)), mixed(node.key + np.uint64(2))
        interactions = self.samples.interactions
        groups = [each for each in node.groups if split.feature_idx in interactions[each]]
        left.groups = right.groups = groups
        (low, high), middle = node.bounds, (left.value + right.value) / 2
        sign = self.samples.monotonic[split.feature_idx]
        left.bounds = (middle if sign < 0 else low), (middle if sign > 0 else high)
        right.bounds = (middle if sign > 0 else low), (middle if sign < 0 else high)
        node.left_child, node.right_child = left, right
        return left, right

    def features(self, node: Node, own: range) -> Array:
        """Those of this rank's features by which ``node`` may be split, uint32."""
        interactions, num = self.samples.interactions, len(self.samples.num_bins)
        if not interactions and self.model.max_features == 1:
            return np.arange(own.start, own.stop, dtype=np.uint32)
        is_barred = np.zeros(num, bool)
        if interactions:
            allowed = set().union(*(interactions[each] for each in node.groups))
            is_barred = ~np.isin(np.arange(num), list(allowed))
        if self.model.max_features < 1:
            drawn = math.ceil(self.model.max_features * int((~is_barred).sum()))
            chosen = drawn_features(node.key, is_barred[None], max(drawn, 1))[0]
            is_barred[np.delete(np.arange(num), chosen)] = True
        found = np.flatnonzero(~is_barred[own.start : own.stop]) + own.start
        return found.astype(np.uint32)

    def best_first(self) -> tuple[list[Node], list[Node]]:
        """The nodes with a split among the tree's best, as far as splits are known, and the nodes
        that must be expanded to know more; none if the tree is complete."""
        kept: list[Node] = []
        heap = [] if self.root.split_info is None else [(0.0, 0, self.root)]
        while heap and len(kept) + 1 < self.max_leaves:
            node = heap[0][2]
            if node.left_child is None:
                num = math.ceil(min((self.max_leaves - 1 - len(kept)) / 2, len(heap)))
                best = [each for *_, each in heapq.nsmallest(num, heap)]
                return kept, [each for each in best if each.left_child is None]
            heapq.heappop(heap)
            kept.append(node)
            for side, child in enumerate((node.left_child, node.right_child)):
                if child is not None and child.split_info is not None:
                    # The number decides between equal gains, and is a different one for each node.
                    heapq.heappush(heap, (-child.split_info.gain, 2 * len(kept) + side, child))
        return kept, []

    def finish(self) -> None:
        """Cut off the nodes that are not among the best, and shrink the leaves."""
        kept, _ = self.best_first()
        for node in kept:
            node.is_leaf = False
        children = [each for node in kept for each in (node.left_child, node.right_child)]
        for leaf in [self.root, *children]:
            if leaf is not None and leaf.is_leaf:
                leaf.value *= self.model.learning_rate
                leaf.left_child = leaf.right_child = leaf.histograms = None
                self.finalized_leaves.append(leaf)
        self.n_nodes = 2 * len(kept) + 1
        self.n_categorical_splits = sum(node.split_info.is_categorical for node in kept)
        self.n_bins_non_missing = self.samples.num_bins


_Task = tuple[Tree, Node, Node | None, Node | None]
"""A node whose histograms are summed; its sibling and its parent, but for a root."""


def grow(ctx: DistributedContext, trees: Sequence[Tree]) -> None:
    """Grow ``trees``, which have the same samples. A collective call.

    Cost: for each split that is tried a rank sends ``24 features bins`` bytes (16 if hessians are
    constant), of all ranks together ``world - 1`` times; a step takes one reduce_scatter for each
    16 MiB of that, and one all_gather. Memory: ``20 features bins`` bytes for each open node.
    """
    features = len(trees[0].samples.num_bins)
    share = -(-features // ctx.world_size)
    own = range(min(ctx.rank * share, features), min((ctx.rank + 1) * share, features))
    _open(ctx, own, [(tree, tree.root, None, None) for tree in trees if tree.may_split(tree.root)])
    while wanted := [(tree, node) for tree in trees for node in tree.best_first()[1]]:
        tasks: list[_Task] = []
        for tree, node in wanted:
            pair = sorted(tree.divide(node), key=lambda child: child.n_samples)
            if any(map(tree.may_split, pair)):
                tasks.append((tree, pair[0], pair[1], node))
        _open(ctx, own, tasks)
    for tree in trees:
        tree.finish()


def _open(ctx: DistributedContext, own: range, tasks: Sequence[_Task]) -> None:
    """Sum the histograms of the nodes and their siblings, and find the best splits of both."""
    if not tasks:
        return
    tree = tasks[0][0]
    features, num_bins = len(tree.samples.num_bins), tree.samples.missing + 1
    most = max(1, CELLS // (features * num_bins * 3))
    for start in range(0, len(tasks), most):
        _sum(ctx, own, tasks[start : start + most])
    columns = np.array(own, np.uint32)
    for tree, node, sibling, parent in tasks:
        if sibling is not None and parent is not None:
            sibling.histograms = tree.builder.compute_histograms_subtraction(
                parent.histograms, node.histograms, columns
            ).base
            parent.histograms = None
    nodes = [(tree, each) for tree, *pair, _ in tasks for each in pair if each is not None]
    _find_splits(ctx, own, [(tree, node) for tree, node in nodes if tree.may_split(node)])


def _sum(ctx: DistributedContext, own: range, tasks: Sequence[_Task]) -> None:
    """Set the histograms of each task's node to the sums of all ranks."""
    # The base of a memoryview is the array: to parse its format again would take 0.3 ms.
    found = [tree.builder.compute_histograms_brute(node.rows).base for tree, node, *_ in tasks]
    if ctx.world_size > 1:
        is_constant = tasks[0][0].samples.is_constant
        names = ["sum_gradients", "count", *([] if is_constant else ["sum_hessians"])]
        features, num_bins = found[0].shape
        share = -(-features // ctx.world_size)
        sums = np.zeros((ctx.world_size, share, len(tasks), len(names), num_bins))
        whole = sums.reshape(-1, *sums.shape[2:])
        for task, histograms in enumerate(found):
            for row, name in enumerate(names):
                whole[:features, task, row] = histograms[name]
        sums = ctx.reduce_scatter(sums)
        for task, histograms in enumerate(found):
            for row, name in enumerate(names):
                histograms[name][own.start : own.stop] = sums[: len(own), task, row]
    for (_, node, *_), histograms in zip(tasks, found, strict=True):
        node.histograms = histograms


def _find_splits(ctx: DistributedContext, own: range, nodes: Sequence[tuple[Tree, Node]]) -> None:
    """Set the best split of each node, of all ranks' features; the first of equal ones."""
    splits = np.full((len(nodes), _NUMBERS + 8), -1.0)
    for row, (tree, node) in zip(splits, nodes, strict=True):
        if len(features := tree.features(node, own)):
            found = tree.splitter.find_node_split(
                *(node.n_samples, node.histograms, node.sum_gradients, node.sum_hessians),
                *(node.value, *node.bounds, features),
            )
            *row[:_NUMBERS], words = vars(found).values()
            row[_NUMBERS:] = 0 if words is None else words
    rows = ctx.all_gather(splits).reshape(ctx.world_size, *splits.shape)
    for number, best in enumerate(rows[:, :, 0].argmax(axis=0)):
        tree, node = nodes[number]
        values = rows[best, number].tolist()
        numbers = [int(each) if at in _INTEGERS else each for at, each in enumerate(values)]
        split = SplitInfo(*numbers[:_NUMBERS], np.array(values[_NUMBERS:]).astype(np.uint32))
        if not tree.samples.has_missing[split.feature_idx]:
            split.missing_go_to_left = split.n_samples_left > split.n_samples_right
        node.split_info = split if split.gain > 0 else None
