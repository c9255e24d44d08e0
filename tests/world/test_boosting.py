"""Boosted trees: one model, however the samples are cut into shards, and scikit-learn's quality."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn import datasets, ensemble
from sklearn.base import is_classifier
from sklearn.model_selection import KFold

from potluck import estimators
from potluck._core.context import DistributedContext
from potluck.estimators.boosting_fit import BoostingFit
from support.shards import on_shards, refusal

NUM = 600
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(NUM, 5))
X[:, 3] = RANDOM.integers(0, 9, NUM)
VALUES = X[:, 0] * X[:, 1] + np.isin(X[:, 3], [1, 4, 7]) + 0.1 * RANDOM.normal(size=NUM)
CLASSES = np.digitize(VALUES, [-0.3, 0.8])
X[RANDOM.random(X.shape) < 0.1] = np.nan
WEIGHTS = RANDOM.lognormal(size=NUM)
Fit = Callable[[DistributedContext, Any], Any]


def boosted(kind: str, **options: Any) -> Fit:
    options = {"max_iter": 4, "max_leaf_nodes": 8, "random_state": 3} | options
    cls = getattr(estimators, f"HistGradientBoosting{kind}")
    return lambda ctx, shard: cls(ctx=ctx, **options).fit(*shard)


def cut(*arrays: Any, rows: list[Any]) -> list[Any]:
    """(X, y, ...) of each rank."""
    return [tuple(array[own] for array in arrays) for own in rows]


def bits(model: Any) -> list[bytes]:
    """All that a model is."""
    arrays = [model._baseline_prediction, model.train_score_, model.validation_score_]
    for tree in (tree for trees in model._predictors for tree in trees):
        arrays += [tree.nodes, tree.binned_left_cat_bitsets, tree.raw_left_cat_bitsets]
    return [array.tobytes() for array in arrays]


# ---------------------------------------------------------------- one model for every cut


@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(
    ("kind", "y", "options"),
    [
        ("Regressor", VALUES, {"max_bins": 20, "max_depth": 3, "max_leaf_nodes": None}),
        ("Regressor", np.exp(VALUES), {"loss": "poisson", "categorical_features": [3]}),
        ("Regressor", np.exp(VALUES), {"loss": "gamma", "max_features": 0.5}),
        ("Regressor", VALUES, {"monotonic_cst": [1, 0, 0, 0, -1], "interaction_cst": [[0, 1]]}),
        ("Regressor", VALUES, {"early_stopping": True, "validation_fraction": None}),
        ("Classifier", CLASSES, {"class_weight": "balanced", "l2_regularization": 1.0}),
        ("Classifier", CLASSES > 1, {"min_samples_leaf": 5}),
    ],
    ids=["depth", "poisson", "gamma", "constraints", "scores", "multinomial", "binary"],
)
def test_the_model_is_the_same_bit_by_bit_for_every_cut(
    kind: str, y: Any, options: dict[str, Any], is_weighted: bool
) -> None:
    arrays = (X, y, WEIGHTS) if is_weighted else (X, y)
    fit = boosted(kind, **options)
    [alone] = on_shards([arrays], fit)
    assert len({tree.nodes.tobytes() for trees in alone._predictors for tree in trees}) > 3
    order = np.random.default_rng(1).permutation(NUM)
    for at in ([150], [1, 1, 400]):  # a rank without samples, and one with a single one
        for model in on_shards(cut(*arrays, rows=np.split(order, at)), fit):
            assert bits(model) == bits(alone)


def test_early_stopping_is_the_same_for_every_cut_into_ranges() -> None:
    fit = boosted(
        *("Classifier",),
        **{"early_stopping": True, "max_iter": 100, "n_iter_no_change": 2, "learning_rate": 0.5},
    )
    [alone] = on_shards([(X, CLASSES)], fit)
    assert 2 < alone.n_iter_ < 100
    assert len(alone.validation_score_) == alone.n_iter_ + 1
    best = alone.validation_score_[-3]
    assert (alone.validation_score_[-2:] <= best + alone.tol).all(), "no better for two iterations"
    for at in ([150], [0, 7, 400]):
        rows = np.split(np.arange(NUM), at)
        for model in on_shards(cut(X, CLASSES, rows=rows), fit):
            assert bits(model) == bits(alone)


def test_the_samples_for_validation_are_the_fraction_that_was_asked_for() -> None:
    for fraction, num in ((0.1, 60), (0.4, 240), (37, 37), (0.9999, NUM - 1)):
        options = {"early_stopping": True, "validation_fraction": fraction, "max_iter": 1}
        [model] = on_shards([(X, VALUES)], boosted("Regressor", **options))
        assert model._predictors[0][0].nodes["count"][0] == NUM - num


def test_a_worker_that_is_started_again_keeps_its_samples_for_validation() -> None:
    def fit(ctx: DistributedContext, shard: Any) -> list[int]:
        model = estimators.HistGradientBoostingRegressor(
            early_stopping=True, max_iter=2, random_state=3, ctx=ctx
        )
        before, again = (BoostingFit(model, ctx, *shard) for _ in range(2))
        state = {"seed": 3, "trees": [], "train": [], "validation": []}
        for stage in (before._compare, before._bin):
            state = stage(state)
        chosen = [np.flatnonzero(each._data(state)[3]).tolist() for each in (before, again)]
        assert chosen[0] == chosen[1]
        newcomer = {**state, "starts": {}}
        assert not again._data(newcomer)[3].any()
        return list(chosen[0])

    found = on_shards(cut(X, VALUES, rows=np.split(np.arange(NUM), [150])), fit)
    assert sum(map(len, found)) == 60
    assert min(map(len, found)) > 10


def test_a_model_of_weighted_samples_has_no_partial_dependence_by_counts() -> None:
    [model] = on_shards([(X, VALUES, WEIGHTS)], boosted("Regressor"))
    with pytest.raises(NotImplementedError, match="sample weights"):
        model._compute_partial_dependence_recursion(np.zeros((1, 1)), np.array([0]))


# ---------------------------------------------------------------- scikit-learn's trees


@pytest.mark.parametrize(
    ("kind", "y", "options"),
    [
        ("Regressor", VALUES, {"categorical_features": [3]}),
        ("Regressor", np.exp(VALUES), {"loss": "poisson", "categorical_features": [3]}),
        ("Regressor", VALUES, {"max_leaf_nodes": None, "max_depth": 4, "l2_regularization": 2.0}),
        ("Classifier", CLASSES, {"categorical_features": [3]}),
        ("Classifier", CLASSES > 1, {"monotonic_cst": [1, 0, 0, 0, 0]}),
    ],
    ids=["categories", "poisson", "depth", "multinomial", "monotonic"],
)
def test_predictions_are_those_of_scikit_learn(kind: str, y: Any, options: dict[str, Any]) -> None:
    """Each feature has fewer values than bins, so both have the same bins; weights leave no splits
    that are equally good."""
    rows = slice(0, 240)
    arrays = X[rows], y[rows], WEIGHTS[rows]
    own = boosted(kind, early_stopping=False, **options)
    model = on_shards(cut(*arrays, rows=[slice(0, 90), slice(90, 240)]), own)[0]
    other = getattr(ensemble, f"HistGradientBoosting{kind}")(
        **{"max_iter": 4, "max_leaf_nodes": 8, "early_stopping": False} | options
    ).fit(*arrays)
    raw = other._raw_predict(X)
    assert model._raw_predict(X) == pytest.approx(raw, abs=1e-5 * np.abs(raw).max())
    assert np.array_equal(model.is_categorical_, other.is_categorical_)


def test_the_accuracy_is_that_of_scikit_learn_on_five_data_sets() -> None:
    """Of samples that were not trained on: within 0.3 points (of the explained variance in a
    regression)."""
    for load, kind, max_iter in (
        (datasets.load_breast_cancer, "Classifier", 10),
        (datasets.load_wine, "Classifier", 10),
        (datasets.load_iris, "Classifier", 10),
        (partial(datasets.load_digits, n_class=4), "Classifier", 2),
        (datasets.load_diabetes, "Regressor", 20),
    ):
        data, target = load(return_X_y=True)
        found = []
        for library in (estimators, ensemble):
            model = getattr(library, f"HistGradientBoosting{kind}")(max_iter=max_iter)
            rows = [
                (model.fit(data[training], target[training]).predict(data[test]), target[test])
                for seed in range(3)
                for training, test in KFold(3, shuffle=True, random_state=seed).split(data)
            ]
            predicted, wanted = map(np.concatenate, zip(*rows, strict=True))
            wrong = np.mean((predicted - wanted) ** 2) / target.var()
            found.append(np.mean(predicted != wanted) if is_classifier(model) else wrong)
        assert abs(found[0] - found[1]) < 0.003, str(load)


# ---------------------------------------------------------------- categories and missing values


def test_categories_are_those_of_all_shards_and_unknown_ones_count_as_missing() -> None:
    pandas = pytest.importorskip("pandas")
    names = RANDOM.choice(["ash", "beech", "cedar", "oak"], NUM)
    height = RANDOM.normal(size=NUM)
    values = np.where(np.isin(names, ["ash", "oak"]), 1.0, -1.0) + 0.1 * height

    def frame(which: Any) -> Any:
        return pandas.DataFrame({"height": height[which], "kind": pandas.Categorical(names[which])})

    low = names < "c"
    shards = [(frame(own), values[own]) for own in (low, ~low)]
    fit = boosted("Regressor", min_samples_leaf=2, learning_rate=1.0, max_iter=2)
    whole, other = on_shards(shards, fit)
    assert bits(whole) == bits(other)
    assert whole.score(frame(slice(None)), values) > 0.95
    strange = pandas.DataFrame({"height": [0.5], "kind": ["yew"]})
    missing = pandas.DataFrame({"height": [0.5], "kind": [None]})
    assert whole.predict(strange) == whole.predict(missing)
    again = pickle.loads(pickle.dumps(whole))  # noqa: S301 (made here)
    assert np.array_equal(again.predict(frame(low)), whole.predict(frame(low)))


def test_missing_values_that_one_rank_has_go_where_they_gain_most() -> None:
    samples = np.arange(200.0)[:, None]
    values = np.where(samples[:, 0] < 100, 0.0, 5.0)
    samples[150:] = np.nan
    options = {"learning_rate": 1.0, "max_iter": 1}
    for model in on_shards(
        cut(samples, values, rows=[slice(0, 120), slice(120, 200)]), boosted("Regressor", **options)
    ):
        assert model.predict([[0.0], [120.0], [np.nan]]) == pytest.approx([0.0, 5.0, 5.0], abs=1e-5)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("kind", "options", "shard", "message"),
    [
        (
            "Regressor",
            {"loss": "quantile"},
            (X, VALUES),
            "'loss' parameter of HistGradientBoosting",
        ),
        ("Regressor", {"loss": "gamma"}, (X, VALUES), "loss='gamma' needs y > 0"),
        ("Regressor", {"max_bins": 256}, (X, VALUES), "'max_bins' parameter of HistGradient"),
        ("Regressor", {"interaction_cst": [[9]]}, (X, VALUES), "Interaction constraints must"),
        ("Regressor", {}, (X, VALUES[:7]), "inconsistent numbers of samples"),
        ("Regressor", {}, (X, np.full(NUM, np.inf)), "Input y contains infinity"),
        ("Regressor", {}, (X[:, :2], VALUES), "has 5 features, that of rank 1 (worker 1) has 2"),
        ("Classifier", {"monotonic_cst": [1, 0, 0, 0, 0]}, (X, CLASSES), "not supported for multi"),
        (
            *("Regressor", {"categorical_features": [3], "monotonic_cst": [0, 0, 0, 1, 0]}),
            *((X, VALUES), "Categorical features cannot have monotonic constraints"),
        ),
        (
            *("Regressor", {"categorical_features": [2], "max_bins": 99}, (X, VALUES)),
            "Categorical feature at index 2 is expected to have a cardinality <= 99",
        ),
        (
            *("Regressor", {"learning_rate": 1e30, "loss": "poisson"}, (X, np.exp(VALUES))),
            "the loss has overflowed: lower the learning_rate",
        ),
    ],
    ids=[
        *("loss", "range", "bins", "interactions", "short", "y", "features", "monotonic", "both"),
        *("categories", "overflow"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_input_that_does_not_fit_is_one_error_on_every_rank(
    kind: str, options: dict[str, Any], shard: Any, message: str
) -> None:
    y = CLASSES if kind == "Classifier" else np.exp(VALUES)
    assert message in refusal([(X, y), shard], boosted(kind, **options))


def test_frames_with_categories_in_other_features_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    plain = pandas.DataFrame({"a": [0, 1] * 30, "b": [1, 0] * 30})
    shards = [(plain.astype({name: "category"}), np.arange(60.0)) for name in "ab"]
    assert "categories in different features" in refusal(shards, boosted("Regressor"))


@pytest.mark.parametrize(
    ("values", "kinds"), [([(0,), (1,)], "tuple"), ([0, "a"], "int, str"), ([b"a", b"b"], "bytes")]
)
def test_categories_that_are_neither_text_nor_numbers_are_refused(values: Any, kinds: str) -> None:
    pandas = pytest.importorskip("pandas")
    odd = pandas.DataFrame({"a": pandas.Series([values[0], values[1]] * 30, dtype="object")})
    shards = [(odd, np.arange(60.0))] * 2
    fit = boosted("Regressor", categorical_features=[0])
    assert f"the categories of feature 0 are of the types {kinds}" in refusal(shards, fit)


def test_constraints_that_differ_between_ranks_are_refused() -> None:
    def fit(ctx: DistributedContext, shard: Any) -> Any:
        options = {"monotonic_cst": np.array([1 - ctx.rank, 0, 0, 0, 0])}
        return boosted("Regressor", **options)(ctx, shard)

    assert "the ranks have different values of monotonic_cst" in refusal([(X, VALUES)] * 2, fit)


@pytest.mark.parametrize(("kind", "fraction"), [("training", NUM - 1), ("validation", 1)])
def test_samples_of_one_kind_without_weight_are_refused(kind: str, fraction: int) -> None:
    weights = (np.arange(NUM) == 0).astype(float)
    fit = boosted("Regressor", early_stopping=True, validation_fraction=fraction)
    shards = cut(X, VALUES, weights, rows=np.split(np.arange(NUM), [150]))
    assert f"the samples for {kind} have no weight" in refusal(shards, fit)


def test_no_samples_on_all_ranks_are_refused() -> None:
    shards = [(X[:0], VALUES[:0])] * 2
    assert "Found array with 0 sample(s)" in refusal(shards, boosted("Regressor"))
