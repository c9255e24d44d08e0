"""Strategies, by hand-made updates: pure functions of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import federated
from potluck.federated import (
    Aggregation,
    FedAdam,
    FedAvg,
    FedProx,
    FedYogi,
    Krum,
    Median,
    Round,
    TrimmedMean,
    Update,
)
from potluck.federated.aggregation import krum_scores

NAMES = tuple("abcdefghij")


def a_round(parameters: list[np.ndarray] | None = None, seed: int = 1) -> Round:
    return Round(1, 5, parameters or [np.zeros(2)], seed)


def updates(*values: float, weights: tuple[int, ...] = ()) -> list[Update]:
    weights = weights or (1,) * len(values)
    return [
        Update([np.full(2, value)], weight) for value, weight in zip(values, weights, strict=True)
    ]


def test_fedavg_weighs_by_samples() -> None:
    made = FedAvg().aggregate(a_round(), updates(1.0, 4.0, weights=(1, 2)))
    np.testing.assert_allclose(made[0], 3.0)


def test_structure_and_dtypes_stay_those_of_the_global_parameters() -> None:
    now = Round(1, 1, {"w": np.zeros(3, np.float32), "steps": np.array(7)}, 0)
    given = [Update({"w": np.full(3, v), "steps": np.array(int(v))}, 1) for v in (1.0, 2.0)]
    made = FedAvg().aggregate(now, given)
    assert list(made) == ["w", "steps"]
    assert (made["w"].dtype, made["steps"].dtype) == (np.float32, np.int64)
    assert (made["w"][0], int(made["steps"])) == (1.5, 2)  # rounded to even


def test_a_fraction_is_drawn_anew_each_round_and_again_from_the_same_seed() -> None:
    aggregation = FedAvg(0.3, config={"local_epochs": 2})
    drawn = [tuple(aggregation.configure(a_round(seed=seed), NAMES)) for seed in (1, 2, 3, 1)]
    assert all(len(each) == 3 for each in drawn)
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3
    assert aggregation.configure(a_round(), NAMES)[drawn[0][0]] == {"local_epochs": 2}


def test_poisson_sampling_draws_each_client_by_itself() -> None:
    aggregation = FedAvg(0.3, sampling="poisson")
    sizes = [len(aggregation.configure(a_round(seed=seed), NAMES)) for seed in range(2000)]
    assert min(sizes) == 0
    assert abs(np.mean(sizes) - 3) < 0.15
    assert abs(np.var(sizes) - 10 * 0.3 * 0.7) < 0.3


def test_config_may_depend_on_the_round_and_fedprox_adds_its_own() -> None:
    aggregation = FedProx(0.5, config=lambda number: {"lr": 1 / number})
    assert aggregation.configure(a_round(), "a") == {"a": {"lr": 1.0, "proximal_mu": 0.5}}


def test_fedadam_and_fedyogi_take_the_papers_steps() -> None:
    """Reddi et al. 2021, algorithm 2, written out for one parameter and two rounds."""
    for kind in (FedAdam, FedYogi):
        aggregation = kind(learning_rate=0.1, beta1=0.9, beta2=0.99, tau=1e-3)
        x, m, v = 0.0, 0.0, 1e-6
        for mean in (2.0, 5.0):
            d = mean - x
            m = 0.9 * m + 0.1 * d
            v = 0.99 * v + 0.01 * d**2 if kind is FedAdam else v - 0.01 * d**2 * np.sign(v - d**2)
            now = a_round([np.full(2, x)])
            x += 0.1 * m / (np.sqrt(v) + 1e-3)
            made = aggregation.aggregate(now, updates(mean - 1, mean + 1))
            np.testing.assert_allclose(made[0], x)


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=9), st.floats(1e3, 1e9))
def test_median_stays_within_the_honest_values(honest: list[float], lie: float) -> None:
    liars = [lie] * ((len(honest) - 1) // 2)
    made = Median().aggregate(a_round(), updates(*honest, *liars))
    assert min(honest) - 1e-9 <= made[0][0] <= max(honest) + 1e-9


def test_the_trimmed_mean_leaves_the_extremes_out() -> None:
    made = TrimmedMean(0.2).aggregate(a_round(), updates(1, 2, 3, -1e6, 1e6))
    np.testing.assert_allclose(made[0], 2.0)
    everything = TrimmedMean(0.0).aggregate(a_round(), updates(1, 2, 6))
    np.testing.assert_allclose(everything[0], 3.0)


def test_krum_scores_are_sums_of_the_nearest_squared_distances() -> None:
    random = np.random.default_rng(3)
    vectors, f = random.normal(size=(9, 4)), 2
    scores = krum_scores(vectors, f)
    for row in range(9):
        distances = sorted(
            float(((vectors[row] - vectors[other]) ** 2).sum())
            for other in range(9)
            if other != row
        )
        np.testing.assert_allclose(scores[row], sum(distances[: 9 - f - 2]))


def test_krum_tells_differences_from_one_large_parameter() -> None:
    """Seven honest updates near each other, two far ones, and a bias of 2e8 in all of them."""
    for seed in range(20):
        chance = np.random.default_rng(seed)
        honest = chance.normal(0, 0.01, (7, 50))
        vectors = np.concatenate([honest, chance.normal(0, 0.2, (2, 50))])
        far = np.concatenate([vectors, np.full((9, 1), 2e8)], axis=1)
        np.testing.assert_allclose(krum_scores(far, 2), krum_scores(vectors, 2), rtol=1e-12)
        given = [Update([each], 1) for each in far]
        chosen = Krum(2).aggregate(a_round([np.full(51, 2e8)]), given)[0]
        assert any((chosen == each).all() for each in far[:7])
    huge = np.concatenate([vectors[:7], np.full((2, 50), 1e200)])
    assert np.argmin(krum_scores(huge, 2)) < 7


def test_krum_takes_an_honest_update_and_says_how_many_it_needs() -> None:
    given = updates(1.0, 1.1, 0.9, 50.0, 1.05)
    assert Krum(1).aggregate(a_round(), given)[0][0] in (1.0, 1.05)
    kept = Krum(1, keep=3).aggregate(a_round(), given)
    assert 0.9 < kept[0][0] < 1.1
    with pytest.raises(ValueError, match=r"Krum\(f=2\) needs 7 updates, not 5"):
        Krum(2).aggregate(a_round(), given)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FedAvg(0), "fraction is 0; it must be above 0"),
        (lambda: FedAvg(sampling="all"), "sampling is 'all'"),
        (lambda: FedProx(-1), "mu is -1"),
        (lambda: FedAdam(tau=0), "tau=0"),
        (lambda: TrimmedMean(0.5), "cut is 0.5"),
        (lambda: Krum(-1), "f=-1"),
    ],
)
def test_arguments_that_do_not_fit(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_every_aggregation_has_the_two_methods() -> None:
    aggregations = (FedAvg(), FedProx(), FedAdam(), FedYogi(), Median(), TrimmedMean(), Krum())
    for aggregation in aggregations:
        typed: Aggregation = aggregation
        assert callable(typed.configure)
        assert callable(typed.aggregate)
    public = {getattr(federated, name) for name in federated.__all__}
    assert {each for each in public if hasattr(each, "aggregate")} - {Aggregation} == {
        type(each) for each in aggregations
    }
