"""Random forests whose trees grow on shards."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from sklearn import ensemble
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data

from potluck._core.context import DistributedContext
from potluck.estimators import classes
from potluck.estimators.exact_forest import ExactFit
from potluck.estimators.forest_fit import ShardsFit
from potluck.estimators.histogram_trees.binning import MOST_BINS
from potluck.estimators.rounds import State, context_of
from potluck.estimators.shards import OnShards

_OWN_CONSTRAINTS = {
    "exact": ["boolean"],
    "max_bins": [Interval(Integral, 2, MOST_BINS, closed="both")],
}


class _Forest(OnShards):
    """What the forests have in common."""

    exact: bool
    own_parameters = ("ctx", "exact", "max_bins")

    def _run(self, X: Any, y: Any, weights: Any) -> State:
        with context_of(self.ctx) as ctx:
            kind = ExactFit if self.exact else ShardsFit
            return kind(self, ctx, X, y, weights).grow()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if self.exact:
            tags.input_tags.allow_nan = False
        return tags

    def _validate_X_predict(self, X: Any) -> Any:
        if not self.exact:
            return super()._validate_X_predict(X)  # type: ignore[misc]
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float32, reset=False)


class RandomForestClassifier(_Forest, ensemble.RandomForestClassifier):
    """A random forest of classification trees, each of which grows on the samples of one rank, or
    with ``exact=True`` on those of all ranks.

    With samples on several ranks this is *not* the forest that scikit-learn grows on their union:
    a tree sees the samples of one shard only (bagging of shards). Shards should be random samples
    of about equal sizes; where each shard has its own part of the feature space, the trees of the
    other shards can't know that part. In a world of one it is scikit-learn's forest, bit by bit.

    With ``exact=True`` each tree grows on the samples of all ranks, from histograms that are added
    over the ranks (PLANET: Panda et al. 2009; scattered over the ranks as in LightGBM: Ke et al.
    2017). The forest is that of one process with all samples in rank order, bit by bit; without
    ``bootstrap`` in any order. It is not scikit-learn's bit by bit, but of its quality: a feature
    with more than ``max_bins`` (2 to 255) distinct values is split between that many quantiles
    only. All sums are of integers; weights and values that are none are rounded to multiples of a
    power of two, 2**-32 of the largest for a million samples. Samples are drawn by their weights.
    Criteria are ``gini``, ``entropy``, ``log_loss`` and ``squared_error``; no ``max_leaf_nodes``,
    no missing values, no negative weights; ``n_jobs`` is for predictions only.

    ``fit`` leaves the whole forest on every rank; all ranks with samples grow equal numbers of
    trees. A class may be missing on a shard. ``predict`` and its kin are local. ``ctx`` is the
    context of the group; if None, that of ``potluck.init()``. One output; no ``oob_score``, no
    ``warm_start``, no sparse input.

    Cost: every tree is sent to all ranks, 64 bytes per node and 8 per node and class. A round grows
    ``n_jobs`` trees on each rank, and a lost worker costs one round.

    Cost with ``exact=True``: no tree is sent. For each node that may be split a rank sends ``8
    max_features bins classes`` bytes (two numbers per bin in a regression; half the bytes if sums
    are below 2**24), or a node with few samples only the bins that have some; ``2 features`` bytes
    per node find the features that are constant in it. A round grows up to 16 trees at once, and a
    level of all of them takes about ten collective calls for each 16 MiB of sums. Memory beside the
    samples: a byte per value, about 100 bytes per drawn sample of a round (at most 4 million of all
    ranks, or one tree), some tens of MiB for histograms; while bins are found, a copy of the
    samples.
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **ensemble.RandomForestClassifier._parameter_constraints,
        **_OWN_CONSTRAINTS,
        "class_weight": [StrOptions({"balanced"}), dict, None],
    }

    def __init__(
        self,
        n_estimators: int = 100,
        *,
        criterion: str = "gini",
        max_depth: int | None = None,
        min_samples_split: float = 2,
        min_samples_leaf: float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: Any = "sqrt",
        max_leaf_nodes: int | None = None,
        min_impurity_decrease: float = 0.0,
        bootstrap: bool = True,
        n_jobs: int | None = None,
        random_state: Any = None,
        class_weight: Any = None,
        ccp_alpha: float = 0.0,
        max_samples: Any = None,
        exact: bool = False,
        max_bins: int = MOST_BINS,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> RandomForestClassifier:
        """Grow the forest from all ranks' ``X``, of shape (n, features), and ``y``, of shape (n,).

        A collective call. ``sample_weight`` has shape (n,).
        """
        last = self._run(X, y, sample_weight)
        self.classes_ = classes.classes_of(last)
        self.n_classes_ = len(self.classes_)
        return self


class RandomForestRegressor(_Forest, ensemble.RandomForestRegressor):
    """A random forest of regression trees, each of which grows on the samples of one rank.

    As [RandomForestClassifier][potluck.estimators.RandomForestClassifier]: with samples on several
    ranks it is another estimator than scikit-learn's forest on their union, unless ``exact=True``.
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **ensemble.RandomForestRegressor._parameter_constraints,
        **_OWN_CONSTRAINTS,
    }

    def __init__(
        self,
        n_estimators: int = 100,
        *,
        criterion: str = "squared_error",
        max_depth: int | None = None,
        min_samples_split: float = 2,
        min_samples_leaf: float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: Any = 1.0,
        max_leaf_nodes: int | None = None,
        min_impurity_decrease: float = 0.0,
        bootstrap: bool = True,
        n_jobs: int | None = None,
        random_state: Any = None,
        ccp_alpha: float = 0.0,
        max_samples: Any = None,
        exact: bool = False,
        max_bins: int = MOST_BINS,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> RandomForestRegressor:
        """Grow the forest from all ranks' ``X``, of shape (n, features), and ``y``, of shape (n,).

        A collective call. ``sample_weight`` has shape (n,).
        """
        self._run(X, y, sample_weight)
        return self
