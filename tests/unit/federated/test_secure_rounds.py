"""Secure aggregation in whole rounds: the strategy gets what it would get without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from potluck import federated
from potluck.federated import (
    FedAdam,
    FedAvg,
    Federation,
    History,
    Krum,
    Patience,
    SecureAggregation,
    Update,
    site,
)


def train(parameters: Any, config: Mapping[str, Any]) -> Update:
    random = np.random.default_rng([site().index, config["round"]])
    moved = {name: each + random.uniform(-0.5, 0.5, 40) for name, each in parameters.items()}
    return Update(moved, 10 + site().index)


def run(client: Any = train, **options: Any) -> History:
    def main(federation: Federation) -> History:
        return federation.run({"w": np.zeros(40)}, **{"rounds": 2, **options})

    return federated.simulate(main, client, num_clients=7)


@pytest.mark.parametrize("strategy", [FedAvg, FedAdam])
def test_the_model_is_the_one_without_secure_aggregation(strategy: Any) -> None:
    plain = run(strategy=strategy())
    hidden = run(strategy=strategy(), secure=SecureAggregation())
    np.testing.assert_allclose(hidden.parameters["w"], plain.parameters["w"], atol=1e-5)
    assert [each.saturation for each in hidden.rounds] == [0.0, 0.0]
    assert hidden.rounds[0].arrived == tuple("0123456")


def test_clients_that_fail_in_training_drop_out_and_the_others_sum_is_exact() -> None:
    def fails(parameters: Any, config: Mapping[str, Any]) -> Update:
        if site().index in (2, 5):
            raise RuntimeError("no")
        return train(parameters, config)

    plain = run(fails)
    hidden = run(fails, secure=SecureAggregation())
    np.testing.assert_allclose(hidden.parameters["w"], plain.parameters["w"], atol=1e-5)
    assert sorted(hidden.rounds[0].missing) == ["2", "5"]


def test_too_few_that_stay_leave_the_model_as_it_is() -> None:
    def fails(parameters: Any, config: Mapping[str, Any]) -> Update:
        if site().index > 2:
            raise RuntimeError("no")
        return train(parameters, config)

    history = run(fails, secure=SecureAggregation(), patience=Patience(min_updates=1))
    assert "3 clients sent their masked update, 5 are needed" in history.rounds[0].note
    np.testing.assert_array_equal(history.parameters["w"], np.zeros(40))


def test_values_that_are_cut_off_are_reported_and_the_range_follows() -> None:
    """Every client moves everything by 6, which is in range after three doublings."""

    def far(parameters: Any, config: Mapping[str, Any]) -> Update:
        return Update({"w": parameters["w"] + 6}, 10)

    history = run(far, rounds=4, secure=SecureAggregation(limit=1.0))
    assert [each.saturation for each in history.rounds] == [1.0, 1.0, 1.0, 0.0]
    np.testing.assert_allclose(history.parameters["w"], 1 + 2 + 4 + 6, atol=1e-5)


def test_numbers_of_samples_above_the_bound_count_less_until_the_bound_follows() -> None:
    def heavy(parameters: Any, config: Mapping[str, Any]) -> Update:
        sign = 1 if site().index == 0 else -1
        return Update({"w": np.full(40, 0.1 * sign)}, 900 if site().index == 0 else 100)

    history = run(heavy, rounds=1, secure=SecureAggregation(max_samples=300))
    assert history.parameters["w"][0] == pytest.approx(0.1 * (300 - 600) / 900, abs=1e-6)
    history = run(heavy, rounds=3, secure=SecureAggregation(max_samples=300))
    assert history.parameters["w"][0] == pytest.approx(0.1 * (900 - 600) / 1500, abs=1e-6)


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="Krum needs each single update"):
        run(strategy=Krum(), secure=SecureAggregation())
    with pytest.raises(ValueError, match=r"threshold is 0\.5; a fraction above 0.5"):
        SecureAggregation(threshold=0.5)
    with pytest.raises(ValueError, match="limit=0"):
        SecureAggregation(limit=0)
