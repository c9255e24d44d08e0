"""A worker is killed at any moment of a fit: the others repeat one round and end with the result of
an undisturbed fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn.datasets import load_digits

from potluck import estimators
from potluck.estimators import rounds
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.training import ElasticLoop

DIGITS = load_digits()
X = DIGITS.data + np.random.default_rng(0).normal(scale=1e-3, size=(1797, 64))
Y = DIGITS.target
SEED = {"random_state": 0}

BOOSTED = {"max_iter": 5, "max_leaf_nodes": 4, "max_bins": 8, **SEED}
EXACT = {"exact": True, "max_depth": 2, "max_bins": 8, "max_features": "sqrt", **SEED}

FITS: dict[str, Callable[[MortalContext, Any, Any], Any]] = {
    "KMeans": lambda ctx, x, y: estimators.KMeans(3, ctx=ctx, **SEED).fit(x).cluster_centers_,
    "PCA": lambda ctx, x, y: estimators.PCA(ctx=ctx).fit(x).components_,
    "StandardScaler": lambda ctx, x, y: estimators.StandardScaler(ctx=ctx).fit(x).var_,
    "LogisticRegression": lambda ctx, x, y: (
        estimators.LogisticRegression(tol=1e-2, ctx=ctx).fit(x / 16, y).coef_
    ),
    "MLPClassifier": lambda ctx, x, y: (
        estimators.MLPClassifier((10,), max_iter=4, ctx=ctx, **SEED).fit(x / 16, y).coefs_[0]
    ),
    "MiniBatchKMeans": lambda ctx, x, y: (
        estimators.MiniBatchKMeans(20, batch_size=100, ctx=ctx, **SEED).fit(x).cluster_centers_
    ),
    "SGDClassifier": lambda ctx, x, y: (
        estimators.SGDClassifier(batch_size=200, max_iter=4, tol=None, ctx=ctx, **SEED)
        .fit(x / 16, y)
        .coef_
    ),
    "RandomForestClassifier": lambda ctx, x, y: (
        estimators.RandomForestClassifier(5, max_depth=3, ctx=ctx, **SEED)
        .fit(x, y)
        .predict_proba(X)
    ),
    "RandomForestClassifier-exact": lambda ctx, x, y: (
        estimators.RandomForestClassifier(20, ctx=ctx, **EXACT).fit(x, y).predict_proba(X)
    ),
    "HistGradientBoostingRegressor": lambda ctx, x, y: (
        estimators.HistGradientBoostingRegressor(ctx=ctx, early_stopping=True, **BOOSTED)
        .fit(x, y)
        .predict(X)
    ),
    "RandomForestRegressor-exact": lambda ctx, x, y: (
        estimators.RandomForestRegressor(20, ctx=ctx, **EXACT).fit(x, y).predict(X)
    ),
}


def undisturbed(world_size: int, fit: Callable[[MortalContext], Any]) -> tuple[Any, int]:
    """The result of ``fit``, and the number of moments at which a worker can die in it."""
    seen = 0

    def count(worker: str, name: str, moment: int) -> bool:
        nonlocal seen
        seen = max(seen, moment + 1)
        return False

    return ElasticWorld(world_size, fit, dies=count).run()["0"], seen


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
@pytest.mark.parametrize("name", FITS)
def test_the_others_end_with_the_result_of_an_undisturbed_fit(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed worker has no samples, so that no sample is lost with it."""
    loops: list[ElasticLoop] = []

    class Recorded(ElasticLoop):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            loops.append(self)

    monkeypatch.setattr(rounds, "ElasticLoop", Recorded)
    parts = {"0": slice(0, 1000), "1": slice(1000, None), "2": slice(0, 0)}

    def fit(ctx: MortalContext) -> Any:
        mine = parts[ctx.backend.worker]
        return FITS[name](ctx, X[mine], Y[mine])

    expected, num_moments = undisturbed(3, fit)
    for fatal in np.random.default_rng(seed).permutation(num_moments)[:5]:
        loops.clear()
        results = ElasticWorld(
            3, fit, dies=lambda worker, _, moment, fatal=fatal: (worker, moment) == ("2", fatal)
        ).run()
        assert set(results) == {"0", "1"}, f"moment {fatal}"
        for found in results.values():
            assert found == pytest.approx(expected, abs=1e-9), f"moment {fatal}"
        assert max(loop.num_reruns for loop in loops) <= 1


