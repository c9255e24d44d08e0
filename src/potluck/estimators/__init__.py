"""Estimators of scikit-learn's kind, fitted on data that is split among the ranks."""

# ruff: noqa: E402 (scikit-learn is asked for first)

from potluck._core.optional import require

require("sklearn", "sklearn")

from potluck.estimators.boosting import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from potluck.estimators.forest import RandomForestClassifier, RandomForestRegressor
from potluck.estimators.kmeans import KMeans
from potluck.estimators.logistic import LogisticRegression
from potluck.estimators.mini_batch_kmeans import MiniBatchKMeans
from potluck.estimators.mlp import MLPClassifier, MLPRegressor
from potluck.estimators.pca import PCA
from potluck.estimators.scaling import StandardScaler
from potluck.estimators.sgd import SGDClassifier

__all__ = [
    "PCA",
    "HistGradientBoostingClassifier",
    "HistGradientBoostingRegressor",
    "KMeans",
    "LogisticRegression",
    "MLPClassifier",
    "MLPRegressor",
    "MiniBatchKMeans",
    "RandomForestClassifier",
    "RandomForestRegressor",
    "SGDClassifier",
    "StandardScaler",
]
