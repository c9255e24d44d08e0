"""scikit-learn's own checks of estimators, in a world of one and in a world of two.

In the world of two each check's samples are cut in two, one half per rank.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn.base import BaseEstimator
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import has_fit_parameter

from potluck import estimators
from potluck._core.context import DistributedContext
from potluck.testing.world import WorldError, run_world

ESTIMATORS = [
    estimators.KMeans(n_clusters=3),
    estimators.PCA(),
    estimators.StandardScaler(),
]
SLOW = [
    estimators.HistGradientBoostingClassifier(max_iter=5),
    estimators.HistGradientBoostingRegressor(max_iter=5),
    estimators.LogisticRegression(),
    estimators.MLPClassifier(),
    estimators.MLPRegressor(),
    estimators.MiniBatchKMeans(n_clusters=3),
    estimators.RandomForestClassifier(n_estimators=5),
    estimators.RandomForestClassifier(n_estimators=5, exact=True),
    estimators.RandomForestRegressor(n_estimators=5),
    estimators.RandomForestRegressor(n_estimators=5, exact=True),
    estimators.SGDClassifier(),
]

_DRAWS = "the first centers are drawn from the samples, repeated ones are others than weighted ones"
_BOOTSTRAP = "each tree draws samples, repeated ones are others than weighted ones"
_BATCHES = "a sample that is repeated takes more places in the mini-batches than a weighted one"
_WEIGHTS = "check_sample_weight_equivalence_on_dense_data"
EXPECTED = {
    "KMeans": {_WEIGHTS: _DRAWS},
    "MiniBatchKMeans": {_WEIGHTS: _DRAWS},
    "RandomForestClassifier": {_WEIGHTS: _BOOTSTRAP},
    "RandomForestRegressor": {_WEIGHTS: _BOOTSTRAP},
    "SGDClassifier": {_WEIGHTS: _BATCHES},
}
"""Checks that are expected to fail, by estimator, with the reason (scikit-learn's own
estimators of these names fail them, too)."""


def halves(data: Any) -> tuple[Any, Any]:
    """The first and the second half of the samples; what has no samples goes to both ranks."""
    if type(data).__name__ == "_NotAnArray":  # what only converts to an array
        return tuple(type(data)(each) for each in halves(np.asarray(data)))
    try:
        middle = (len(data) + 1) // 2
        return data[:middle], data[middle:]
    except TypeError:
        return data, data


def in_two(estimator: BaseEstimator) -> BaseEstimator:
    """``estimator`` with a ``fit`` that runs on two ranks, each with one half of the samples."""
    kind = type(estimator)

    class InTwo(kind):  # type: ignore[misc, valid-type]
        def fit(self, X: Any, y: Any = None) -> Any:
            return self._fit_in_two(X, y)

        def _fit_in_two(self, X: Any, y: Any, **weights: Any) -> Any:
            parts = [halves(X), halves(y)]
            weight_parts = {name: halves(value) for name, value in weights.items()}

            def fit(ctx: DistributedContext) -> Any:
                model = kind(**self.get_params(deep=False) | {"ctx": ctx})
                own = {name: part[ctx.rank] for name, part in weight_parts.items()}
                return model.fit(*(part[ctx.rank] for part in parts), **own)

            try:
                models = run_world(2, fit)
            except WorldError as error:
                assert len(error.errors) == 2, "every rank raises"
                assert len({str(each) for each in error.errors.values()}) == 1
                raise error.errors[0] from None
            for name, value in vars(models[0]).items():
                if name.endswith("_") or name.startswith("_"):
                    setattr(self, name, value)
            if hasattr(models[0], "labels_"):
                self.labels_ = np.concatenate([model.labels_ for model in models])
            return self

        def __reduce__(self) -> Any:
            return restored, (kind, vars(self))

    class WeightedInTwo(InTwo):
        def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
            return self._fit_in_two(X, y, sample_weight=sample_weight)

    chosen = WeightedInTwo if has_fit_parameter(kind, "sample_weight") else InTwo
    chosen.__name__ = kind.__name__
    return chosen(**estimator.get_params(deep=False))


def restored(kind: type, state: dict[str, Any]) -> BaseEstimator:
    """The InTwo that was pickled: its class can't be found by its name."""
    estimator = in_two(kind())
    vars(estimator).update(state)
    return estimator


def name_of(estimator: BaseEstimator) -> str:
    return type(estimator).__name__


def id_of(estimator: BaseEstimator) -> str:
    return name_of(estimator) + ("-exact" if getattr(estimator, "exact", False) else "")


CASES = [pytest.param(each, id=id_of(each)) for each in ESTIMATORS]
CASES += [pytest.param(each, id=id_of(each), marks=pytest.mark.long) for each in SLOW]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("estimator", CASES)
def test_every_check_of_scikit_learn_passes(estimator: BaseEstimator, world_size: int) -> None:
    checked = estimator if world_size == 1 else in_two(estimator)
    expected = EXPECTED.get(name_of(estimator), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            checked, expected_failed_checks=expected, on_skip=None, on_fail=None
        )
    failed = {
        result["check_name"]: repr(result["exception"])
        for result in results
        if result["status"] == "failed"
    }
    assert failed == {}
    assert sum(result["status"] == "passed" for result in results) > 30
