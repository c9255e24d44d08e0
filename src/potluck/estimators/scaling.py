"""Standardization by the moments of all shards."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn import preprocessing

from potluck._core.context import DistributedContext
from potluck.estimators.rounds import DONE, Fit, State, context_of
from potluck.estimators.shards import (
    Array,
    Moments,
    OnShards,
    Shard,
    merge,
    weights_of,
)


class StandardScaler(OnShards, preprocessing.StandardScaler):
    """Scale features to mean 0 and variance 1 over the samples of all ranks.

    scikit-learn's ``StandardScaler``: ``mean_``, ``var_``, ``scale_`` and ``n_samples_seen_`` are
    those of the union of the shards, to rounding, and equal on all ranks. NaN counts as missing.
    ``transform`` is local. ``ctx`` is the context of the group; if None, that of
    ``potluck.init()``. Sparse input is not supported.

    Cost: two all_gathers of 24 bytes per feature and rank, and a vote.
    """

    def __init__(
        self,
        *,
        copy: bool = True,
        with_mean: bool = True,
        with_std: bool = True,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> StandardScaler:
        """Compute mean and variance of all ranks' ``X``, of shape (n, features).

        A collective call. ``sample_weight`` has shape (n,); ``y`` is ignored.
        """
        self._reset()
        return self.partial_fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> StandardScaler:
        """Add all ranks' ``X`` to the samples seen so far. A collective call, as ``fit``."""
        with context_of(self.ctx) as ctx:
            last = _Fit(self, ctx, X, weights=sample_weight).add()
        self._set(Moments(*last["seen"]), is_weighted=last["weighted"])
        return self

    def _set(self, seen: Moments, *, is_weighted: bool) -> None:
        self._moments = seen.packed()
        dtype = np.float64 if is_weighted else np.int64
        num = seen.num.astype(dtype)
        self.n_samples_seen_ = num[0] if num.size and (num == num[0]).all() else num
        self.mean_ = seen.mean if self.with_mean or self.with_std else None
        self.var_ = self.scale_ = None
        if self.with_std:
            variance = np.divide(
                seen.squares, seen.num, out=np.zeros_like(seen.mean), where=seen.num > 0
            )
            self.var_ = variance
            self.scale_ = np.where(_is_constant(variance, seen), 1.0, np.sqrt(variance))


class _Fit(Fit):
    def add(self) -> State:
        """Add this call's samples to those of earlier calls; the last state."""
        model, shard = self.model, self._shard
        if hasattr(model, "n_samples_seen_"):
            counts = np.asarray(model.n_samples_seen_, np.float64)
            num = np.broadcast_to(counts, model._moments[0].shape)
            return self.run({"seen": np.stack([num, *model._moments[1:]])})
        return self.run({"seen": np.zeros((3, 0 if shard is None else shard.X.shape[1]))})

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        whole = merge([state["seen"], *(row["moments"] for row in rows)])
        counts = any(row["counts_samples"] for row in rows)
        return {"stage": DONE, "seen": whole.packed(), "weighted": not counts}

    def make_shard(self, X: Any, y: Any, weights: Any) -> Shard:
        X = self.checked(
            X,
            dtype=(np.float64, np.float32, np.float16),
            ensure_all_finite="allow-nan",
            reset=not hasattr(self.model, "n_samples_seen_"),
        )
        own = None if weights is None else weights_of(weights, X)
        facts = {
            "moments": moments_without_nan(X, own).packed(),
            "counts_samples": own is None,
        }
        return Shard(X, weights=own, facts=facts)


def moments_without_nan(X: Array, weights: Array | None) -> Moments:
    """The moments of each feature's known values, in float64."""
    known = ~np.isnan(X)
    each = known if weights is None else known * weights[:, None].astype(np.float64)
    num = each.sum(axis=0, dtype=np.float64)
    values = np.where(known, X, 0).astype(np.float64)
    mean = np.divide((values * each).sum(axis=0), num, out=np.zeros(X.shape[1]), where=num > 0)
    away = np.where(known, values - mean, 0)
    rest = np.divide((away * each).sum(axis=0), num, out=np.zeros(X.shape[1]), where=num > 0)
    squares = (away**2 * each).sum(axis=0) - rest**2 * num  # less the rounding of the mean
    return Moments(num, mean + rest, squares)


def _is_constant(variance: Array, seen: Moments) -> Array:
    """Whether the variance is only rounding, by scikit-learn's bound (of Chan et al. 1983)."""
    eps = np.finfo(np.float64).eps
    return variance <= seen.num * eps * variance + (seen.num * seen.mean * eps) ** 2
