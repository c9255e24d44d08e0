"""Principal components of the covariance of all shards."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn import decomposition
from sklearn.utils._param_validation import Interval, StrOptions

from potluck._core.context import DistributedContext
from potluck.estimators.rounds import DONE, Fit, Stage, State, context_of, from_first
from potluck.estimators.shards import (
    Array,
    OnShards,
    Shard,
    blocks,
    common_dtype,
    merge,
    moments,
)


class PCA(OnShards, decomposition.PCA):
    """Principal component analysis of samples that are split among the ranks.

    scikit-learn's ``PCA``, with the same attributes after ``fit``, equal on all ranks. The
    components are eigenvectors of the covariance matrix, computed in float64; they agree with those
    of scikit-learn on the union of the shards as far as their eigenvalues are apart. Components
    whose variance is below about 1e-15 of the largest are noise. ``transform`` is local.

    ``n_components`` is a number, a fraction of the variance between 0 and 1, or None for all.
    ``ctx`` is the context of the group; if None, that of ``potluck.init()``. Sparse input is not
    supported.

    Cost: one all_reduce of ``8 features ** 2`` bytes and three votes; memory for that matrix.
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **decomposition.PCA._parameter_constraints,
        "n_components": [
            Interval(Integral, 0, None, closed="left"),
            Interval(Real, 0, 1, closed="neither"),
            None,
        ],
        "svd_solver": [StrOptions({"auto", "covariance_eigh"})],
    }

    def __init__(
        self,
        n_components: Any = None,
        *,
        copy: bool = True,
        whiten: bool = False,
        svd_solver: str = "auto",
        random_state: Any = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any = None) -> PCA:
        """Find the components of all ranks' ``X``, of shape (n, features). A collective call."""
        with context_of(self.ctx) as ctx:
            last = _Fit(self, ctx, X).run()
        self._set(last)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """``fit``, then this rank's samples transformed. A collective call."""
        return self.fit(X).transform(X)

    def _set(self, last: State) -> None:
        num, features = last["num"], len(last["mean"])
        variances = last["variances"]
        total = variances.sum()
        ratios = variances / total if total > 0 else variances
        wanted = self.n_components
        count = min(num, features) if wanted is None else wanted
        if isinstance(wanted, float | np.floating):
            count = int(np.searchsorted(np.cumsum(ratios), wanted, side="right")) + 1
        rest = variances[count : min(num, features)]
        dtype = np.dtype(last["dtype"])
        self.n_samples_, self.n_components_ = num, int(count)
        self.mean_ = last["mean"].astype(dtype)
        self.components_ = last["vectors"][:count].astype(dtype)
        self.explained_variance_ = variances[:count].astype(dtype)
        self.explained_variance_ratio_ = ratios[:count].astype(dtype)
        self.singular_values_ = np.sqrt(variances[:count] * (num - 1)).astype(dtype)
        self.noise_variance_ = float(rest.mean()) if rest.size else 0.0


class _Fit(Fit):
    min_samples = 2

    def stages(self) -> dict[str, Stage]:
        return {"covariance": self._covariance, "vectors": self._vectors}

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        num, features = sum(row["num"] for row in rows), rows[0]["features"]
        wanted, most = self.model.n_components, min(num, features)
        if isinstance(wanted, int | np.integer) and wanted > most:
            raise ValueError(
                f"n_components={wanted} must be between 0 and min(n_samples, n_features)={most}"
            )
        mean = merge([row["moments"] for row in rows]).mean
        return {"stage": "covariance", "num": num, "mean": mean, "dtype": common_dtype(rows).name}

    def _covariance(self, state: State) -> State:
        """One all_reduce of the matrix of products of the centered features."""
        shard, mean = self.shard, state["mean"]
        products = np.zeros((len(mean), len(mean)))
        for rows in blocks(len(shard.X), 1 << 14):
            away = shard.X[rows] - mean
            products += away.T @ away
        self.ctx.all_reduce(products)
        return {**state, "stage": "vectors", "covariance": products / (state["num"] - 1)}

    def _vectors(self, state: State) -> State:
        """The eigenvectors, as rank 0 finds them."""
        features = len(state["mean"])

        def decomposed() -> Array:
            values, vectors = np.linalg.eigh(state["covariance"])
            return np.vstack([np.maximum(values[::-1], 0), _with_signs(vectors[:, ::-1].T)])

        found = from_first(self.ctx, decomposed, (1 + features, features))
        after = {**state, "stage": DONE, "variances": found[0], "vectors": found[1:]}
        del after["covariance"]
        return after

    def make_shard(self, X: Any, y: Any, weights: Any) -> Shard:
        X = self.checked(X)
        return Shard(X, facts={"moments": moments(X).packed()})


def _with_signs(vectors: Array) -> Array:
    """The rows with the sign that makes their entry of largest magnitude positive."""
    largest = np.abs(vectors).argmax(axis=1)
    return np.asarray(vectors * np.sign(vectors[np.arange(len(vectors)), largest])[:, None])
