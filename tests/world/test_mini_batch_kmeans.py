"""MiniBatchKMeans on shards: scikit-learn's centers for every split, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn import cluster
from sklearn.datasets import load_digits

from potluck import estimators
from potluck._core.context import DistributedContext
from support.shards import on_shards, refusal

RANDOM = np.random.default_rng(0)
X = load_digits().data + RANDOM.normal(scale=1e-3, size=(1797, 64))  # no two distances are equal
WEIGHTS = RANDOM.uniform(0.1, 3, len(X))
MANY = 60
"""Clusters, so that some get few samples and are moved."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_init": 3, "init_size": 300},
        {"init": "random", "tol": 1e-4, "max_iter": 4},
        {"init": X[:MANY], "n_init": 1, "max_no_improvement": None, "max_iter": 3},
        {"batch_size": 5000, "max_iter": 5, "compute_labels": False},
        {"reassignment_ratio": 0.5, "max_iter": 3},
    ],
    ids=lambda options: ", ".join(options),
)
def test_the_centers_are_those_of_scikit_learn(options: dict[str, Any]) -> None:
    cuts = [600, 600, 1200]  # the second rank has no samples
    options = {"batch_size": 200, "random_state": 3} | options
    expected = cluster.MiniBatchKMeans(MANY, **options).fit(X, sample_weight=WEIGHTS)

    def fit(ctx: DistributedContext, shard: Any) -> Any:
        x, weights = shard
        model = estimators.MiniBatchKMeans(MANY, ctx=ctx, **options)
        return model.fit(x, sample_weight=weights)

    shards = list(zip(np.split(X, cuts), np.split(WEIGHTS, cuts), strict=True))
    models = on_shards(shards, fit)
    for model in models:
        assert (model.n_steps_, model.n_iter_) == (expected.n_steps_, expected.n_iter_)
        assert model.cluster_centers_ == pytest.approx(expected.cluster_centers_, abs=1e-9)
        assert model.inertia_ == pytest.approx(expected.inertia_, rel=1e-9)
        assert np.array_equal(model.predict(X), expected.predict(X))
    if expected.compute_labels:
        labels = np.concatenate([model.labels_ for model in models])
        assert np.array_equal(labels, expected.labels_)


def test_partial_fit_takes_the_samples_of_all_ranks_as_one_batch() -> None:
    parts = np.array_split(X, 6)
    expected = cluster.MiniBatchKMeans(MANY, random_state=0)
    for part in parts:
        expected.partial_fit(part)

    def fit(ctx: DistributedContext, shards: Any) -> Any:
        model = estimators.MiniBatchKMeans(MANY, random_state=0, ctx=ctx)
        for shard in shards:
            model.partial_fit(shard)
        return model

    for model in on_shards([[p[:50] for p in parts], [p[50:] for p in parts]], fit):
        assert model.n_steps_ == expected.n_steps_
        assert model.cluster_centers_ == pytest.approx(expected.cluster_centers_, abs=1e-9)
        assert model.inertia_ == pytest.approx(expected.inertia_, rel=1e-9)


def test_shards_in_float32_give_centers_in_float32() -> None:
    def fit(ctx: DistributedContext, shard: Any) -> Any:
        return estimators.MiniBatchKMeans(10, random_state=0, max_iter=5, ctx=ctx).fit(shard)

    theirs = cluster.MiniBatchKMeans(10, random_state=0, max_iter=5).fit(X).inertia_
    for model in on_shards(np.array_split(X.astype(np.float32), 2), fit):
        assert model.cluster_centers_.dtype == np.float32
        assert model.inertia_ < 1.1 * theirs


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_clusters": 9}, "n_samples=8 should be >= n_clusters=9"),
        ({"n_clusters": 2, "init": X[:3]}, "init has shape (3, 64); for these samples it must be"),
        ({"batch_size": 0}, "The 'batch_size' parameter of MiniBatchKMeans must be"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_the_same_error_on_every_rank(
    options: dict[str, Any], text: str
) -> None:
    message = refusal(
        [X[:5], X[5:8]],
        lambda ctx, shard: estimators.MiniBatchKMeans(ctx=ctx, **options).fit(shard),
    )
    assert text in message
