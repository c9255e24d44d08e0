"""Trees from histograms: the parts that do not communicate, and bins of a world of one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from potluck.estimators.histogram_trees.binning import find_bins
from potluck.estimators.histogram_trees.growing import Urn
from potluck.estimators.histogram_trees.splits import Rules, best_splits
from potluck.estimators.histogram_trees.targets import Classes, Values, in_units, unit_of
from support.shards import on_shards

RANDOM = np.random.default_rng(0)
RULES: dict[str, Any] = {
    "max_depth": 9,
    "max_features": 3,
    "min_samples_split": 2,
    "min_samples_leaf": 1,
    "min_weight_leaf": 0.0,
    "min_impurity_decrease": 0.0,
}

# ---------------------------------------------------------------- exact sums


@pytest.mark.parametrize("largest", [1e-300, 0.7, 1.0, 3e9, 1e300])
@pytest.mark.parametrize("num", [1, 1000, 2**30])
def test_a_sum_of_the_largest_numbers_in_their_unit_is_exact(largest: float, num: int) -> None:
    unit = unit_of(largest, num)
    assert np.frexp(unit)[0] == 0.5, "a power of two"
    assert in_units(np.array(largest), unit) * num < 2**53
    if largest > 1e-200:
        assert in_units(np.array(largest), unit) * num > 2**49, "not more bits lost than needed"


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_sums_have_the_same_bits_in_every_order(kind: str) -> None:
    num = 5000
    weights = RANDOM.lognormal(size=num)
    unit = unit_of(weights.max(), num)
    quantized = in_units(weights, unit)
    targets: Classes | Values = Classes(RANDOM.integers(4, size=num), 4, "gini", quantized, unit)
    if kind == "values":
        targets = Values(weights, np.array([quantized] * 3), (unit,) * 3, 0.0)
    groups, rows = RANDOM.integers(7, size=num), np.arange(num)
    whole = targets.totals(groups, 7, rows, np.ones(num))
    order = RANDOM.permutation(num)
    parts = [
        targets.totals(groups[part], 7, rows[part], np.ones(len(part)))
        for part in np.split(order, [10, 3000])
    ]
    assert np.array_equal(parts[2] + parts[0] + parts[1], whole)


# ---------------------------------------------------------------- the best split


def every_split(
    targets: Classes | Values, x: Any, nodes: Any, rules: Rules
) -> dict[int, list[tuple[float, int, int, int]]]:
    """All splits of each node, by counting each of them again."""
    rows = np.arange(len(nodes))
    found: dict[int, list[tuple[float, int, int, int]]] = {}
    for node in range(nodes.max() + 1):
        found[node] = []
        for feature, column in enumerate(x.T):
            own = rows[nodes == node]
            for last, first in pairwise(np.unique(column[own])):
                side = (column[own] > last).astype(int)
                if np.bincount(side).min() < rules.min_samples_leaf:
                    continue
                sums = targets.sums(side, 2, own, np.ones(len(own)))
                if targets.weight(sums).min() < rules.min_weight_leaf:
                    continue
                before = targets.impurity(targets.totals(side * 0, 1, own, np.ones(len(own))))
                after = targets.impurity(targets.totals(side, 2, own, np.ones(len(own))))
                weight = targets.weight(sums)
                decrease = before[0] * weight.sum() - after @ weight
                found[node].append((decrease, feature, last, first))
    return found


@pytest.mark.parametrize(
    "changes", [{}, {"min_samples_leaf": 4}, {"min_weight_leaf": 6.0}], ids=str
)
@pytest.mark.parametrize("criterion", ["gini", "entropy", "squared_error"])
def test_the_best_split_is_the_best_of_all(criterion: str, changes: dict[str, Any]) -> None:
    rules = Rules(**RULES | changes)
    num, shape = 60, (4, 3, 11)
    x, nodes = RANDOM.integers(11, size=(num, 3)), RANDOM.integers(4, size=num)
    nodes[nodes == 2] = 3  # a node without samples
    nodes[0] = 2  # and one with a single one
    y = RANDOM.normal(size=num)
    targets: Classes | Values = Classes(RANDOM.integers(3, size=num), 3, criterion)
    if criterion == "squared_error":
        units = (1.0, unit_of(4, num), unit_of(16, num))
        moments = [in_units(y**power, unit) for power, unit in enumerate(units)]
        targets = Values(y, np.array(moments), units, 0.0)
    numbers = ((nodes[:, None] * 3 + np.arange(3)) * 11 + x).ravel()
    cells, groups, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    sums = targets.sums(groups, len(cells), np.repeat(np.arange(num), 3), np.ones(3 * num))
    found = best_splits(targets, rules, cells, sums, counts.astype(float), shape)
    for node, splits in every_split(targets, x, nodes, rules).items():
        best = max((split[0] for split in splits), default=-np.inf)
        assert found[node, 0] == pytest.approx(best, abs=1e-9)
        if splits:
            at = [split[1:] for split in splits].index(tuple(found[node, 1:].astype(int)))
            assert splits[at][0] == pytest.approx(best, abs=1e-9)


# ---------------------------------------------------------------- bins


def test_few_values_have_a_bin_each_and_many_end_at_quantiles_for_every_cut() -> None:
    few = RANDOM.choice([-2.5, -0.0, 0.0, 1.0, 7.0], size=999)
    many = RANDOM.normal(size=999) * 10.0 ** RANDOM.integers(-30, 30, size=999)
    heavy = np.where(RANDOM.random(999) < 0.9, 0.0, many)
    X = np.column_stack([few, many, heavy, np.ones(999)]).astype(np.float32)
    alone = on_shards([X], lambda ctx, shard: find_bins(ctx, shard, 20))[0]
    assert alone.high[0, :5].tolist() == [-2.5, 0.0, 1.0, 7.0, np.inf]
    ordered = np.sort(X[:, 1])
    assert alone.high[1].tolist() == [ordered[-(-q * 999 // 20) - 1] for q in range(1, 21)]
    assert alone.low[1, 1:].tolist() == [ordered[-(-q * 999 // 20)] for q in range(1, 20)], (
        "a bin begins with the next value"
    )
    assert alone.high[3, :2].tolist() == [1.0, np.inf]
    codes = alone.codes(X)
    for feature in range(4):
        own = codes[feature]
        assert (alone.low[feature, own] <= X[:, feature]).all()
        assert (X[:, feature] <= alone.high[feature, own]).all()
    for cuts in ([500], [0, 1], [3, 998]):
        for bins in on_shards(np.split(X, cuts), lambda ctx, shard: find_bins(ctx, shard, 20)):
            assert np.array_equal(bins.low, alone.low)
            assert np.array_equal(bins.high, alone.high)


def test_values_beyond_the_bins_go_to_the_outer_ones() -> None:
    X = np.array([[0.0], [1.0], [2.0]], np.float32)
    bins = on_shards([X], lambda ctx, shard: find_bins(ctx, shard, 20))[0]
    assert bins.codes(np.array([[-9.0], [0.5], [9.0]], np.float32)).tolist() == [[0, 1, 2]]


# ---------------------------------------------------------------- bags


@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_ranks_draw_the_samples_that_one_would_draw(is_weighted: bool) -> None:
    weights = RANDOM.integers(5, size=100).astype(float) if is_weighted else np.ones(100)
    given = weights if is_weighted else None
    total = int(weights.sum())
    whole = Urn(100, 0, total, given).draw(7, 3000)
    assert whole.times.sum() == 3000
    shares = np.bincount(whole.rows, whole.times, 100)
    assert not shares[weights == 0].any()
    assert shares / 3000 == pytest.approx(weights / total, abs=0.02)
    found = []
    for start, stop in ((0, 40), (40, 40), (40, 100)):
        own = None if given is None else given[start:stop]
        bag = Urn(stop - start, int(weights[:start].sum()), total, own).draw(7, 3000)
        found += [(row + start, times) for row, times in zip(*vars(bag).values(), strict=True)]
    assert found == list(zip(whole.rows, whole.times, strict=True))
