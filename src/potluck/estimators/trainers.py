"""Trainers over the estimators: k-means and random forests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads
from sklearn.utils.validation import check_is_fitted

from potluck._core import hints
from potluck.estimators import trees
from potluck.estimators.forest import RandomForestClassifier, RandomForestRegressor
from potluck.estimators.kmeans import KMeans
from potluck.estimators.shards import Array
from potluck.training.trainer import DistributedTrainer, Parameters, TrainingStrategy, by_name

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext


_NOT_TRAINED = "this %(name)s is not trained yet: call train_epoch, or set_parameters, before"


class DistributedKMeansTrainer(DistributedTrainer):
    """k-means over all ranks' samples: a trainer over
    [KMeans][potluck.estimators.KMeans], with its cost and errors."""

    @hints.arguments(
        {}, "DistributedKMeansTrainer(ctx, n_clusters, max_iterations)", same=hints.KMEANS
    )
    def __init__(
        self,
        ctx: DistributedContext,
        n_clusters: int = 8,
        max_iterations: int = 100,
        *,
        strategy: TrainingStrategy = TrainingStrategy.DATA_PARALLEL,
        random_state: Any = None,
    ) -> None:
        super().__init__(ctx, strategy)
        self.model = KMeans(n_clusters, max_iter=max_iterations, random_state=random_state, ctx=ctx)

    @hints.arguments({}, same=hints.SAMPLES)
    def train_epoch(self, X: Any, y: Any = None) -> float:
        """Up to ``max_iterations`` of Lloyd's algorithm on all ranks' ``X``, from the centroids so
        far; returns the mean squared distance from them. ``X`` is this rank's shard."""
        if hasattr(self.model, "cluster_centers_"):
            self.model.set_params(init=self.model.cluster_centers_)
        self.model.warns_of_equal_shards = not self.epochs
        self.model.fit(X)
        num = len(self.model.labels_)
        return self._end_epoch(-float(self.model.score(X)) / num if num else np.nan, num)

    def get_centroids(self) -> Array:
        """A copy of the centroids, of shape (n_clusters, features). NotFittedError before the first
        epoch."""
        check_is_fitted(self.model, msg=_NOT_TRAINED)
        return np.array(self.model.cluster_centers_)

    def get_parameters(self) -> Parameters:
        return {"centroids": self.get_centroids()}

    def set_parameters(self, parameters: Mapping[str, Array] | ArrayLike) -> None:
        model, fitted = self.model, getattr(self.model, "cluster_centers_", None)
        shapes = {} if fitted is None else {"centroids": fitted.shape}
        centroids = np.array(by_name(parameters, shapes, ["centroids"])["centroids"])
        model.set_params(init=centroids)
        model.cluster_centers_ = centroids.copy()
        model.n_features_in_ = centroids.shape[1]
        model._n_threads = _openmp_effective_n_threads()

    def predict(self, X: Any) -> Array:
        """The number of the nearest centroid for each row of ``X``."""
        check_is_fitted(self.model, msg=_NOT_TRAINED)
        return np.asarray(self.model.predict(X))


class DistributedRandomForestTrainer(DistributedTrainer):
    """A random forest of trees from all ranks: a trainer over
    [RandomForestClassifier][potluck.estimators.RandomForestClassifier] or, with
    ``task="regression"``, its regressor, with their cost and errors.

    ``options`` are further arguments of the forest, such as ``max_depth``.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        n_estimators: int = 100,
        *,
        task: str = "classification",
        strategy: TrainingStrategy = TrainingStrategy.DATA_PARALLEL,
        **options: Any,
    ) -> None:
        super().__init__(ctx, strategy)
        kinds = {"classification": RandomForestClassifier, "regression": RandomForestRegressor}
        if task not in kinds:
            raise ValueError(f"task is {task!r}; it must be 'classification' or 'regression'")
        self.model: Any = kinds[task](n_estimators, ctx=ctx, **options)

    @hints.arguments({}, same=hints.SAMPLES)
    def train_epoch(self, X: Any, y: Any = None) -> float:
        """Grow a new forest on all ranks' samples; returns the fraction of wrong predictions, or
        the mean squared error. ``X`` and ``y`` are this rank's shard."""
        self.model.warns_of_equal_shards = not self.epochs
        self.model.fit(X, y)
        loss = np.nan
        if len(X):
            away = self.model.predict(X) != y if self._is_classifier else self.model.predict(X) - y
            loss = float(np.mean(np.square(away, dtype=np.float64)))
        return self._end_epoch(loss, len(X))

    def get_parameters(self) -> Parameters:
        check_is_fitted(self.model, msg=_NOT_TRAINED)
        found: Parameters = {"features": np.array([self.model.n_features_in_])}
        num_classes = self.model.n_classes_ if self._is_classifier else 0
        for number, tree in enumerate(self.model.estimators_):
            packed = trees.pack(tree, np.arange(num_classes), num_classes)
            found[f"{number}.nodes"] = packed["nodes"].copy()
            found[f"{number}.values"] = packed["values"].copy()
            found[f"{number}.facts"] = np.array([packed["max_depth"], packed["seed"]], np.int64)
        if self._is_classifier:
            found["classes"] = self.model.classes_.copy()
        return found

    def set_parameters(self, parameters: Mapping[str, Array] | ArrayLike) -> None:
        model, num_classes = self.model, 0
        needed = ["0.nodes", "features", *(["classes"] if self._is_classifier else [])]
        parameters = by_name(parameters, {}, needed)  # of trees no vector has a meaning
        if self._is_classifier:
            model.classes_ = np.array(parameters["classes"])
            num_classes = model.n_classes_ = len(model.classes_)
        model.n_features_in_, model.n_outputs_ = int(parameters["features"][0]), 1
        found: list[Any] = []
        while f"{len(found)}.nodes" in parameters:
            name = len(found)
            depth, seed = parameters[f"{name}.facts"].tolist()
            packed = {"max_depth": depth, "seed": seed}
            packed |= {part: parameters[f"{name}.{part}"] for part in ("nodes", "values")}
            found.append(trees.unpack(packed, trees.like(model), model.n_features_in_, num_classes))
        model.estimators_ = found

    def predict(self, X: Any) -> Array:
        """The class, or the value, of each row of ``X``."""
        check_is_fitted(self.model, msg=_NOT_TRAINED)
        return np.asarray(self.model.predict(X))

    @property
    def _is_classifier(self) -> bool:
        return isinstance(self.model, RandomForestClassifier)
