"""KMeans, PCA and StandardScaler on shards: the results of scikit-learn, and bad shards."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn import cluster, decomposition, preprocessing
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning

import potluck
from potluck import estimators
from potluck._core.context import DistributedContext
from potluck.estimators import rounds, seeding
from potluck.testing.world import WorldError, run_world
from support.shards import on_shards, refusal

RANDOM = np.random.default_rng(0)
X = load_digits().data + RANDOM.normal(scale=1e-3, size=(1797, 64))  # no two distances are equal


# ---------------------------------------------------------------- the same as scikit-learn


@pytest.mark.parametrize(
    ("init", "cuts"),
    [("k-means||", [600, 1200]), ("k-means||", [0, 1]), ("random", [1797]), ("array", [0, 1])],
    ids=str,
)
def test_k_means_finds_the_centers_of_scikit_learn(init: Any, cuts: list[int]) -> None:
    start = X[:10] if init == "array" else init
    theirs = "k-means++" if init == "k-means||" else start
    options = {"n_init": 2} if init != "array" else {"n_init": 1}
    expected = cluster.KMeans(10, init=theirs, random_state=3, **options).fit(X)
    models = on_shards(
        np.split(X, cuts),
        lambda ctx, shard: estimators.KMeans(
            10, init=start, random_state=3, ctx=ctx, **options
        ).fit(shard),
    )
    for model in models:
        assert model.n_iter_ == expected.n_iter_
        assert model.cluster_centers_ == pytest.approx(expected.cluster_centers_, abs=1e-10)
        assert model.inertia_ == pytest.approx(expected.inertia_, rel=1e-12)
    assert np.concatenate([model.labels_ for model in models]).tolist() == expected.labels_.tolist()


def test_weighted_k_means_finds_the_centers_of_scikit_learn() -> None:
    weights = RANDOM.uniform(0.1, 3, len(X))
    expected = cluster.KMeans(10, init=X[:10], n_init=1).fit(X, sample_weight=weights)
    models = on_shards(
        list(zip(np.array_split(X, 3), np.array_split(weights, 3), strict=True)),
        lambda ctx, shard: estimators.KMeans(10, init=X[:10], ctx=ctx).fit(
            shard[0], sample_weight=shard[1]
        ),
    )
    for model in models:
        assert model.cluster_centers_ == pytest.approx(expected.cluster_centers_, abs=1e-10)


def test_k_means_parallel_is_as_good_a_start_as_k_means_plus_plus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeding, "GATHERED_BYTES", 0)
    theirs = [cluster.KMeans(10, n_init=1, random_state=s).fit(X).inertia_ for s in range(3)]
    ours = [
        on_shards(
            np.array_split(X, 2),
            lambda ctx, shard, s=s: (
                estimators.KMeans(10, random_state=s, ctx=ctx).fit(shard).inertia_
            ),
        )
        for s in range(3)
    ]
    assert all(len(set(each)) == 1 for each in ours)
    assert np.median(np.array(ours)[:, 0]) <= 1.02 * np.median(theirs)


def test_a_regression_that_makes_no_step_says_so() -> None:
    """A feature of 1e9 beside one of 1: no step of the search lowers the loss."""
    X = np.random.default_rng(0).normal(size=(100, 2)) * [1e9, 1.0]
    with pytest.warns(ConvergenceWarning, match="after 0 iterations: raise max_iter, or scale"):
        estimators.LogisticRegression().fit(X, X[:, 1] > 0)


@pytest.mark.parametrize("init", ["k-means||", "random"])
def test_fewer_distinct_samples_than_clusters_is_a_warning_and_not_a_failure(
    init: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "GATHERED_BYTES", 0)
    few = np.repeat([[0.0, 0.0], [1.0, 1.0]], 5, axis=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = on_shards(
            np.array_split(few, 2),
            lambda ctx, shard: estimators.KMeans(4, init=init, random_state=0, ctx=ctx).fit(shard),
        )
    assert {model.inertia_ for model in models} == {0.0}
    assert {w.category for w in caught} == {ConvergenceWarning}


def test_a_cluster_without_samples_gets_the_farthest_one_as_in_scikit_learn() -> None:
    points = np.concatenate([RANDOM.normal(size=(40, 2)), [[30.0, 30.0], [-40.0, 0.0]]])
    start = np.array([[0.0, 0.0], [0.1, 0.1], [500.0, 500.0], [600.0, 0.0]])
    expected = cluster.KMeans(4, init=start, n_init=1).fit(points)
    for shards in (np.array_split(points, 2), [points[:1], points[1:], points[:0]]):
        for model in on_shards(
            shards, lambda ctx, shard: estimators.KMeans(4, init=start, ctx=ctx).fit(shard)
        ):
            assert model.cluster_centers_ == pytest.approx(expected.cluster_centers_, abs=1e-10)


def test_shards_in_float32_give_centers_in_float32_near_those_of_float64() -> None:
    expected = cluster.KMeans(10, init=X[:10], n_init=1).fit(X)
    shards = np.array_split(X.astype(np.float32), 2)
    for model in on_shards(
        shards, lambda ctx, shard: estimators.KMeans(10, init=X[:10], ctx=ctx).fit(shard)
    ):
        assert model.cluster_centers_.dtype == np.float32
        assert model.cluster_centers_ == pytest.approx(expected.cluster_centers_, abs=1e-3)


@pytest.mark.parametrize("cuts", [[600, 1200], [0, 1]], ids=str)
def test_the_scaler_has_the_moments_of_scikit_learn(cuts: list[int]) -> None:
    data = X.copy()
    data[RANDOM.random(X.shape) < 0.1] = np.nan
    expected = preprocessing.StandardScaler().fit(data)
    twice = preprocessing.StandardScaler().fit(data).partial_fit(data[:500] + 1)

    def fit(ctx: DistributedContext, shard: Any) -> Any:
        once = estimators.StandardScaler(ctx=ctx).fit(shard)
        again = estimators.StandardScaler(ctx=ctx).fit(shard)
        return once, again.partial_fit(np.array_split(data[:500] + 1, ctx.world_size)[ctx.rank])

    for models in on_shards(np.split(data, cuts), fit):
        for model, reference in zip(models, (expected, twice), strict=True):
            for name in ("mean_", "var_", "scale_", "n_samples_seen_"):
                wanted = getattr(reference, name)
                assert getattr(model, name) == pytest.approx(wanted, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("wanted", [None, 5, 0.9])
def test_pca_finds_the_components_of_scikit_learn(wanted: Any) -> None:
    data = RANDOM.normal(size=(500, 12)) @ RANDOM.normal(size=(12, 12)) + 100
    expected = decomposition.PCA(wanted, svd_solver="full").fit(data)
    for model in on_shards(
        np.split(data, [0, 123]),
        lambda ctx, shard: estimators.PCA(wanted, ctx=ctx).fit(shard),
    ):
        assert model.n_components_ == expected.n_components_
        for name in ("mean_", "components_", "explained_variance_", "explained_variance_ratio_"):
            assert getattr(model, name) == pytest.approx(getattr(expected, name), abs=1e-8)
        assert model.noise_variance_ == pytest.approx(expected.noise_variance_, abs=1e-8)
        assert model.transform(data) == pytest.approx(expected.transform(data), abs=1e-8)


def test_a_fit_reports_its_rounds_and_no_number_of_samples_that_it_will_take() -> None:
    def fit(ctx: DistributedContext, shard: Any) -> Any:
        model = estimators.KMeans(10, random_state=0, ctx=ctx).fit(shard)
        return model.n_iter_, ctx._backend.reports  # type: ignore[attr-defined]

    for num_iterations, reports in on_shards(np.array_split(X, 2), fit):
        steps = [facts for facts in reports if "step" in facts]
        assert len(steps) > num_iterations
        assert {facts["total_samples"] for facts in steps} == {0}


def test_without_a_context_it_is_that_of_init_or_a_world_of_one() -> None:
    with rounds.context_of(None) as alone:
        assert alone.world_size == 1
    assert alone.is_closed
    with potluck.init("local") as ctx:
        with rounds.context_of(None) as found:
            assert found is ctx
        assert not ctx.is_closed
        assert estimators.StandardScaler().fit(X).mean_ == pytest.approx(X.mean(axis=0))


def test_no_other_thread_finds_the_world_of_one_that_a_fit_has_made_for_itself() -> None:
    with rounds.context_of(None) as alone, rounds.context_of(None) as other:
        assert other is not alone
    assert (alone.is_closed, other.is_closed) == (True, True)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", ["KMeans", "StandardScaler", "PCA"])
def test_a_copied_estimator_is_fitted_by_the_same_group(
    name: str, way: Callable[[Any], Any]
) -> None:
    def act(ctx: DistributedContext) -> Any:
        mine = X[ctx.rank :: 2]
        copied = way(FITS[name](ctx, mine)).fit(mine)
        assert copied.ctx is ctx
        return copied.transform(X[:10])

    first, second = run_world(2, act)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", ["KMeans", "StandardScaler", "PCA"])
def test_a_fitted_estimator_is_pickled_without_its_context(name: str) -> None:
    with potluck.init("local") as ctx:
        model = FITS[name](ctx, X)
        stored = pickle.loads(pickle.dumps(model))  # noqa: S301
        assert stored.ctx is None
        assert model.ctx is ctx
        assert np.array_equal(stored.transform(X), model.transform(X))


def test_a_context_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="ctx is 3; it must be a context"):
        estimators.PCA(ctx=3).fit(X)  # type: ignore[arg-type]


# ---------------------------------------------------------------- bad shards

FITS: dict[str, Callable[[DistributedContext, Any], Any]] = {
    "KMeans": lambda ctx, shard: estimators.KMeans(3, random_state=0, ctx=ctx).fit(shard),
    "StandardScaler": lambda ctx, shard: estimators.StandardScaler(ctx=ctx).fit(shard),
    "PCA": lambda ctx, shard: estimators.PCA(ctx=ctx).fit(shard),
}


@pytest.mark.parametrize("name", FITS)
def test_shards_with_different_features_are_refused_on_every_rank(name: str) -> None:
    message = refusal([X, X[:, :5]], FITS[name])
    assert "rank 0 (worker 0) has 64 features, that of rank 1 (worker 1) has 5" in message


@pytest.mark.parametrize("name", FITS)
def test_shards_that_are_all_empty_are_refused(name: str) -> None:
    assert "Found array with 0 sample(s)" in refusal([X[:0], X[:0]], FITS[name])


@pytest.mark.parametrize("name", ["KMeans", "PCA"])
def test_nan_on_one_rank_is_the_same_error_on_every_rank(name: str) -> None:
    bad = X[900:].copy()
    bad[7, 3] = np.nan
    message = refusal([X[:900], bad, X[:3]], FITS[name])
    assert message.startswith("the shard of rank 1 (worker 1): Input X contains NaN")


def test_more_clusters_than_samples_of_all_ranks_are_refused() -> None:
    assert refusal([X[:1], X[:1]], FITS["KMeans"]) == "n_samples=2 should be >= n_clusters=3."


def test_parameters_are_checked_before_samples() -> None:
    """Also those that scikit-learn checks apart from the others."""
    bad, labels = np.full((4, 2), np.nan), [0, 1, 0, 1]
    sgd = estimators.SGDClassifier(learning_rate="optimal", alpha=0.0)
    with pytest.raises(ValueError, match="alpha must be > 0"):
        sgd.fit(bad, labels)
    with pytest.raises(ValueError, match=r"hidden_layer_sizes must be > 0, got \(0,\)"):
        estimators.MLPClassifier(hidden_layer_sizes=(0,)).fit(bad, labels)


def test_a_wrong_parameter_on_one_rank_is_an_error_on_every_rank() -> None:
    message = refusal([3, -1], lambda ctx, k: estimators.KMeans(k, ctx=ctx).fit(X))
    assert "rank 1 (worker 1): The 'n_clusters' parameter of KMeans must be" in message


def test_workers_that_fit_different_estimators_are_told(seed: int) -> None:
    def fit(ctx: DistributedContext) -> None:
        (FITS["PCA"] if ctx.rank else FITS["KMeans"])(ctx, X)

    with pytest.raises(WorldError, match="the other workers are fitting KMeans"):
        run_world(2, fit)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("KMeans", {"tol": 0.1}),
        ("MiniBatchKMeans", {"batch_size": 7}),
        ("StandardScaler", {"with_mean": False}),
        ("PCA", {"n_components": 2}),
        ("LogisticRegression", {"C": 0.3}),
        ("SGDClassifier", {"alpha": 0.01}),
        ("MLPClassifier", {"hidden_layer_sizes": (5,)}),
        ("MLPRegressor", {"learning_rate_init": 0.1}),
        ("RandomForestClassifier", {"class_weight": {1: 2.0}}),
        ("RandomForestRegressor", {"max_depth": 2}),
    ],
)
def test_ranks_whose_estimators_differ_are_told_the_parameter(
    name: str, other: dict[str, Any]
) -> None:
    y = np.arange(len(X)) % 2

    def fit(ctx: DistributedContext, own: dict[str, Any]) -> Any:
        return getattr(estimators, name)(ctx=ctx, **own).fit(X, y)

    [parameter] = other
    found = refusal([{}, other], fit)
    assert found.startswith(f"the ranks have different values of {parameter}: give every rank the ")
    assert "rank 1 (worker 1) has" in found


def test_what_changes_nothing_for_other_ranks_may_differ() -> None:
    own = [{"copy_x": True, "random_state": 1}, {"copy_x": False, "random_state": 2}]
    models = on_shards(own, lambda ctx, own: estimators.KMeans(3, **own, ctx=ctx).fit(X.copy()))
    assert len({model.inertia_ for model in models}) == 1


class Raises:
    """What NumPy can't make an array of, with an error of neither usual type."""

    def __len__(self) -> int:
        return 20

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")


