"""Differential privacy: clipping, noise, and an account that is the library's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from potluck import federated
from potluck.errors import MissingDependency
from potluck.federated import (
    DifferentialPrivacy,
    FedAvg,
    Federation,
    History,
    Median,
    Patience,
    SecureAggregation,
    Update,
    site,
)
from potluck.federated.privacy import clipped, clipped_sum

ZEROS = {"w": np.zeros(2000)}


def train(parameters: Any, config: Mapping[str, Any]) -> Update:
    """A change of norm 10 for client 0, of norm 0.5 for all others."""
    size = 10.0 if site().index == 0 else 0.5
    step = np.full(2000, size / np.sqrt(2000))
    return Update({"w": parameters["w"] + step}, 1 + 100 * site().index)


def run(privacy: DifferentialPrivacy, num_clients: int = 10, **options: Any) -> History:
    def main(federation: Federation) -> History:
        return federation.run(ZEROS, **{"rounds": 1, "privacy": privacy, **options})

    return federated.simulate(main, train, num_clients=num_clients)


def test_clipping_bounds_the_norm_and_keeps_the_direction() -> None:
    np.testing.assert_allclose(clipped(np.array([3.0, 4.0]), 1.0), [0.6, 0.8])
    np.testing.assert_array_equal(clipped(np.array([0.3, 0.4]), 1.0), [0.3, 0.4])
    total = clipped_sum([np.array([30.0, 40.0]), np.array([0.3, 0.4])], 1.0)
    np.testing.assert_allclose(total, [0.9, 1.2])


def test_without_the_library_nothing_starts_and_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingDependency, match="pip install dp-accounting"):
        run(DifferentialPrivacy(1.0, 1.0))


@pytest.mark.parametrize("secure", [None, SecureAggregation()])
def test_the_noise_is_of_the_size_asked_for_and_every_client_weighs_the_same(
    secure: SecureAggregation | None,
) -> None:
    pytest.importorskip("dp_accounting", reason="pip install dp-accounting")
    history = run(DifferentialPrivacy(0.2, clip=1.0, seed=4), secure=secure)
    expected = (1.0 + 9 * 0.5) / 10 / np.sqrt(2000)
    found = history.parameters["w"]
    deviation = 0.2 * 1.0 / 10
    assert abs(found.mean() - expected) < 5 * deviation / np.sqrt(2000)
    assert 0.9 < found.std() / deviation < 1.1


def test_epsilon_is_the_librarys() -> None:
    library = pytest.importorskip("dp_accounting", reason="pip install dp-accounting")
    history = run(DifferentialPrivacy(1.1, 1.0, delta=1e-6), rounds=4)
    accountant = library.rdp.RdpAccountant()
    for report in history.rounds:
        accountant.compose(library.GaussianDpEvent(1.1))
        assert report.epsilon == accountant.get_epsilon(1e-6)
    strategy = FedAvg(0.4, sampling="poisson")
    patience = Patience(min_updates=1)
    settings = {"num_clients": 30, "strategy": strategy, "patience": patience}
    history = run(DifferentialPrivacy(1.1, 1.0), rounds=3, **settings)
    accountant = library.rdp.RdpAccountant()
    event = library.PoissonSampledDpEvent(0.4, library.GaussianDpEvent(1.1))
    accountant.compose(event, 3)
    assert history.rounds[-1].epsilon == accountant.get_epsilon(1e-5)


def test_a_round_that_publishes_nothing_costs_nothing() -> None:
    pytest.importorskip("dp_accounting", reason="pip install dp-accounting")
    history = run(DifferentialPrivacy(1.0, 1.0), patience=Patience(min_updates=11))
    assert history.rounds[0].epsilon == 0
    np.testing.assert_array_equal(history.parameters["w"], ZEROS["w"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": Median()}, "Median needs each single update"),
        ({"strategy": FedAvg(0.5)}, r"FedAvg\(0.5, sampling='poisson'\)"),
    ],
)
def test_strategies_that_do_not_fit(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(DifferentialPrivacy(1.0, 1.0), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"noise_multiplier": 0}, "noise_multiplier=0"),
        ({"clip": -1.0}, "clip=-1.0 must be above 0"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"sampling_probability": 2.0}, "sampling_probability is 2.0"),
    ],
)
def test_arguments_that_do_not_fit(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DifferentialPrivacy(**{"noise_multiplier": 1.0, "clip": 1.0, **options})


def test_which_clients_are_asked_does_not_follow_from_the_federations_seed() -> None:
    pytest.importorskip("dp_accounting", reason="pip install dp-accounting")
    settings = {"num_clients": 30, "strategy": FedAvg(0.5, sampling="poisson")}
    settings["patience"] = Patience(min_updates=1)

    def asked(privacy: DifferentialPrivacy) -> list[tuple[str, ...]]:
        return [report.asked for report in run(privacy, rounds=4, **settings).rounds]

    assert asked(DifferentialPrivacy(1.1, 1.0)) != asked(DifferentialPrivacy(1.1, 1.0))
    seeded = DifferentialPrivacy(1.1, 1.0, seed=3)
    assert asked(seeded) == asked(seeded)
