"""SGDClassifier on shards: scikit-learn's updates, the same result for every split, bad input."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn import linear_model
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning

from potluck import estimators
from potluck._core.context import DistributedContext
from potluck.estimators.sgd import LOSSES
from support.shards import on_shards, refusal

DIGITS = load_digits()
X, Y = DIGITS.data / 16, DIGITS.target
RANDOM = np.random.default_rng(0)
SMALL = RANDOM.normal(size=(60, 4))
BINARY = (SMALL[:, 0] + 0.5 * RANDOM.normal(size=60) > 0).astype(int)
THREE = np.digitize(SMALL[:, 1], [-0.5, 0.5])
SERIAL: dict[str, Any] = {"shuffle": False, "alpha": 0.01}


def pairs(x: Any, y: Any, cuts: list[int]) -> list[Any]:
    return list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))


@pytest.mark.filterwarnings("ignore:Maximum number of iteration")
@pytest.mark.parametrize(
    ("labels", "options"),
    [(BINARY, {"loss": loss, "learning_rate": "constant"}) for loss in LOSSES]
    + [(BINARY, {"loss": "hinge", "tol": 0.02})]
    + [
        (THREE, {"loss": "log_loss", "tol": 0.02}),
        (THREE, {"class_weight": "balanced", "penalty": None}),
        (BINARY, {"learning_rate": "invscaling", "eta0": 0.1, "fit_intercept": False}),
        (THREE, {"learning_rate": "adaptive", "eta0": 0.1, "tol": 0.02, "n_iter_no_change": 2}),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_batches_of_one_sample_are_the_updates_of_scikit_learn(
    labels: Any, options: dict[str, Any]
) -> None:
    options = SERIAL | {"max_iter": 8, "tol": None} | options
    weights = np.linspace(0.5, 2, len(SMALL)) if options["tol"] is None else np.ones(len(SMALL))
    expected = linear_model.SGDClassifier(**options).fit(SMALL, labels, sample_weight=weights)

    def fit(ctx: DistributedContext, shard: Any) -> Any:
        x, y, w = shard
        return estimators.SGDClassifier(batch_size=1, ctx=ctx, **options).fit(x, y, sample_weight=w)

    cuts = [25, 25]  # the second rank has no samples
    parts = zip(*(np.split(each, cuts) for each in (SMALL, labels, weights)), strict=True)
    for model in on_shards(list(parts), fit):
        assert model.n_iter_ == expected.n_iter_
        assert model.coef_ == pytest.approx(expected.coef_, abs=1e-9)
        assert model.intercept_ == pytest.approx(expected.intercept_, abs=1e-9)
        assert np.array_equal(model.predict(SMALL), expected.predict(SMALL))


def test_every_split_of_the_samples_gives_the_same_classifier() -> None:
    """Also one in which each rank lacks most classes."""
    order = np.argsort(Y, kind="stable")
    x, y = X[order], Y[order]

    def fit(ctx: DistributedContext, shard: Any) -> Any:
        model = estimators.SGDClassifier("log_loss", random_state=0, max_iter=5, tol=None, ctx=ctx)
        return model.fit(*shard)

    [alone] = on_shards([(x, y)], fit)
    assert alone.score(X, Y) > 0.9
    for cuts in ([900], [1, 1500]):
        for model in on_shards(pairs(x, y, cuts), fit):
            assert model.classes_.tolist() == list(range(10))
            assert model.coef_ == pytest.approx(alone.coef_, abs=1e-9)
            assert model.predict_proba(X[:9]) == pytest.approx(alone.predict_proba(X[:9]))


def test_a_lasso_penalty_removes_features_that_say_nothing() -> None:
    def fit(ctx: DistributedContext, shard: Any) -> Any:
        model = estimators.SGDClassifier(
            "log_loss", penalty="l1", alpha=0.05, random_state=0, batch_size=10, ctx=ctx
        )
        return model.fit(*shard)

    for model in on_shards(pairs(SMALL, BINARY, [30]), fit):
        assert model.coef_[0, 0] > 0.5
        assert np.count_nonzero(model.coef_) < 4


def test_calls_of_partial_fit_are_the_epochs_of_a_fit() -> None:
    options = {"shuffle": False, "batch_size": 16, "tol": None}

    def fit(ctx: DistributedContext, shard: Any) -> Any:
        x, y = shard
        whole = estimators.SGDClassifier(max_iter=3, ctx=ctx, **options).fit(x, y)
        model = estimators.SGDClassifier(ctx=ctx, **options)
        for _ in range(3):
            model.partial_fit(x, y, classes=range(10))
        return whole, model

    for whole, model in on_shards(pairs(X, Y, [700]), fit):
        assert model.coef_ == pytest.approx(whole.coef_, abs=1e-12)
        assert model.t_ == whole.t_


def test_too_few_epochs_are_a_warning_and_not_a_failure() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_shards(
            pairs(X, Y, [700]),
            lambda ctx, shard: estimators.SGDClassifier(max_iter=1, ctx=ctx).fit(*shard),
        )
    assert {each.category for each in caught} == {ConvergenceWarning}


# ---------------------------------------------------------------- bad input


def test_one_class_on_all_ranks_is_refused() -> None:
    message = refusal(
        [(X[:5], Y[:5] * 0), (X[5:9], Y[5:9] * 0)],
        lambda ctx, shard: estimators.SGDClassifier(ctx=ctx).fit(*shard),
    )
    assert "number of classes has to be greater than one; got 1 class" in message


def test_numbers_out_of_range_name_the_epoch() -> None:
    huge = RANDOM.normal(size=(40, 3)) * 1e200
    message = refusal(
        pairs(huge, BINARY[:40], [20]),
        lambda ctx, shard: estimators.SGDClassifier("squared_hinge", ctx=ctx).fit(*shard),
    )
    assert "under-/overflow occurred at epoch #1" in message


@pytest.mark.parametrize(
    ("classes", "text"),
    [
        (None, "classes must be passed on the first call to partial_fit"),
        ([0, 1, 2], "y has labels that are not in classes: [3, 4, 5, 6, 7, 8, 9]"),
    ],
)
def test_partial_fit_needs_the_classes_of_all_calls(classes: Any, text: str) -> None:
    message = refusal(
        pairs(X, Y, [700]),
        lambda ctx, shard: estimators.SGDClassifier(ctx=ctx).partial_fit(*shard, classes=classes),
    )
    assert text in message


def test_later_calls_must_have_the_features_of_the_first() -> None:
    def fit(ctx: DistributedContext, shard: Any) -> None:
        model = estimators.SGDClassifier(ctx=ctx)
        model.partial_fit(*shard, classes=range(10))
        model.partial_fit(shard[0][:, :5], shard[1])

    assert "X has 5 features, but SGDClassifier is expecting 64" in refusal(pairs(X, Y, [700]), fit)
