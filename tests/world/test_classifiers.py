"""Classifiers and regressors on shards: the results of scikit-learn, classes that a shard lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn import ensemble, linear_model, neural_network
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.preprocessing import scale

from potluck import estimators
from potluck._core.context import DistributedContext
from support.shards import on_shards, refusal

DIGITS, CANCER, DIABETES = (load() for load in (load_digits, load_breast_cancer, load_diabetes))
X, Y = DIGITS.data / 16, DIGITS.target
Fit = Callable[[DistributedContext, Any], Any]


def cut(*arrays: Any, at: list[int]) -> list[Any]:
    """(X, y, ...) of each rank."""
    return list(zip(*(np.split(array, at) for array in arrays), strict=True))


# ---------------------------------------------------------------- logistic regression


@pytest.mark.parametrize(
    ("data", "options", "at"),
    [
        (DIGITS, {}, [200]),
        (CANCER, {}, [0, 1]),
        (CANCER, {"class_weight": "balanced"}, [200]),
        (CANCER, {"fit_intercept": False}, [200]),
    ],
    ids=["digits", "cancer", "balanced", "no-intercept"],
)
def test_logistic_regression_finds_the_coefficients_of_scikit_learn(
    data: Any, options: dict[str, Any], at: list[int]
) -> None:
    samples, names = scale(data.data), data.target_names[data.target]
    exact = {"C": 0.01, "max_iter": 1000, **options}
    expected = linear_model.LogisticRegression(solver="newton-cholesky", tol=1e-12, **exact)
    expected.fit(samples, names)
    models = on_shards(
        cut(samples, names, at=at),
        lambda ctx, shard: estimators.LogisticRegression(tol=1e-11, ctx=ctx, **exact).fit(*shard),
    )
    for model in models:
        assert model.classes_.tolist() == expected.classes_.tolist()
        assert model.coef_ == pytest.approx(expected.coef_, abs=1e-8)
        assert model.intercept_ == pytest.approx(expected.intercept_, abs=1e-8)
        assert model.predict_proba(samples) == pytest.approx(
            expected.predict_proba(samples), abs=1e-8
        )


def test_weighted_logistic_regression_finds_the_coefficients_of_scikit_learn() -> None:
    samples, y = scale(CANCER.data), CANCER.target
    weights = np.random.default_rng(0).uniform(0.1, 3, len(y))
    expected = linear_model.LogisticRegression(solver="newton-cholesky", tol=1e-12, C=0.01)
    expected.fit(samples, y, weights)
    for model in on_shards(
        cut(samples, y, weights, at=[100, 250]),
        lambda ctx, shard: estimators.LogisticRegression(
            C=0.01, tol=1e-11, max_iter=1000, ctx=ctx
        ).fit(*shard),
    ):
        assert model.coef_ == pytest.approx(expected.coef_, abs=1e-8)


# ---------------------------------------------------------------- forests


def test_a_forest_alone_is_that_of_scikit_learn_bit_by_bit() -> None:
    theirs = ensemble.RandomForestClassifier(5, random_state=3).fit(X, Y)
    ours = estimators.RandomForestClassifier(5, random_state=3).fit(X, Y)
    assert np.array_equal(ours.predict_proba(X), theirs.predict_proba(X))
    assert np.array_equal(ours.feature_importances_, theirs.feature_importances_)
    data = DIABETES.data, DIABETES.target
    regressor = ensemble.RandomForestRegressor(5, random_state=3).fit(*data)
    mine = estimators.RandomForestRegressor(5, random_state=3).fit(*data)
    assert np.array_equal(mine.predict(data[0]), regressor.predict(data[0]))


def test_every_rank_has_the_whole_forest_which_is_nearly_as_good_as_that_of_one_rank() -> None:
    train, test = slice(0, None, 2), slice(1, None, 2)
    alone = ensemble.RandomForestClassifier(30, random_state=0).fit(X[train], Y[train])
    shards = [(X[rank * 2 :: 6], Y[rank * 2 :: 6]) for rank in range(3)] + [(X[:0], Y[:0])]
    models = on_shards(
        shards,
        lambda ctx, shard: estimators.RandomForestClassifier(30, random_state=0, ctx=ctx).fit(
            *shard
        ),
    )
    for model in models:
        assert len(model.estimators_) == 30
        assert np.array_equal(model.predict_proba(X), models[0].predict_proba(X))
    assert models[0].score(X[test], Y[test]) > alone.score(X[test], Y[test]) - 0.06


def test_a_class_that_a_shard_lacks_is_a_class_of_the_whole_forest() -> None:
    low = Y < 5
    for model in on_shards(
        [(X[low], Y[low]), (X[~low], Y[~low])],
        lambda ctx, shard: estimators.RandomForestClassifier(20, random_state=0, ctx=ctx).fit(
            *shard
        ),
    ):
        assert model.classes_.tolist() == list(range(10))
        assert model.predict_proba(X).sum(axis=1) == pytest.approx(np.ones(len(X)))
        assert model.score(X, Y) > 0.8


# ---------------------------------------------------------------- perceptrons


@pytest.mark.parametrize(
    "options",
    [{}, {"solver": "sgd", "learning_rate": "adaptive", "learning_rate_init": 0.1}],
    ids=["adam", "sgd"],
)
@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
def test_a_perceptron_has_the_loss_curve_of_scikit_learn(options: dict[str, Any]) -> None:
    shape = {"hidden_layer_sizes": (30, 20), "max_iter": 5, "random_state": 0}
    expected = neural_network.MLPClassifier(**shape, **options).fit(X, Y)
    models = on_shards(
        cut(X, Y, at=[0, 500]),
        lambda ctx, shard: estimators.MLPClassifier(ctx=ctx, **shape, **options).fit(*shard),
    )
    for model in models:
        assert model.loss_curve_ == pytest.approx(expected.loss_curve_, abs=1e-10)
        for mine, theirs in zip(model.coefs_, expected.coefs_, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-10)
        assert np.array_equal(model.predict(X), expected.predict(X))


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
def test_a_perceptron_for_regression_has_the_predictions_of_scikit_learn() -> None:
    shape = {"hidden_layer_sizes": (10,), "max_iter": 20, "random_state": 0}
    data = DIABETES.data, DIABETES.target
    expected = neural_network.MLPRegressor(**shape).fit(*data).predict(data[0])
    for model in on_shards(
        cut(*data, at=[100]),
        lambda ctx, shard: estimators.MLPRegressor(ctx=ctx, **shape).fit(*shard),
    ):
        assert model.predict(data[0]) == pytest.approx(expected, abs=1e-9)


def test_a_perceptron_is_not_trained_on_one_ranks_samples_by_mistake() -> None:
    for model in (estimators.MLPClassifier(), estimators.MLPRegressor()):
        assert not hasattr(model, "partial_fit")


# ---------------------------------------------------------------- bad shards

FITS: dict[str, Fit] = {
    "LogisticRegression": lambda ctx, shard: estimators.LogisticRegression(ctx=ctx).fit(*shard),
    "RandomForestClassifier": lambda ctx, shard: estimators.RandomForestClassifier(4, ctx=ctx).fit(
        *shard
    ),
    "MLPClassifier": lambda ctx, shard: estimators.MLPClassifier(ctx=ctx).fit(*shard),
    "RandomForestRegressor": lambda ctx, shard: estimators.RandomForestRegressor(4, ctx=ctx).fit(
        *shard
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_shards_that_do_not_fit_together_are_one_error_on_every_rank(name: str) -> None:
    message = refusal([(X, Y), (X[:, :5], Y)], FITS[name])
    assert "rank 0 (worker 0) has 64 features, that of rank 1 (worker 1) has 5" in message
    assert "Found array with 0 sample(s)" in refusal([(X[:0], Y[:0])] * 2, FITS[name])
    bad = np.full_like(X, np.inf)
    assert "rank 1 (worker 1): Input X contains infinity" in refusal([(X, Y), (bad, Y)], FITS[name])
    assert "inconsistent numbers of samples" in refusal([(X, Y), (X, Y[:7])], FITS[name])


def test_labels_of_different_types_are_refused() -> None:
    message = refusal([(X, Y), (X, Y.astype(str))], FITS["LogisticRegression"])
    assert message == (
        "the shards have labels of the types int, str: give every rank labels of one type"
    )


def test_one_class_on_all_ranks_is_refused() -> None:
    message = refusal([(X, Y * 0), (X, Y * 0)], FITS["LogisticRegression"])
    assert "only one class: 0" in message
