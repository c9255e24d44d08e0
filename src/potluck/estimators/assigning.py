"""One rank's part of a Lloyd iteration, by scikit-learn's kernel: labels, sums and counts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from sklearn.cluster._k_means_lloyd import lloyd_iter_chunked_dense
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads
from sklearn.utils.parallel import _get_threadpool_controller

from potluck.estimators.shards import Array, blocks

_ROWS = 1 << 20
"""Rows that are summed in the dtype of the samples; sums of such blocks are added in float64."""


def one_blas_thread() -> AbstractContextManager[object]:
    """A block whose BLAS takes one thread: scikit-learn's kernel runs threads of its own."""
    limit: AbstractContextManager[object] = _get_threadpool_controller().limit(
        limits=1, user_api="blas"
    )
    return limit


@dataclass(frozen=True)
class Shares:
    """A shard's part of the next centers: ``sums`` (k, features) and ``counts`` (k,) of weights,
    both float64."""

    sums: Array
    counts: Array


def assign(X: Array, centers: Array, labels: Array) -> None:
    """Write the number of the nearest center of each row into ``labels``, int32."""
    if len(X):
        weights = np.ones(len(X), X.dtype)
        counts, shift = np.zeros(len(centers), X.dtype), np.zeros(len(centers), X.dtype)
        lloyd_iter_chunked_dense(
            *(X, weights, centers, np.zeros_like(centers), counts, labels, shift),
            n_threads=_openmp_effective_n_threads(),
            update_centers=False,
        )


def nearest(X: Array, weights: Array, centers: Array) -> tuple[Array, float]:
    """The number of the nearest center of each row, int32, and the inertia."""
    labels = np.zeros(len(X), np.int32)
    assign(X, centers, labels)
    return labels, float(weights @ distances(X, centers, labels))


def assign_and_sum(X: Array, weights: Array, centers: Array, labels: Array) -> Shares:
    """``assign``, and the shares of this shard in the same pass over the samples."""
    k = len(centers)
    total = Shares(np.zeros(centers.shape), np.zeros(k))
    for rows in blocks(len(X), _ROWS):
        part, some, mine = X[rows], weights[rows], labels[rows]
        if len(part) <= k:  # the kernel needs more samples than clusters
            assign(part, centers, mine)
            total.sums[:] += _sums(part, some, mine, k)
            total.counts[:] += np.bincount(mine, weights=some, minlength=k)
            continue
        means, counts = np.zeros_like(centers), np.zeros(k, X.dtype)
        shift = np.zeros(k, X.dtype)
        lloyd_iter_chunked_dense(
            *(part, some, centers, means, counts, mine, shift),
            n_threads=_openmp_effective_n_threads(),
            update_centers=True,
        )
        # For a cluster without samples in this block the kernel takes the sample that is farthest
        # away. That is for all ranks to decide: count such a block again.
        if counts.min() <= some.max():
            found = np.bincount(mine, weights=some, minlength=k)
            if not found.all():
                total.sums[:] += _sums(part, some, mine, k)
                total.counts[:] += found
                continue
        total.sums[:] += means.astype(np.float64) * counts.astype(np.float64)[:, None]
        total.counts[:] += counts
    return total


def _sums(X: Array, weights: Array, labels: Array, k: int) -> Array:
    columns = np.arange(len(X) + 1, dtype=np.int32)
    picked = sparse.csc_matrix((weights, labels, columns), shape=(k, len(X)))
    return np.asarray(picked @ X, np.float64)


def distances(X: Array, centers: Array, labels: Array) -> Array:
    """The squared distance of each row from the center of its label, float64 of shape (n,)."""
    found = np.empty(len(X))
    for rows in blocks(len(X)):
        away = X[rows] - centers[labels[rows]]
        found[rows] = np.einsum("ij,ij->i", away, away)
    return found


def relocate(shares: Shares, far: Array) -> None:
    """Give each cluster without samples the farthest sample, in place, as scikit-learn does.

    ``far`` has shape (m, 3 + features): the candidates of all ranks, each with its squared distance
    from its center, its weight, its cluster and its coordinates.
    """
    empty = np.flatnonzero(shares.counts == 0)
    order = np.argsort(-far[:, 0], kind="stable")
    for cluster, candidate in zip(empty, far[order], strict=False):
        distance, weight, old = candidate[:3]
        if not distance > 0 or not weight > 0:
            return
        shares.sums[int(old)] -= weight * candidate[3:]
        shares.counts[int(old)] -= weight
        shares.sums[cluster] = weight * candidate[3:]
        shares.counts[cluster] = weight


def farthest(X: Array, weights: Array, centers: Array, labels: Array, num: int) -> Array:
    """This rank's candidates for ``relocate``, of shape (num, 3 + features); zeros where the shard
    has fewer samples."""
    found = np.zeros((num, 3 + X.shape[1]))
    if len(X) and num:
        away = distances(X, centers, labels)
        far = np.argsort(-away, kind="stable")[:num]
        found[: len(far)] = np.column_stack([away[far], weights[far], labels[far], X[far]])
    return found
