"""One boosted tree against a plain one in float64, and trees as plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from potluck import estimators
from potluck.estimators.histogram_trees.binning import find_bins
from potluck.estimators.trees import pack_boosted, unpack_boosted
from support.shards import on_shards

RANDOM = np.random.default_rng(0)
X = np.round(RANDOM.normal(size=(300, 3)), 1)
Y = X[:, 0] * X[:, 1] + 0.3 * RANDOM.normal(size=300)


def best_split(x: Any, gradients: Any, least: int, l2: float) -> tuple[float, int, float]:
    """(gain, feature, threshold) of the best split of samples with hessians of 1: equation 7 of the
    paper of XGBoost, for every feature and value."""

    def score(some: Any) -> float:
        return float(some.sum() ** 2 / (len(some) + l2))

    best = (0.0, -1, 0.0)
    for feature in range(x.shape[1]):
        for value in np.unique(x[:, feature]):
            left = x[:, feature] <= value
            if min(left.sum(), (~left).sum()) >= least:
                parts = score(gradients[left]) + score(gradients[~left])
                best = max(best, (parts - score(gradients), feature, float(value)))
    return best


def plain_tree(x: Any, gradients: Any, leaves: int, least: int, l2: float) -> Any:
    """What a tree that grows best first adds to each sample's prediction."""
    groups = [np.arange(len(x))]
    while len(groups) < leaves:
        splits = [best_split(x[rows], gradients[rows], least, l2) for rows in groups]
        number = int(np.argmax([gain for gain, *_ in splits]))
        gain, feature, threshold = splits[number]
        if gain <= 0:
            break
        rows = groups.pop(number)
        left = x[rows, feature] <= threshold
        groups += [rows[left], rows[~left]]
    found = np.zeros(len(x))
    for rows in groups:
        found[rows] = -gradients[rows].sum() / (len(rows) + l2)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 5], ids="world{}".format)
@pytest.mark.parametrize(
    ("leaves", "least", "l2"), [(2, 1, 0.0), (9, 20, 0.0), (40, 3, 1.5)], ids=str
)
def test_a_tree_is_that_of_every_split_tried_in_turn(
    world_size: int, leaves: int, least: int, l2: float
) -> None:
    """With five ranks two have no feature."""
    expected = Y.mean() + plain_tree(X, Y.mean() - Y, leaves, least, l2)
    parts = np.array_split(np.arange(300), world_size)
    options = {"max_iter": 1, "learning_rate": 1.0, "max_leaf_nodes": leaves}
    options |= {"min_samples_leaf": least, "l2_regularization": l2}
    for model in on_shards(
        [(X[own], Y[own]) for own in parts],
        lambda ctx, shard: estimators.HistGradientBoostingRegressor(ctx=ctx, **options).fit(*shard),
    ):
        assert model.predict(X) == pytest.approx(expected, abs=1e-5)


def test_bins_of_float64_leave_out_missing_values_and_bound_infinite_ones() -> None:
    many = RANDOM.normal(size=500) * 10.0 ** RANDOM.integers(-200, 200, size=500)
    many[::7] = np.nan
    few = RANDOM.choice([np.nan, -np.inf, 1.0, np.inf], 500)
    samples = np.column_stack([many, few, np.full(500, np.nan)])
    [alone] = on_shards([samples], lambda ctx, shard: find_bins(ctx, shard, 20))
    ordered = np.sort(many[~np.isnan(many)])
    num = len(ordered)
    assert alone.high[0].tolist() == [ordered[-(-q * num // 20) - 1] for q in range(1, 21)]
    largest = np.finfo(np.float64).max
    assert alone.high[1, :4].tolist() == [-largest, 1.0, largest, np.inf]
    assert alone.thresholds(1).tolist() == [-largest / 2 + 0.5, largest / 2 + 0.5]
    assert not len(alone.thresholds(2))
    for bins in on_shards(np.split(samples, [3, 3, 250]), lambda ctx, own: find_bins(ctx, own, 20)):
        assert np.array_equal(bins.high, alone.high)
        assert np.array_equal(bins.low, alone.low)


def damaged(**changes: Any) -> dict[str, Any]:
    [[tree]] = estimators.HistGradientBoostingRegressor(max_iter=1).fit(X, Y)._predictors
    for field, value in changes.items():
        tree.nodes[field][0] = value
    return pack_boosted(tree)


def test_a_tree_is_the_same_after_it_was_sent() -> None:
    [[tree]] = estimators.HistGradientBoostingRegressor(max_iter=1).fit(X, Y)._predictors
    again = unpack_boosted(pack_boosted(tree), 3)
    assert again.nodes.tobytes() == tree.nodes.tobytes()


@pytest.mark.parametrize(
    "changes",
    [{"left": 0}, {"right": 99}, {"feature_idx": 3}, {"feature_idx": -1}, {"is_categorical": 1}],
    ids=str,
)
def test_a_damaged_tree_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a boosted tree of \d+ nodes is damaged"):
        unpack_boosted(damaged(**changes), 3)


def test_a_tree_without_nodes_is_refused() -> None:
    empty = damaged() | {"nodes": np.zeros(0, np.uint8)}
    with pytest.raises(ValueError, match="a boosted tree of 0 nodes is damaged"):
        unpack_boosted(empty, 3)
