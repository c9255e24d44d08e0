"""Forests with ``exact=True``: one forest, however the samples are cut into shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn import ensemble, tree
from sklearn.datasets import load_diabetes, load_digits

from potluck import estimators
from potluck._core.context import DistributedContext
from support.shards import on_shards, refusal

DIGITS, DIABETES = load_digits(), load_diabetes()
X, Y = DIGITS.data, DIGITS.target
WEIGHTS = np.random.default_rng(0).lognormal(size=len(X))
Fit = Callable[[DistributedContext, Any], Any]


def cut(*arrays: Any, at: list[int]) -> list[Any]:
    """(X, y, ...) of each rank."""
    return list(zip(*(np.split(array, at) for array in arrays), strict=True))


def classifier(**options: Any) -> Fit:
    options = {"n_estimators": 5, "random_state": 3} | options
    return lambda ctx, shard: estimators.RandomForestClassifier(exact=True, ctx=ctx, **options).fit(
        *shard
    )


def regressor(**options: Any) -> Fit:
    options = {"n_estimators": 5, "random_state": 3} | options
    return lambda ctx, shard: estimators.RandomForestRegressor(exact=True, ctx=ctx, **options).fit(
        *shard
    )


def bits(forest: Any) -> list[bytes]:
    """All that its trees are."""
    states = [each.tree_.__getstate__() for each in forest.estimators_]
    return [state["nodes"].tobytes() + state["values"].tobytes() for state in states]


# ---------------------------------------------------------------- one forest for every cut


@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bootstrap": False, "class_weight": "balanced"},
        {"criterion": "entropy", "min_samples_leaf": 3, "max_samples": 0.5},
    ],
    ids=str,
)
def test_a_classifier_is_the_same_bit_by_bit_for_every_cut(
    options: dict[str, Any], is_weighted: bool
) -> None:
    data = (X, Y, WEIGHTS) if is_weighted else (X, Y)
    [alone] = on_shards([data], classifier(**options))
    assert alone.score(X, Y) > 0.9
    for at in ([600], [0, 77]):
        for forest in on_shards(cut(*data, at=at), classifier(**options)):
            assert bits(forest) == bits(alone)
            assert np.array_equal(forest.predict_proba(X), alone.predict_proba(X))
            assert np.array_equal(forest.feature_importances_, alone.feature_importances_)


@pytest.mark.parametrize(
    "options",
    [
        {"max_bins": 20},
        {"bootstrap": False, "max_features": 0.5, "max_depth": 4},
        {"min_samples_leaf": 0.01, "min_impurity_decrease": 10.0, "ccp_alpha": 5.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
def test_a_regressor_is_the_same_bit_by_bit_for_every_cut(
    options: dict[str, Any], is_weighted: bool
) -> None:
    data = (DIABETES.data, DIABETES.target) + ((WEIGHTS[:442],) if is_weighted else ())
    [alone] = on_shards([data], regressor(**options))
    assert alone.score(*data[:2]) > 0.4
    for at in ([100], [0, 431]):
        for forest in on_shards(cut(*data, at=at), regressor(**options)):
            assert bits(forest) == bits(alone)
            assert np.array_equal(forest.predict(data[0]), alone.predict(data[0]))
            assert np.array_equal(forest.apply(data[0]), alone.apply(data[0]))


def test_a_tree_does_not_depend_on_the_trees_that_grow_beside_it() -> None:
    [many] = on_shards([(X, Y)], classifier(n_estimators=18))
    [few] = on_shards([(X, Y)], classifier(n_estimators=3))
    assert bits(many)[:3] == bits(few)
    assert len(set(bits(many))) == 18


def test_weights_on_one_rank_stand_beside_ones_on_the_others() -> None:
    [alone] = on_shards([(X, Y, np.where(np.arange(len(X)) < 600, 2.0, 1.0))], classifier())
    shards = [(X[:600], Y[:600], np.full(600, 2.0)), (X[600:], Y[600:])]
    for forest in on_shards(shards, classifier()):
        assert bits(forest) == bits(alone)


def test_nodes_too_small_for_two_leaves_are_not_searched_for_a_split() -> None:
    """``min_samples_leaf`` implies a ``min_samples_split`` of twice as much, also in what is
    exchanged."""

    def exchanged(**options: Any) -> list[int]:
        def fit(ctx: DistributedContext, shard: Any) -> int:
            regressor(min_samples_leaf=30, **options)(ctx, shard)
            return sum(each["bytes"] for each in ctx.stats()["operations"].values())

        return on_shards(cut(DIABETES.data, DIABETES.target, at=[200]), fit)

    assert exchanged(min_samples_split=2) == exchanged(min_samples_split=60)


# ---------------------------------------------------------------- as good as scikit-learn's


def test_a_tree_of_all_samples_and_features_is_that_of_scikit_learn() -> None:
    """Features with distinct values only: no two splits are equally good."""
    random = np.random.default_rng(1)
    samples = random.permuted(np.tile(np.arange(200.0), (3, 1)), axis=1).T
    labels, values = (samples[:, 0] > 90) + random.integers(2, size=200), random.normal(size=200)
    size = {"max_depth": 4, "min_samples_leaf": 8}
    options = {"bootstrap": False, "max_features": None, "n_estimators": 1, **size}
    [ours] = on_shards([(samples, values)], regressor(**options))
    theirs = tree.DecisionTreeRegressor(**size).fit(samples, values)
    assert ours.predict(samples) == pytest.approx(theirs.predict(samples), abs=1e-9)
    assert ours.feature_importances_ == pytest.approx(theirs.feature_importances_, abs=1e-9)
    [mine] = on_shards([(samples, labels)], classifier(**options))
    wanted = tree.DecisionTreeClassifier(**size).fit(samples, labels)
    assert mine.predict_proba(samples) == pytest.approx(wanted.predict_proba(samples), abs=1e-9)
    inner, other = mine.estimators_[0].tree_, wanted.tree_
    assert sorted(inner.threshold) == pytest.approx(sorted(other.threshold))
    assert sorted(inner.impurity) == pytest.approx(sorted(other.impurity))
    assert sorted(inner.n_node_samples) == sorted(other.n_node_samples)
    assert inner.max_depth == other.max_depth


def test_digits_are_read_as_well_as_by_scikit_learn() -> None:
    train, test = slice(0, None, 2), slice(1, None, 2)
    theirs = ensemble.RandomForestClassifier(100, random_state=0).fit(X[train], Y[train])
    [ours] = on_shards([(X[train], Y[train])], classifier(n_estimators=100))
    assert ours.score(X[test], Y[test]) > theirs.score(X[test], Y[test]) - 0.01


def test_diabetes_is_foretold_as_well_as_by_scikit_learn() -> None:
    train, test = slice(0, None, 2), slice(1, None, 2)
    samples, values = DIABETES.data, DIABETES.target
    theirs = ensemble.RandomForestRegressor(100, random_state=0).fit(samples[train], values[train])
    [ours] = on_shards([(samples[train], values[train])], regressor(n_estimators=100))
    wanted = theirs.score(samples[test], values[test])
    assert ours.score(samples[test], values[test]) > wanted - 0.01


def test_a_class_that_a_shard_lacks_is_learned_from_the_others() -> None:
    low = Y < 5
    samples, labels = np.concatenate([X[low], X[~low]]), np.concatenate([Y[low], Y[~low]])
    for forest in on_shards(cut(samples, labels, at=[int(low.sum())]), classifier()):
        assert forest.classes_.tolist() == list(range(10))
        assert forest.score(X, Y) > 0.95


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fit", "shard", "message"),
    [
        (classifier(max_leaf_nodes=9), (X, Y), "takes no max_leaf_nodes: limit max_depth"),
        (classifier(max_bins=256), (X, Y), "'max_bins' parameter of RandomForestClassifier must"),
        (classifier(bootstrap=False, max_samples=9), (X, Y), "max_samples needs bootstrap=True"),
        (regressor(criterion="poisson"), (X, Y), "criterion is 'poisson'; with exact=True it must"),
        (classifier(), (X, Y, -WEIGHTS), "sample_weight has negative weights"),
        (classifier(), (np.where(X == 16, np.nan, X), Y), "Input X contains NaN"),
        (classifier(), (X[:, :5], Y), "has 64 features, that of rank 1 (worker 1) has 5"),
        (regressor(), (X, np.full(len(X), np.inf)), "Input y contains infinity"),
        (regressor(), (X, Y[:7]), "inconsistent numbers of samples"),
    ],
    ids=["leaf-nodes", "bins", "samples", "criterion", "negative", "nan", "features", "y", "short"],
)
def test_a_shard_that_does_not_fit_is_one_error_on_every_rank(
    fit: Fit, shard: Any, message: str
) -> None:
    good = classifier() if fit.__qualname__.startswith("classifier") else regressor()
    found = refusal([(good, (X, Y)), (fit, shard)], lambda ctx, own: own[0](ctx, own[1]))
    assert message in found
    assert "rank 1 (worker 1)" in found


@pytest.mark.parametrize("option", [{"exact": False}, {"criterion": "entropy"}], ids=str)
def test_ranks_that_do_not_agree_on_a_parameter_are_told(option: dict[str, Any]) -> None:
    def fit(ctx: DistributedContext, own: dict[str, Any]) -> Any:
        options = {"exact": True, "random_state": ctx.rank, "n_jobs": 1 + ctx.rank} | own
        return estimators.RandomForestClassifier(5, ctx=ctx, **options).fit(X, Y)

    [name] = option
    message = f"the ranks have different values of {name}: give every rank the same ("
    assert refusal([{}, option], fit).startswith(message)
    assert refusal([option, {}], fit).startswith(message)


def test_missing_values_are_refused_by_predict_too() -> None:
    [forest] = on_shards([(X, Y)], classifier(n_estimators=1))
    with pytest.raises(ValueError, match="Input X contains NaN"):
        forest.predict(np.where(X == 16, np.nan, X))


def test_no_samples_on_all_ranks_are_refused() -> None:
    assert "Found array with 0 sample(s)" in refusal([(X[:0], Y[:0])] * 2, classifier())
