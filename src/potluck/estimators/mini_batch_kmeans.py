"""k-means by mini-batches of the samples of all ranks: one all_reduce per batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from sklearn import cluster
from sklearn.utils._param_validation import StrOptions

from potluck._core.context import DistributedContext
from potluck.estimators import seeding
from potluck.estimators.assigning import nearest, one_blas_thread
from potluck.estimators.rounds import DONE, Stage, State, context_of, from_first
from potluck.estimators.shards import (
    Array,
    OnShards,
    Place,
    common_dtype,
    merge,
    place_of,
    random_of,
    restored,
    saved,
)

_STEPS = 100
"""Mini-batches of a round: at most these are repeated when a worker is lost."""

_KEYS = 624
"""Numbers in the state of a RandomState (a Mersenne Twister)."""


class MiniBatchKMeans(OnShards, cluster.MiniBatchKMeans):
    """k-means clustering by mini-batches of samples that are split among the ranks.

    scikit-learn's ``MiniBatchKMeans``. A batch has ``batch_size`` samples of all ranks together:
    the samples that scikit-learn would draw from the union of the shards with the same seed. So
    ``cluster_centers_``, ``n_steps_`` and ``inertia_`` are those of scikit-learn, to rounding,
    however the samples are split, and equal on all ranks. ``labels_`` are those of this rank's
    samples. ``predict``, ``transform`` and ``score`` are local. ``init`` is ``"k-means++"``,
    ``"random"`` or an array of centers. ``ctx`` is the context of the group; if None, that of
    ``potluck.init()``. Sparse input is not supported.

    The ``init_size`` samples that the first centers are chosen from are sent to all ranks, as are
    samples that become centers of clusters with few samples. Cost: an all_reduce of
    ``8 k (features + 1)`` bytes per batch, a vote per 100 batches, which are what a lost worker
    costs. ValueError on all ranks as for [KMeans][potluck.estimators.KMeans].
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **cluster.MiniBatchKMeans._parameter_constraints,
        "init": [StrOptions({"k-means++", "random"}), "array-like"],
    }

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        max_iter: int = 100,
        batch_size: int = 1024,
        compute_labels: bool = True,
        random_state: Any = None,
        tol: float = 0.0,
        max_no_improvement: int | None = 10,
        init_size: int | None = None,
        n_init: Any = "auto",
        reassignment_ratio: float = 0.01,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> MiniBatchKMeans:
        """Find the centers from all ranks' ``X``, of shape (n, features), float32 or float64.

        A collective call. ``sample_weight`` has shape (n,); ``y`` is ignored.
        """
        with context_of(self.ctx) as ctx:
            last = _Fit(self, ctx, X, sample_weight, is_partial=False).cluster()
        self.n_steps_ = last["step"]
        self.n_iter_ = int(np.ceil(last["step"] * last["batch_size"] / last["num"]))
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> MiniBatchKMeans:
        """Move the centers by one mini-batch, all ranks' ``X``. A collective call, as ``fit``."""
        with context_of(self.ctx) as ctx:
            last = _Fit(self, ctx, X, sample_weight, is_partial=True).cluster()
        self.n_steps_ = getattr(self, "n_steps_", 0) + 1
        self._random_state = restored(last["random"])
        return self


