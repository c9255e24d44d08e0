"""Fits of exact forests: trees that grow on the samples of all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from potluck.estimators import trees
from potluck.estimators.forest_fit import ForestFit
from potluck.estimators.histogram_trees.binning import Bins, find_bins
from potluck.estimators.histogram_trees.growing import Nodes, Samples, Urn, grow
from potluck.estimators.histogram_trees.splits import Rules
from potluck.estimators.histogram_trees.targets import Classes, Targets, Values, in_units, unit_of
from potluck.estimators.rounds import DONE, Stage, State, from_first
from potluck.estimators.shards import Array, Shard

_DRAWS = 1 << 22
"""Samples that are drawn at once, for all trees of a round."""

_MOST_TREES = 16
"""Trees of a round: at most these are grown again when a worker is lost."""


@dataclass(frozen=True)
class _Whole:
    """What all ranks know of the samples of all ranks.

    ``num`` counts them. Their weights are multiples of ``unit`` up to ``most``; both are 1 if no
    rank has weights. The values of a regression are from ``least`` to ``largest``.
    """

    num: int
    unit: float
    most: float
    least: float
    largest: float


class ExactFit(ForestFit):
    """The fit of an exact forest, and the bins of this rank's samples."""

    after_input = "bin"
    _bins: Array | None = None

    def stages(self) -> dict[str, Stage]:
        return {**super().stages(), "bin": self._bin, "grow": self._grow}

    def refuse(self, shard: Shard) -> None:
        model = self.model
        known = ("gini", "entropy", "log_loss") if self.is_classifier else ("squared_error",)
        if model.criterion not in known:
            raise ValueError(
                f"criterion is {model.criterion!r}; with exact=True it must be one of "
                f"{', '.join(map(repr, known))}"
            )
        if model.max_leaf_nodes is not None:
            raise ValueError(
                "exact=True grows trees level by level and takes no max_leaf_nodes: limit "
                "max_depth or min_samples_leaf"
            )
        if model.max_samples is not None and not model.bootstrap:
            raise ValueError("max_samples needs bootstrap=True")
        if shard.weights is not None and (shard.weights < 0).any():
            raise ValueError("sample_weight has negative weights: exact=True takes none")

    # ------------------------------------------------------------ stages

    def _bin(self, state: State) -> State:
        """The bins of the features."""
        bins = find_bins(self.ctx, self.shard.X, self.model.max_bins)
        return {**state, "stage": "grow", "low": bins.low, "high": bins.high}

    def _grow(self, state: State) -> State:
        """Grow some trees."""
        ctx, model = self.ctx, self.model
        bins = Bins(state["low"], state["high"])
        whole, weights = self._whole(state)
        urn = self._urn(whole, weights)
        num_draws = self._num_draws(whole, urn) if model.bootstrap else 0
        have = len(state["trees"])
        most = max(_DRAWS // (num_draws or whole.num), 1)
        seeds = np.random.RandomState(state["seed"]).randint(2**31 - 1, size=model.n_estimators)
        seeds = seeds[have : have + min(most, _MOST_TREES)]
        bags = [urn.draw(seed, num_draws) if num_draws else urn.everything() for seed in seeds]
        targets = self._targets(state, whole, None if num_draws else weights, num_draws)
        if self._bins is None:
            self._bins = bins.codes(self.shard.X)
        sums_up_to = (num_draws or urn.total) if self.is_classifier else math.inf
        nodes = grow(
            ctx,
            Samples(self._bins, targets, bins.num, sums_up_to),
            self._rules(whole, num_draws or urn.total * whole.unit),
            seeds,
            bags,
        )
        impurity = from_first(ctx, lambda: targets.impurity(nodes.totals), nodes.tree.shape)
        grown = _packed(nodes, seeds, bins, targets, impurity)
        is_last = have + len(seeds) >= model.n_estimators
        after = {**state, "trees": [*state["trees"], *grown]}
        return {**after, "stage": DONE if is_last else "grow"}

    # ------------------------------------------------------------ the samples of all ranks

    def _whole(self, state: State) -> tuple[_Whole, Array | None]:
        """Facts of all ranks' samples, and this rank's weights in units; None if no rank has
        weights."""
        y, weights = self.targets(state)
        least, largest = math.inf, -math.inf
        if len(y) and not self.is_classifier:
            least, largest = y.min(), y.max()
        most = -1.0 if weights is None else weights.max(initial=0.0)
        own = np.array([len(y), most, -least, largest], np.float64)
        rows = self.ctx.all_gather(own).reshape(-1, len(own))
        num, (most, least, largest) = int(rows[:, 0].sum()), rows[:, 1:].max(axis=0)
        if most < 0:
            return _Whole(num, 1.0, 1.0, -least, largest), None
        most = max(most, 1.0)  # the weight of samples of ranks without weights
        unit = unit_of(most, num)
        ones = np.ones(len(y)) if weights is None else weights
        return _Whole(num, unit, most, -least, largest), in_units(ones, unit)

    def _urn(self, whole: _Whole, weights: Array | None) -> Urn:
        own = len(self.shard.X)
        total = own if weights is None else int(weights.sum())
        totals = self.ctx.all_gather(np.array([total], np.int64)).ravel()
        return Urn(own, int(totals[: self.ctx.rank].sum()), int(totals.sum()), weights)

    def _num_draws(self, whole: _Whole, urn: Urn) -> int:
        """The samples that are drawn for a tree, as in scikit-learn."""
        given = self.model.max_samples
        if given is None or isinstance(given, Integral):
            return int(given or whole.num)
        return max(int(given * urn.total * whole.unit), 1)

    def _targets(
        self, state: State, whole: _Whole, weights: Array | None, num_draws: int
    ) -> Targets:
        """The targets of this rank's samples; ``weights`` in units, None if they were drawn by."""
        y, _ = self.targets(state)
        unit = 1.0 if weights is None else whole.unit
        if self.is_classifier:
            criterion = self.model.criterion
            return Classes(y, len(state["classes"]), criterion, weights, unit)
        center = whole.least / 2 + whole.largest / 2
        away, most = y - center, max(whole.largest - center, center - whole.least)
        weight = 1.0 if weights is None else weights * unit
        most_weight = 1.0 if weights is None else whole.most
        units, moments = [unit], [np.ones(len(y)) if weights is None else weights]
        for power in (1, 2):
            units.append(unit_of(most_weight * most**power, num_draws or whole.num))
            moments.append(in_units(weight * away**power, units[-1]))
        return Values(y, np.array(moments), (units[0], units[1], units[2]), center)

    def _rules(self, whole: _Whole, weight: float) -> Rules:
        """The rules for a tree of samples of this ``weight``; fractions as in scikit-learn."""
        model, features = self.model, self.shard.X.shape[1]
        leaf, split = model.min_samples_leaf, model.min_samples_split
        if not isinstance(leaf, Integral):
            leaf = math.ceil(leaf * whole.num)
        if not isinstance(split, Integral):
            split = math.ceil(split * whole.num)
        return Rules(
            max_depth=_UNLIMITED if model.max_depth is None else model.max_depth,
            max_features=_num_features(model.max_features, features),
            min_samples_split=max(int(split), 2),
            min_samples_leaf=int(leaf),
            min_weight_leaf=model.min_weight_fraction_leaf * weight,
            min_impurity_decrease=model.min_impurity_decrease,
        )


_UNLIMITED = 2**31 - 1


def _num_features(given: Any, features: int) -> int:
    """The features that are tried for a node, by scikit-learn's rules."""
    if given is None:
        return features
    if isinstance(given, str):
        return max(1, int(math.sqrt(features) if given == "sqrt" else math.log2(features)))
    if isinstance(given, Integral):
        return min(int(given), features)
    return max(1, int(given * features))


def _packed(
    nodes: Nodes, seeds: Array, bins: Bins, targets: Targets, impurity: Array
) -> list[trees.Packed]:
    """Each tree of the batch as a state."""
    found = []
    values, weights = targets.values(nodes.totals), targets.weight(nodes.totals)
    numbers = np.empty(len(nodes.tree), np.int64)
    for tree, seed in enumerate(seeds.tolist()):
        own = np.flatnonzero(nodes.tree == tree)
        numbers[own] = np.arange(len(own))
        feature, left, right = nodes.feature[own], nodes.left[own], nodes.right[own]
        is_leaf = left < 0
        last, first = nodes.last_left[own], nodes.first_right[own]
        ends = bins.high[feature, last].astype(np.float64), bins.low[feature, first]
        arrays = {
            "feature": feature,
            "threshold": ends[0] / 2 + ends[1] / 2,
            "impurity": impurity[own],
            "n_node_samples": nodes.counts[own],
            "weighted_n_node_samples": weights[own],
        }
        left, right = (np.where(is_leaf, -1, numbers[each]) for each in (left, right))
        found.append(trees.packed(arrays, left, right, values[own], seed))
    return found