def test_the_others_go_on_with_their_own_samples_when_samples_are_lost() -> None:
    parts = np.array_split(X, 3)

    def fit(ctx: MortalContext) -> Any:
        return estimators.KMeans(5, ctx=ctx, **SEED).fit(parts[int(ctx.backend.worker)])

    world = ElasticWorld(3, fit, dies=lambda worker, _, moment: (worker, moment) == ("1", 50))
    models = world.run()
    assert set(models) == {"0", "2"}
    rest = np.concatenate([parts[0], parts[2]])
    for model in models.values():
        assert np.array_equal(model.cluster_centers_, models["0"].cluster_centers_)
        assert model.inertia_ == pytest.approx(-model.score(rest), rel=1e-9)


def bits_of_forest(ctx: MortalContext, x: Any, y: Any) -> list[bytes]:
    forest = estimators.RandomForestClassifier(40, ctx=ctx, **EXACT).fit(x, y)
    states = [each.tree_.__getstate__() for each in forest.estimators_]
    return [state["nodes"].tobytes() + state["values"].tobytes() for state in states]


def bits_of_boosted_trees(ctx: MortalContext, x: Any, y: Any) -> list[bytes]:
    model = estimators.HistGradientBoostingClassifier(ctx=ctx, **BOOSTED).fit(x, y)
    return [tree.nodes.tobytes() for trees in model._predictors for tree in trees]


@pytest.mark.parametrize("bits", [bits_of_forest, bits_of_boosted_trees])
def test_trees_of_all_samples_are_the_same_bit_by_bit_for_a_newcomer_in_the_middle(
    bits: Callable[[MortalContext, Any, Any], list[bytes]],
) -> None:
    """The newcomer has no samples, and gets bins and trees from a peer."""
    parts = {"0": slice(0, 1000), "1": slice(1000, None)}

    def fit(ctx: MortalContext) -> Any:
        mine = parts.get(ctx.backend.worker, slice(0, 0))
        return bits(ctx, X[mine], Y[mine]), ctx.world_size

    (expected, _), num_moments = undisturbed(2, fit)
    middle = num_moments // 2

    def invite(worker: str, name: str, moment: int) -> bool:
        if (worker, moment) == ("0", middle):
            world.join()
        return False

    world = ElasticWorld(2, fit, dies=invite)
    results = world.run()
    assert len(results) == 3
    for found, world_size in results.values():
        assert world_size == 3
        assert found == expected


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
@pytest.mark.parametrize("name", FITS)
def test_a_newcomer_in_the_last_round_has_the_result_without_a_round_of_its_own(name: str) -> None:
    """It is invited as late as the others can still find it: later, it is alone."""
    parts = {"0": slice(0, 1000), "1": slice(1000, None)}

    def fit(ctx: MortalContext) -> Any:
        mine = parts.get(ctx.backend.worker, slice(0, 1000))
        return FITS[name](ctx, X[mine], Y[mine]), ctx.world_size

    def with_newcomer(invited_at: int) -> dict[str, Any]:
        def invite(worker: str, name: str, moment: int) -> bool:
            if (worker, moment) == ("0", invited_at):
                world.join()
            return False

        world = ElasticWorld(2, fit, dies=invite)
        return world.run()

    (expected, _), late = undisturbed(2, fit)
    results: dict[str, Any] = {}
    while {world_size for _, world_size in results.values()} != {3}:
        late -= 1
        results = with_newcomer(late)
    for found, _ in results.values():
        assert found == pytest.approx(expected, abs=1e-9)


def test_a_worker_that_begins_again_gets_the_fits_that_it_has_missed() -> None:
    """The newcomer has no samples, so that the result must be that of an undisturbed script."""
    parts = {"0": X[:1000], "1": X[1000:]}

    def script(ctx: MortalContext) -> Any:
        mine = parts.get(ctx.backend.worker, X[:0])
        scaler = estimators.StandardScaler(ctx=ctx).fit(mine)
        scaled = scaler.transform(mine) if len(mine) else mine
        model = estimators.KMeans(10, tol=0, ctx=ctx, **SEED).fit(scaled)
        components = estimators.PCA(5, ctx=ctx).fit(mine)
        return scaler.mean_, model.cluster_centers_, components.components_, ctx.world_size

    *expected, _ = ElasticWorld(2, script).run()["0"]

    def invite(worker: str, name: str, moment: int) -> bool:
        if (worker, moment) == ("0", 50):
            world.join()
        return False

    world = ElasticWorld(2, script, dies=invite)
    results = world.run()
    assert len(results) == 3
    for *found, world_size in results.values():
        assert world_size == 3
        for mine, wanted in zip(found, expected, strict=True):
            assert mine == pytest.approx(wanted, abs=1e-9)
