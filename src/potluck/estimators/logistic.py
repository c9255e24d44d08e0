"""Logistic regression: the gradient of all shards by one all_reduce per evaluation."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from scipy.special import expit, log_softmax, softmax
from sklearn import linear_model
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from potluck._core.context import DistributedContext
from potluck.estimators import classes, lbfgs
from potluck.estimators.rounds import DONE, Stage, State, context_of, from_first
from potluck.estimators.shards import (
    Array,
    OnShards,
    Shard,
    common_dtype,
    weights_of,
)


class LogisticRegression(OnShards, linear_model.LogisticRegression):
    """Classification by logistic regression on samples that are split among the ranks.

    scikit-learn's ``LogisticRegression`` with its L2 penalty, multinomial for more than two
    classes. The coefficients are those of scikit-learn on the union of the shards, as far as
    ``tol``, the largest entry of the gradient at the end, determines them. A class may be missing
    on a shard. ``predict`` and its kin are local. ``ctx`` is the context of the group; if None,
    that of ``potluck.init()``. Sparse input is not supported.

    Method: L-BFGS in float64. Cost of an iteration: mostly one evaluation, an all_reduce and a
    broadcast of ``8 (features + 1) classes`` bytes (for two classes half of that) and a vote.
    """

    def __init__(
        self,
        *,
        C: float = 1.0,
        tol: float = 1e-4,
        fit_intercept: bool = True,
        class_weight: Any = None,
        max_iter: int = 100,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LogisticRegression:
        """Find the coefficients from all ranks' ``X``, of shape (n, features), and ``y``, of shape
        (n,). A collective call. ``sample_weight`` has shape (n,)."""
        with context_of(self.ctx) as ctx:
            last = _Fit(self, ctx, X, y, sample_weight).run()
        self.classes_ = classes.classes_of(last)
        dtype = np.dtype(last["dtype"])
        found = last["search"]["at"].reshape(last["shape"]).astype(dtype)
        self.coef_ = np.ascontiguousarray(found[:, : self.n_features_in_])
        self.intercept_ = found[:, -1] if self.fit_intercept else np.zeros(len(found), dtype)
        self.n_iter_ = np.array([last["search"]["iterations"]], np.int32)
        is_stuck = not self.n_iter_[0] and np.abs(last["search"]["gradient"]).max() > self.tol
        if is_stuck or not last["converged"]:
            warnings.warn(
                f"L-BFGS failed to converge after {self.n_iter_[0]} iterations: raise max_iter, or "
                "scale the data",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class for each row of ``X``: shape (n, classes)."""
        check_is_fitted(self)
        scores = self.decision_function(X)
        if scores.ndim == 1:
            positive = expit(scores)
            return np.column_stack([1 - positive, positive])
        return np.asarray(softmax(scores, axis=1))


class _Fit(classes.ClassFit):
    def stages(self) -> dict[str, Stage]:
        return {"weigh": self._weigh, "search": self._search}

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        found = classes.union(rows)
        known = found["classes"]
        if len(known) < 2:
            raise ValueError(
                "This solver needs samples of at least 2 classes in the data, but the data "
                f"contains only one class: {known[0]!r}"
            )
        num_rows = 1 if len(known) == 2 else len(known)
        return {
            **found,
            "stage": "weigh",
            "shape": [num_rows, rows[0]["features"] + bool(self.model.fit_intercept)],
            "dtype": common_dtype(rows).name,
        }

    def _weigh(self, state: State) -> State:
        """The weight of each class's samples, which "balanced" weights are made of."""
        _, codes, weights = self.samples(state)
        given = self.model.class_weight
        factors, totals = classes.weigh(self.ctx, given, state, codes, weights)
        size = state["shape"][0] * state["shape"][1]
        return {
            **state,
            "stage": "search",
            "factors": factors,
            "total": math.fsum(factors * totals),
            "search": lbfgs.begin(size),
        }

    def _search(self, state: State) -> State:
        """One evaluation of loss and gradient, at the point that the last one led to."""
        search, model = state["search"], self.model
        at = lbfgs.trial(search)
        message = self._evaluate(state, at.reshape(state["shape"])) / state["total"]
        self.ctx.all_reduce(message)
        coefficients = at.reshape(state["shape"]).copy()
        if model.fit_intercept:
            coefficients[:, -1] = 0  # the intercept is not penalized
        strength = 1 / (model.C * state["total"])
        gradient = message[1:] + strength * coefficients.ravel()

        def decision() -> Array:
            value = message[0] + strength / 2 * float(np.sum(coefficients**2))
            return np.array([value, *lbfgs.decide(search, value, gradient, model.tol)])

        found = from_first(self.ctx, decision, (4 + len(at),))
        after, ends = lbfgs.advance(search, float(found[0]), gradient, found[1:])
        is_last = ends or after["iterations"] >= model.max_iter
        return {
            **state,
            "stage": DONE if is_last else "search",
            "search": after,
            "converged": ends,
            "loss": after["value"],
        }

    def _evaluate(self, state: State, at: Array) -> Array:
        """This shard's sums of the losses and of their gradient, in one array."""
        X, codes, weights = self.samples(state)
        weights = weights * state["factors"][codes]
        features = X.shape[1]
        scores = X @ at[:, :features].T.astype(X.dtype)
        scores = scores.astype(np.float64)
        if self.model.fit_intercept:
            scores += at[:, -1]
        if len(at) == 1:
            score = scores[:, 0]
            loss = float(weights @ (np.logaddexp(0, score) - codes * score))
            away = (weights * (expit(score) - codes))[:, None]
        else:
            logs = log_softmax(scores, axis=1) if len(X) else scores
            numbers = np.arange(len(X))
            loss = -float(weights @ logs[numbers, codes])
            away = np.exp(logs)
            away[numbers, codes] -= 1
            away *= weights[:, None]
        gradient = np.empty(at.shape)
        gradient[:, :features] = away.T.astype(X.dtype) @ X
        if self.model.fit_intercept:
            gradient[:, -1] = away.sum(axis=0)
        return np.concatenate([[loss], gradient.ravel()])

    def make_shard(self, X: Any, y: Any, weights: Any) -> Shard:
        X, y = self.checked(X, y, order="C")
        labels = classes.checked_labels(y)
        return Shard(X, labels, weights_of(weights, X), classes.facts_of(labels))
