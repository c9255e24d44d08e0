"""k-means on shards: Lloyd's algorithm, one all_reduce of sums and counts per iteration."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn import cluster
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import StrOptions

from potluck._core.context import DistributedContext
from potluck.estimators import seeding
from potluck.estimators.assigning import (
    Shares,
    assign_and_sum,
    farthest,
    nearest,
    one_blas_thread,
    relocate,
)
from potluck.estimators.rounds import DONE, Stage, State, context_of
from potluck.estimators.shards import Array, OnShards, common_dtype, merge, seed_of


class KMeans(OnShards, cluster.KMeans):
    """k-means clustering of samples that are split among the ranks.

    scikit-learn's ``KMeans``, with the same attributes after ``fit``: ``cluster_centers_``,
    ``inertia_`` and ``n_iter_`` are those of all shards together and equal on all ranks;
    ``labels_`` are those of this rank's samples. From the same first centers, the centers are those
    that scikit-learn finds on the union of the shards, to rounding. ``predict``, ``transform`` and
    ``score`` are local.

    ``init`` is ``"k-means||"`` (Bahmani et al. 2012, "Scalable k-means++"; on up to 8 MiB of data
    the samples are gathered, and scikit-learn's k-means++ chooses from them), ``"k-means++"`` (the
    same), ``"random"``, or an array of centers, of which rank 0's counts. ``ctx`` is the context of
    the group; if None, that of ``potluck.init()``. Sparse input is not supported.

    Cost of an iteration: one all_reduce of ``8 k (features + 1)`` bytes, and a vote of 48 bytes per
    rank. ValueError on all ranks if the ranks have fewer than ``n_clusters`` samples together, or
    if a shard has NaN or another number of features than the first.
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **cluster.KMeans._parameter_constraints,
        "init": [StrOptions({"k-means||", "k-means++", "random"}), "array-like"],
        "algorithm": [StrOptions({"lloyd"})],
    }

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means||",
        n_init: Any = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        verbose: int = 0,
        random_state: Any = None,
        copy_x: bool = True,
        algorithm: str = "lloyd",
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KMeans:
        """Find the centers from all ranks' ``X``, of shape (n, features), float32 or float64.

        A collective call. ``sample_weight`` has shape (n,); ``y`` is ignored.
        """
        with context_of(self.ctx) as ctx:
            _Fit(self, ctx, X, sample_weight).cluster()
        return self


