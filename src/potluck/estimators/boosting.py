"""Gradient boosting of trees that grow on the samples of all ranks."""

from __future__ import annotations

from typing import Any, Self

from sklearn import ensemble
from sklearn.utils import validation
from sklearn.utils._param_validation import StrOptions

from potluck._core.context import DistributedContext
from potluck.estimators import categories
from potluck.estimators.boosting_fit import BoostingFit
from potluck.estimators.rounds import context_of
from potluck.estimators.shards import OnShards


class _Boosting(OnShards):
    """What both have in common."""

    known_categories_: list[list[Any] | None] | None
    """The categories of each feature, None for one without; None if no feature has some."""

    def _preprocess_X(self, X: Any, *, reset: bool) -> Any:
        if self.known_categories_ is None:
            return super()._preprocess_X(X, reset=reset)  # type: ignore[misc]
        X = validation.validate_data(self, X, reset=False, skip_check_array=True)
        return categories.encoded(X, self.known_categories_)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Grow the trees from all ranks' ``X``, of shape (n, features), and ``y``, of shape (n,).

        A collective call. ``sample_weight`` has shape (n,).
        """
        with context_of(self.ctx) as ctx:
            BoostingFit(self, ctx, X, y, sample_weight).grow()
        return self


class HistGradientBoostingClassifier(_Boosting, ensemble.HistGradientBoostingClassifier):
    """Gradient boosting of classification trees on the samples of all ranks.

    The trees are those of scikit-learn's estimator on the union of the shards, but for what is
    rounded or drawn at random: gradients are rounded to 22 bits (relative to the largest), features
    with more than ``max_bins`` values are split between exact quantiles of all samples, and
    validation samples and ``max_features`` are drawn from other random numbers. The model is the
    same bit by bit for every cut of the samples into shards; with early stopping for every cut into
    ranges in rank order, since the samples for validation are drawn by their numbers.

    Trees grow best first, from histograms of gradients and hessians (XGBoost: Chen and Guestrin
    2016; LightGBM: Ke et al. 2017) that are added over the ranks, each of which looks for splits by
    its part of the features. Missing values, categories (of all shards; one that is unknown in
    ``predict`` counts as missing), monotonic and interaction constraints and early stopping are
    scikit-learn's; scores are the loss. No ``warm_start``, no ``X_val``.

    ``fit`` leaves the whole model on every rank. A class may be missing on a shard. ``predict`` and
    its kin are local. ``ctx`` is the context of the group; if None, that of ``potluck.init()``.

    Cost: for each split that is tried a rank sends ``24 features (max_bins + 1)`` bytes, and takes
    part in about 15 steps of two collective calls for a tree of 31 leaves, with the trees of all
    classes at once. A lost worker costs one iteration. Memory beside the samples: a byte per value;
    30 bytes per sample and tree of an iteration; ``20 features (max_bins + 1)`` bytes per leaf;
    while bins are found, a copy of the samples.
    """

    def __init__(
        self,
        loss: str = "log_loss",
        *,
        learning_rate: float = 0.1,
        max_iter: int = 100,
        max_leaf_nodes: int | None = 31,
        max_depth: int | None = None,
        min_samples_leaf: int = 20,
        l2_regularization: float = 0.0,
        max_features: float = 1.0,
        max_bins: int = 255,
        categorical_features: Any = "from_dtype",
        monotonic_cst: Any = None,
        interaction_cst: Any = None,
        early_stopping: Any = "auto",
        validation_fraction: float | None = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-7,
        random_state: Any = None,
        class_weight: Any = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals())


class HistGradientBoostingRegressor(_Boosting, ensemble.HistGradientBoostingRegressor):
    """Gradient boosting of regression trees on the samples of all ranks.

    As [HistGradientBoostingClassifier][potluck.estimators.HistGradientBoostingClassifier]. The loss
    is ``squared_error``, ``gamma`` or ``poisson``: ``absolute_error`` and ``quantile`` need medians
    of all ranks' samples in each leaf, which are not there yet.
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **ensemble.HistGradientBoostingRegressor._parameter_constraints,
        "loss": [StrOptions({"squared_error", "gamma", "poisson"})],
    }

    def __init__(
        self,
        loss: str = "squared_error",
        *,
        learning_rate: float = 0.1,
        max_iter: int = 100,
        max_leaf_nodes: int | None = 31,
        max_depth: int | None = None,
        min_samples_leaf: int = 20,
        l2_regularization: float = 0.0,
        max_features: float = 1.0,
        max_bins: int = 255,
        categorical_features: Any = "from_dtype",
        monotonic_cst: Any = None,
        interaction_cst: Any = None,
        early_stopping: Any = "auto",
        validation_fraction: float | None = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-7,
        random_state: Any = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals())
