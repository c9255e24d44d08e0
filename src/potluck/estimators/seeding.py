"""What fits of k-means share: the shard, and the first centers, which are chosen from gathered
samples, by k-means||, or at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn import cluster
from sklearn.cluster import kmeans_plusplus
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads

from potluck.estimators.assigning import assign, distances
from potluck.estimators.rounds import Fit
from potluck.estimators.shards import Array, Shard, moments, totals_of, weights_of
from potluck.training.transfer import gather_states

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

GATHERED_BYTES = 8 << 20
"""Data sets up to this size are gathered on every rank, where k-means|| would only add rounds."""

_ROUNDS = 5
_OVERSAMPLING = 2.0
"""Rounds, and candidates per round as a multiple of k (Bahmani et al. 2012, section 5.3)."""


def num_starts(init: Any, n_init: Any, *, auto: int) -> int:
    """How many first centers are tried, by scikit-learn's rules; ``auto``: the number for
    ``n_init="auto"`` where they are drawn at random."""
    if not isinstance(init, str):
        return 1
    if n_init == "auto":
        return auto if init == "random" else 1
    return int(n_init)


class ClusterFit(Fit):
    """A fit of cluster centers: ``is_first`` if the model has none yet; ``needs_moments`` of the
    samples for its tolerance."""

    is_first = needs_moments = True

    def make_shard(self, X: Any, y: Any, weights: Any) -> Shard:
        model = self.model
        X = self.checked(X, order="C", reset=self.is_first)
        model._n_threads = _openmp_effective_n_threads()
        weights = weights_of(weights, X)
        found, wanted = np.shape(model.init), (model.n_clusters, X.shape[1])
        if not isinstance(model.init, str) and found != wanted:
            raise ValueError(f"init has shape {found}; for these samples it must be {wanted}")
        facts = {"moments": moments(X).packed()} if self.needs_moments else {}
        return Shard(X, weights=weights, facts=facts)

    def check_enough(self, rows: list[dict[str, Any]]) -> None:
        """ValueError if the samples of all ranks are fewer than the clusters."""
        num, k = sum(row["num"] for row in rows), self.model.n_clusters
        if num < k:
            raise ValueError(f"n_samples={num} should be >= n_clusters={k}.")


def gathered(ctx: DistributedContext, X: Array, weights: Array) -> tuple[Array, Array]:
    """All samples and weights in rank order."""
    rows = gather_states(ctx, {"X": X, "weights": weights})
    return (
        np.concatenate([row["X"] for row in rows]),
        np.concatenate([row["weights"] for row in rows]),
    )


def choose(k: int, init: str, X: Array, weights: Array, random: Any) -> Array:
    """Choose k of the samples as scikit-learn does, from the same random numbers."""
    if init == "random":
        picked = random.choice(len(X), size=k, replace=False, p=weights / weights.sum())
        return np.ascontiguousarray(X[picked])
    return np.asarray(kmeans_plusplus(X, k, sample_weight=weights, random_state=random)[0])


def sample(ctx: DistributedContext, k: int, X: Array, weights: Array, seed: list[int]) -> Array:
    """k samples of all ranks without replacement, with probabilities by weight.

    Every sample gets a key; the largest keys win (Efraimidis and Spirakis 2006, "Weighted random
    sampling with a reservoir"). Cost: one all_gather of ``8 k (features + 1)`` bytes per rank.
    """
    random = np.random.RandomState([*seed, ctx.rank])
    mine = np.full((k, 1 + X.shape[1]), -np.inf)
    if len(X):
        with np.errstate(divide="ignore"):
            keys = np.log(random.random_sample(len(X))) / weights
        best = np.argsort(-keys, kind="stable")[:k]
        mine[: len(best)] = np.column_stack([keys[best], X[best]])
    rows = ctx.all_gather(mine).reshape(-1, mine.shape[1])
    winners = rows[np.argsort(-rows[:, 0], kind="stable")[:k]]
    return np.asarray(winners[np.isfinite(winners[:, 0]), 1:], X.dtype)


def k_means_parallel(
    ctx: DistributedContext, k: int, X: Array, weights: Array, seed: list[int]
) -> Array:
    """The centers of k-means|| (Bahmani et al. 2012, algorithm 2), of shape (k, features).

    Each round draws about 2 k samples with probabilities by their squared distance from the
    candidates so far. Rank 0 then reduces the candidates, weighted by the samples next to them, to
    k by scikit-learn's k-means.
    """
    random = np.random.RandomState([*seed, ctx.rank, 1])
    candidates = sample(ctx, 1, X, weights, [*seed, 0])
    labels = np.zeros(len(X), np.int32)
    away = distances(X, candidates, labels)
    for _ in range(_ROUNDS):
        cost = ctx.all_reduce(np.array([weights @ away], np.float64))[0]
        if not cost > 0:
            break  # fewer distinct samples than candidates
        chance = _OVERSAMPLING * k * weights * away / cost
        picked = X[random.random_sample(len(X)) < chance]
        new = np.concatenate([row["X"] for row in gather_states(ctx, {"X": picked})])
        if len(new):
            candidates = np.concatenate([candidates, new])
            assign(X, new, labels)
            np.minimum(away, distances(X, new, labels), out=away)
    if len(candidates) < k:
        others = sample(ctx, k - len(candidates), X, weights, [*seed, 2])
        candidates = np.concatenate([candidates, others])
    assign(X, candidates, labels)
    counts = totals_of(labels, weights, len(candidates))
    ctx.all_reduce(counts)
    centers = np.zeros((k, X.shape[1]), X.dtype)
    if ctx.is_master:
        reduced = cluster.KMeans(k, n_init=1, random_state=random)
        centers[:] = reduced.fit(candidates, sample_weight=counts).cluster_centers_
    return np.asarray(ctx.broadcast(centers))