class _Fit(seeding.ClusterFit):
    """One fit, and what this rank keeps of its shard between the stages."""

    def __init__(self, model: KMeans, ctx: DistributedContext, X: Any, weights: Any) -> None:
        super().__init__(model, ctx, X, weights=weights)
        self.labels: dict[tuple[int, int], Array] = {}
        """This rank's labels by run and iteration, those of the last two iterations only."""
        self.X = self.weights = self.mean = np.empty(0)

    def stages(self) -> dict[str, Stage]:
        return {"seed": self._seed, "lloyd": self._lloyd, "finish": self._finish}

    def cluster(self) -> None:
        """Fit the model."""
        model = self.model
        with one_blas_thread():
            last = self.run({"seed": seed_of(model)})
        # Of a rank that came in at the end, which has computed no round, too.
        model.cluster_centers_ = last["best_centers"] + last["mean"].astype(last["dtype"])
        model._n_features_out = len(model.cluster_centers_)
        model.labels_ = self._labels_of(last)
        model.inertia_, model.n_iter_ = last["best_inertia"], last["best_iterations"]
        if last["num_distinct"] < model.n_clusters:
            warnings.warn(
                f"Number of distinct clusters ({last['num_distinct']}) found smaller than "
                f"n_clusters ({model.n_clusters}). Possibly due to duplicate points in X.",
                ConvergenceWarning,
                stacklevel=4,
            )

    # ------------------------------------------------------------ stages

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        """The means and variances of all shards."""
        self.check_enough(rows)
        whole = merge([row["moments"] for row in rows])
        return {
            "stage": "seed",
            "dtype": common_dtype(rows).name,
            "mean": whole.mean,
            "tol": self.model.tol * float(np.mean(whole.squares / whole.num)),
            "nbytes": sum(row["num"] * row["features"] * 8 for row in rows),
        }

    def _seed(self, state: State) -> State:
        """The first centers of all runs."""
        X, weights = self._centered(state)
        model, ctx = self.model, self.ctx
        k, init = model.n_clusters, model.init
        num = seeding.num_starts(init, model.n_init, auto=10)
        starts = np.zeros((num, k, X.shape[1]), X.dtype)
        if not isinstance(init, str):
            starts[0] = np.asarray(init, X.dtype) - self.mean
            ctx.broadcast(starts)
        elif state["nbytes"] <= seeding.GATHERED_BYTES:
            whole, all_weights = seeding.gathered(ctx, X, weights)
            random = np.random.RandomState(state["seed"])
            for start in starts if ctx.is_master else ():
                start[:] = seeding.choose(k, init, whole, all_weights, random)
            ctx.broadcast(starts)
        else:
            for number, start in enumerate(starts):
                seed = [state["seed"], number]
                if init == "random":
                    start[:] = seeding.sample(ctx, k, X, weights, seed)
                else:
                    start[:] = seeding.k_means_parallel(ctx, k, X, weights, seed)
        return {
            **state,
            "stage": "lloyd",
            "starts": starts,
            "run": 0,
            "iteration": 0,
            "centers": starts[0],
            "best_inertia": None,
        }

    def _lloyd(self, state: State) -> State:
        """One iteration: one all_reduce of sums, counts, and whether any label has changed."""
        X, weights = self._centered(state)
        run, iteration, centers = state["run"], state["iteration"], state["centers"]
        k = len(centers)
        labels = np.full(len(X), -1, np.int32)
        mine = assign_and_sum(X, weights, centers, labels)
        before = self.labels.get((run, iteration - 1))
        has_changed = before is None or not np.array_equal(labels, before)
        self.labels = {(run, iteration): labels}
        if before is not None:
            self.labels[run, iteration - 1] = before  # this iteration may be repeated
        message = np.concatenate([mine.sums.ravel(), mine.counts, [float(has_changed)]])
        self.ctx.all_reduce(message)
        whole = Shares(message[: mine.sums.size].reshape(k, -1), message[mine.sums.size : -1])
        num_empty = int((whole.counts == 0).sum())
        if num_empty:
            far = farthest(X, weights, centers, labels, num_empty)
            relocate(whole, self.ctx.all_gather(far).reshape(-1, far.shape[1]))
        full = whole.counts > 0
        after = centers.copy()
        after[full] = whole.sums[full] / whole.counts[full, None]
        shift = float(np.sum((after.astype(np.float64) - centers) ** 2))
        is_settled = not message[-1]
        iteration += 1
        is_last = is_settled or shift <= state["tol"] or iteration >= self.model.max_iter
        return {
            **state,
            "stage": "finish" if is_last else "lloyd",
            "iteration": iteration,
            "centers": after,
        }

    def _finish(self, state: State) -> State:
        """The inertia of a run; the next run, or the end."""
        X, weights = self._centered(state)
        run, centers = state["run"], state["centers"]
        labels, own_inertia = nearest(X, weights, centers)
        k = len(centers)
        message = np.zeros(1 + k)
        message[0] = own_inertia
        message[1:] = np.bincount(labels, minlength=k)
        self.ctx.all_reduce(message)
        inertia = float(message[0])
        after = {**state, "run": run + 1, "iteration": 0, "loss": inertia}
        if state["best_inertia"] is None or inertia < state["best_inertia"]:
            self.labels = {(run, -1): labels}
            after["best_run"], after["best_centers"] = run, centers
            after["best_inertia"], after["best_iterations"] = inertia, state["iteration"]
            after["num_distinct"] = int((message[1:] > 0).sum())
        if run + 1 == len(state["starts"]):
            return {**after, "stage": DONE}
        return {**after, "stage": "lloyd", "centers": state["starts"][run + 1]}

    # ------------------------------------------------------------ this rank's shard

    def _centered(self, state: State) -> tuple[Array, Array]:
        """This rank's samples less the mean of all, which makes distances more accurate."""
        if not self.mean.size:
            shard = self.shard
            assert shard.weights is not None
            dtype = np.dtype(state["dtype"])
            self.mean = state["mean"].astype(dtype)
            self.X = np.subtract(shard.X, self.mean, dtype=dtype)
            self.weights = shard.weights.astype(dtype, copy=False)
        return self.X, self.weights

    def _labels_of(self, last: State) -> Array:
        labels = self.labels.get((last["best_run"], -1))
        if labels is None:  # this rank joined after that run
            labels, _ = nearest(*self._centered(last), last["best_centers"])
        return labels