class _Fit(seeding.ClusterFit):
    """One fit, or one call of ``partial_fit``."""

    def __init__(
        self,
        model: MiniBatchKMeans,
        ctx: DistributedContext,
        X: Any,
        weights: Any,
        *,
        is_partial: bool,
    ) -> None:
        self.is_partial = is_partial
        self.is_first = not is_partial or not hasattr(model, "cluster_centers_")
        self.needs_moments = bool(model.tol) and not is_partial
        super().__init__(model, ctx, X, weights=weights)

    def stages(self) -> dict[str, Stage]:
        return {
            "seed": self._seed,
            "batch": self._batch,
            "batches": self._batches,
            "finish": self._finish,
        }

    def cluster(self) -> State:
        """Fit the model; the last state."""
        model = self.model
        random = getattr(model, "_random_state", None) if self.is_partial else None
        first: State = {"random": saved(random or random_of(model))}
        first |= {"centers": np.zeros((0, 0)), "counts": np.zeros(model.n_clusters), "since": 0}
        if not self.is_first:
            first["centers"] = model.cluster_centers_.copy()
            first["counts"], first["since"] = model._counts, int(model._n_since_last_reassign)
        with one_blas_thread():
            last = self.run(first)
            model.cluster_centers_ = last["centers"].copy()
            model._counts, model._n_since_last_reassign = last["counts"].copy(), last["since"]
            model._n_features_out = len(model.cluster_centers_)
            model.inertia_ = last["inertia"]
            if model.compute_labels:
                model.labels_, _ = self._labels(last["centers"])
        return last

    # ------------------------------------------------------------ stages

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        if is_first := not state["centers"].size:
            self.check_enough(rows)
        model, num, tol = self.model, sum(row["num"] for row in rows), 0.0
        if self.needs_moments:
            whole = merge([row["moments"] for row in rows])
            tol = model.tol * float(np.mean(whole.squares / whole.num))
        return {
            "stage": "seed" if is_first else "batch",
            "dtype": common_dtype(rows).name,
            "num": num,
            "weight": math.fsum(row["weight"] for row in rows),
            "tol": tol,
            "batch_size": min(model.batch_size, num),
            "step": 0,
            "mean": None,
            "best_mean": None,
            "num_worse": 0,
        }

    def _seed(self, state: State) -> State:
        """The first centers: the best of ``n_init`` choices from ``init_size`` samples."""
        model, X, k = self.model, self._samples()[0], self.model.n_clusters
        random, place = restored(state["random"]), place_of(self.ctx, len(X))
        num = place.num
        size = model.init_size or 3 * min(model.batch_size, num)
        size = min(3 * k if size < k else size, num)
        dtype = np.dtype(state["dtype"])
        tested = None if self.is_partial else self._at(random.randint(0, num, size), place)
        best, centers = np.inf, np.zeros((k, X.shape[1]))
        num_starts = seeding.num_starts(model.init, model.n_init, auto=3)
        for _ in range(1 if self.is_partial else num_starts):
            numbers = random.randint(0, num, size) if size < num else np.arange(num)
            chosen = self._at(numbers, place)

            def choice(chosen: Array = chosen, random: Any = random) -> Array:
                """The centers, their inertia, and the random numbers' state after them."""
                part = chosen[:, :-1].astype(dtype)
                if isinstance(model.init, str):
                    weights = chosen[:, -1].astype(dtype)
                    found = seeding.choose(k, model.init, part, weights, random)
                else:
                    found = np.asarray(model.init, dtype)
                inertia = 0.0 if tested is None else _inertia(tested, found, dtype)
                after = saved(random)
                return np.concatenate(
                    [found.ravel(), [inertia, after["position"]], after["keys"]], dtype=np.float64
                )

            message = from_first(self.ctx, choice, (centers.size + 2 + _KEYS,))
            inertia, position = message[centers.size : centers.size + 2]
            keys = message[centers.size + 2 :].astype(np.uint32)
            random = restored({"keys": keys, "position": int(position)})
            if inertia < best:
                best, centers = inertia, message[: centers.size].reshape(centers.shape)
        return {
            **state,
            "stage": "batch" if self.is_partial else "batches",
            "centers": np.ascontiguousarray(centers, dtype),
            "random": saved(random),
        }

    def _batch(self, state: State) -> State:
        """The batch of ``partial_fit``: all samples of all ranks."""
        X, weights = self._samples()
        place, random = place_of(self.ctx, len(X)), restored(state["random"])
        positions = np.arange(place.start, place.start + place.own)
        after, _ = self._step(state, X, weights, positions, place.num, random)
        return {**after, "stage": "finish", "random": saved(random)}

    def _batches(self, state: State) -> State:
        """Some mini-batches, drawn with probabilities by weight."""
        X, weights = self._samples()
        sums = np.cumsum(weights, dtype=np.float64)
        own = np.array([len(X), sums[-1] if len(X) else 0.0])
        parts = self.ctx.all_gather(own).reshape(-1, 2)
        num = int(parts[:, 0].sum())  # less than at the start if a worker was lost
        ends = np.cumsum(parts[:, 1])
        end = ends[self.ctx.rank]
        start = ends[self.ctx.rank - 1] if self.ctx.rank else 0.0
        size = min(state["batch_size"], num)
        last_step = self.model.max_iter * num // size
        random = restored(state["random"])
        after, is_over = {**state, "num": num, "weight": float(ends[-1])}, False
        for _ in range(_STEPS):
            drawn = np.minimum(random.random_sample(size) * ends[-1], np.nextafter(ends[-1], 0))
            positions = np.flatnonzero((drawn >= start) & (drawn < end))
            rows = np.searchsorted(sums, drawn[positions] - start, side="right")
            picked = X[np.minimum(rows, len(X) - 1)]
            ones = np.ones(len(picked), X.dtype)
            before = after["centers"]
            after, inertia = self._step(after, picked, ones, positions, size, random)
            after["step"] += 1
            shift = float(np.sum((after["centers"].astype(np.float64) - before) ** 2))
            has_converged = self._has_converged(after, shift, inertia / size, size)
            is_over = has_converged or after["step"] >= last_step
            if is_over:
                break
        stage = "finish" if is_over else "batches"
        return {**after, "stage": stage, "random": saved(random), "loss": after["mean"]}

    def _has_converged(self, now: State, shift: float, inertia: float, size: int) -> bool:
        """scikit-learn's rule, on the moving average of the batches' mean inertia. Changes
        ``now``."""
        if now["step"] == 1:
            return False
        fraction = min(2 * size / (now["num"] + 1), 1)
        mean = now["mean"]
        now["mean"] = inertia if mean is None else mean * (1 - fraction) + inertia * fraction
        if now["tol"] > 0 and shift <= now["tol"]:
            return True
        is_better = now["best_mean"] is None or now["mean"] < now["best_mean"]
        now["num_worse"] = 0 if is_better else now["num_worse"] + 1
        if is_better:
            now["best_mean"] = now["mean"]
        most = self.model.max_no_improvement
        return most is not None and now["num_worse"] >= most

    def _finish(self, state: State) -> State:
        """The inertia of all samples."""
        if not self.model.compute_labels:
            return {**state, "stage": DONE, "inertia": (state["mean"] or 0.0) * state["weight"]}
        inertia = self.ctx.all_reduce(np.array([self._labels(state["centers"])[1]]))
        return {**state, "stage": DONE, "inertia": float(inertia[0]), "loss": float(inertia[0])}

    # ------------------------------------------------------------ one step

    def _step(
        self, state: State, X: Array, weights: Array, positions: Array, size: int, random: Any
    ) -> tuple[State, float]:
        """The state after one mini-batch of ``size`` samples (Sculley 2010, algorithm 1), and the
        inertia before it. ``X`` are this rank's samples of it, at these ``positions``."""
        centers, model = state["centers"], self.model
        k, features = centers.shape
        X = X.astype(centers.dtype, copy=False)
        labels, inertia = nearest(X, weights, centers)
        message = np.zeros((k + 1, features + 1))
        message[k, 0] = inertia
        np.add.at(message[:k, :features], labels, X * weights[:, None].astype(np.float64))
        message[:k, features] = np.bincount(labels, weights=weights, minlength=k)
        self.ctx.all_reduce(message)
        found, sums = message[:k, features], message[:k, :features]
        counts, after = state["counts"] + found, centers.copy()
        hit = found > 0
        sums = centers[hit] * state["counts"][hit, None] + sums[hit]
        after[hit] = sums / counts[hit, None]
        since = state["since"] + min(model.batch_size, state["num"])
        if not state["counts"].all() or since >= 10 * k:
            since = 0
            if model.reassignment_ratio:
                few = _with_few_samples(counts, model.reassignment_ratio, size)
                if few.any():
                    chosen = random.choice(size, replace=False, size=int(few.sum()))
                    after[few] = self._rows_at(chosen, X, positions)
                    counts[few] = counts[~few].min()
        return {**state, "centers": after, "counts": counts, "since": since}, float(message[k, 0])

    def _rows_at(self, chosen: Array, X: Array, positions: Array) -> Array:
        """The samples at the positions ``chosen`` of a batch, on every rank."""
        found = np.zeros((len(chosen), X.shape[1]))
        _, at, mine = np.intersect1d(chosen, positions, assume_unique=True, return_indices=True)
        found[at] = X[mine]
        return np.asarray(self.ctx.all_reduce(found))

    def _at(self, numbers: Array, place: Place) -> Array:
        """The samples ``numbers``, with their weights in the last column, on every rank."""
        X, weights = self._samples()
        found = np.zeros((len(numbers), X.shape[1] + 1))
        positions, rows = place.rows(numbers)
        found[positions] = np.column_stack([X[rows], weights[rows]])
        return np.asarray(self.ctx.all_reduce(found))

    # ------------------------------------------------------------ this rank's shard

    def _labels(self, centers: Array) -> tuple[Array, float]:
        """The labels of this rank's samples, and their inertia."""
        X, weights = self._samples()
        return nearest(X.astype(centers.dtype, copy=False), weights, centers)

    def _samples(self) -> tuple[Array, Array]:
        assert self.shard.weights is not None
        return self.shard.X, self.shard.weights


def _with_few_samples(counts: Array, ratio: float, size: int) -> Array:
    """Which clusters have so few samples that their centers move to samples of the batch."""
    few = counts < ratio * counts.max()
    if few.sum() > size / 2:
        few[np.argsort(counts, kind="stable")[size // 2 :]] = False
    return np.asarray(few)


def _inertia(samples: Array, centers: Array, dtype: Any) -> float:
    """The inertia of samples that have their weights in the last column."""
    return nearest(np.ascontiguousarray(samples[:, :-1], dtype), samples[:, -1], centers)[1]