HUGE = [10**400] + [1] * 19
SAMPLES = np.random.default_rng(0).normal(size=(20, 3))
CLASSES = (SAMPLES[:, 0] > 0).astype(int)
TAKE_LABELS = {
    "LogisticRegression": {},
    "SGDClassifier": {},
    "RandomForestClassifier": {"n_estimators": 4},
    "RandomForestRegressor": {"n_estimators": 4},
    "MLPClassifier": {"max_iter": 2},
    "MLPRegressor": {"max_iter": 2},
}
OTHERS = {"KMeans": {"n_clusters": 2}, "MiniBatchKMeans": {"n_clusters": 2}, "StandardScaler": {}}
CASES = [
    *((name, {"X": bad}, {}) for name in {**TAKE_LABELS, **OTHERS} for bad in (Raises(), [HUGE])),
    *((name, {"y": bad}, {}) for name in TAKE_LABELS for bad in (Raises(), None)),
    *((name, {"y": HUGE}, {}) for name in TAKE_LABELS if "Regressor" in name),
    *((name, {"y": ["a"] * 20}, {}) for name in TAKE_LABELS if "Regressor" in name),
    *(
        (name, {"y": np.array(["2020-01-01"] * 20, "datetime64[D]")}, {})
        for name in TAKE_LABELS
        if "Regressor" not in name and name != "LogisticRegression"
    ),
    *(
        (name, {"sample_weight": bad}, {})
        for name in {**TAKE_LABELS, **OTHERS}
        if "MLP" not in name
        for bad in (Raises(), HUGE, ["a"] * 20)
    ),
    *(
        (name, {}, {"random_state": bad})
        for name in {**TAKE_LABELS, **OTHERS}
        if name not in ("LogisticRegression", "StandardScaler")
        for bad in ("x", -5)
    ),
    *(
        (name, {}, {"class_weight": {0: bad}})
        for name in ("LogisticRegression", "SGDClassifier", "RandomForestClassifier")
        for bad in ("a", None, -1.0, 10**400)
    ),
]


@pytest.mark.parametrize(
    ("name", "given", "options"),
    CASES,
    ids=[f"{n} {next(iter(g or o))} {k}" for k, (n, g, o) in enumerate(CASES)],
)
def test_whatever_one_rank_cannot_convert_is_refused_on_all_and_the_group_goes_on(
    name: str, given: dict[str, Any], options: dict[str, Any]
) -> None:
    def run(ctx: DistributedContext) -> str:
        data: dict[str, Any] = {"X": SAMPLES}
        if name in TAKE_LABELS:
            data["y"] = CLASSES
        mine = {**TAKE_LABELS, **OTHERS}[name]
        if ctx.rank == 1:
            data, mine = data | given, mine | options
        elif "class_weight" in options:  # must be equal on all ranks
            mine = mine | options
        model = getattr(estimators, name)(ctx=ctx, **mine)
        with pytest.raises((TypeError, ValueError)) as caught:
            model.fit(**data)
        assert ctx.all_reduce(np.ones(1))[0] == 2, "the group goes on"
        return f"{caught.type.__name__}: {caught.value}"

    first, second = run_world(2, run, timeout_s=20.0)
    assert first == second
