"""Differential privacy: clipping, noise, and an account that is the library's."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import federated
from potluck.errors import FederationError, MissingDependency
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
from potluck.federated.participant import SecureParticipant
from potluck.federated.privacy import Noise, PrivacyLoss, clipped, clipped_sum
from potluck.federated.secure.masking import Scale

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
    total = clipped_sum([np.array([30.0, 40.0]), np.array([0.3, 0.4])], 1.0, 2)
    np.testing.assert_allclose(total, [0.9, 1.2])
    np.testing.assert_array_equal(clipped_sum([], 1.0, 2), [0.0, 0.0])


@pytest.mark.parametrize("seed", [5, None])
def test_noise_is_standard_normal(seed: int | None) -> None:
    found = Noise(seed).normal(200_001)
    assert abs(found.mean()) < 0.02
    assert abs(found.std() - 1) < 0.02
    for width, share in [(1, 0.6827), (2, 0.9545), (3, 0.9973)]:
        assert abs((np.abs(found) < width).mean() - share) < 0.01
    assert abs(np.corrcoef(found[:100_000], found[100_001:])[0, 1]) < 0.02


def test_noise_without_a_seed_is_the_systems_secure_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.urandom", bytes)  # zeros
    radius = np.sqrt(-2 * np.log(2.0**-53))  # of the numbers 2**-53 and 0
    np.testing.assert_allclose(Noise(None).normal(2), [2 * radius, 0.0])


@settings(max_examples=50)
@given(num_clients=st.integers(3, 1000), size=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_a_clipped_change_stays_in_its_bound_when_it_is_rounded(
    num_clients: int, size: int, seed: int
) -> None:
    clip, session = 1.5, bytes(16)
    after = np.random.default_rng(seed).normal(size=size) * 100
    client = SecureParticipant("a", lambda before, config: Update([after], 7))
    client.keys(session)
    client._masks = NoMask()  # type: ignore[assignment]
    scale = Scale(clip, 1, num_clients)
    question = {"limit": clip, "max_samples": 1, "num_clients": num_clients, "clip": clip}
    words = client.masked(session, {}, [np.zeros(size)], {}, **question)["words"]
    assert np.linalg.norm(scale.decode(words, 1).mean) <= clip


class NoMask:
    def masked(self, sealed: Any, words: Any) -> Any:
        return words


def test_more_parameters_than_the_rounding_allows_are_refused() -> None:
    client = SecureParticipant("a", lambda before, config: Update([np.ones(100_000)], 7))
    client.keys(b"1")
    question = {"limit": 1.0, "max_samples": 1, "num_clients": 2**24, "clip": 1.0}
    with pytest.raises(ValueError, match="100000 parameters of 16777216 clients are too many"):
        client.masked(b"1", {}, [np.zeros(100_000)], {}, **question)  # type: ignore[arg-type]


def test_without_the_library_nothing_starts_and_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(
        MissingDependency, match=r"'dp_accounting', .* pip install 'potluck\[privacy\]'"
    ):
        run(DifferentialPrivacy(1.0, 1.0))


@pytest.mark.parametrize("secure", [None, SecureAggregation()])
def test_the_noise_is_of_the_size_asked_for_and_every_client_weighs_the_same(
    secure: SecureAggregation | None,
) -> None:
    pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")
    history = run(DifferentialPrivacy(0.2, clip=1.0, seed=4), secure=secure)
    expected = (1.0 + 9 * 0.5) / 10 / np.sqrt(2000)
    found = history.parameters["w"]
    deviation = 0.2 * 1.0 / 10
    assert abs(found.mean() - expected) < 5 * deviation / np.sqrt(2000)
    assert 0.9 < found.std() / deviation < 1.1


def test_epsilon_is_the_librarys() -> None:
    library = pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")
    history = run(DifferentialPrivacy(1.1, 1.0, delta=1e-6), rounds=4)
    accountant = library.rdp.RdpAccountant()
    for report in history.rounds:
        accountant.compose(library.GaussianDpEvent(1.1))
        assert report.epsilon == accountant.get_epsilon(1e-6)
    aggregation = FedAvg(0.4, sampling="poisson")
    history = run(DifferentialPrivacy(1.1, 1.0), rounds=3, num_clients=30, aggregation=aggregation)
    accountant = library.rdp.RdpAccountant()
    event = library.PoissonSampledDpEvent(0.4, library.GaussianDpEvent(1.1))
    accountant.compose(event, 3)
    assert history.rounds[-1].epsilon == accountant.get_epsilon(1e-5)


def test_orders_that_the_library_leaves_out_are_no_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")
    loss = PrivacyLoss()
    loss.note(1.0, 0.5)
    assert loss.epsilon(1e-5) == pytest.approx(3.89, abs=0.01)
    assert not caplog.records
    logging.getLogger("absl").warning("of something else")
    assert caplog.messages == ["of something else"]


def test_all_private_runs_of_a_federation_are_one_account() -> None:
    library = pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")

    def twice(federation: Federation) -> History:
        federation.run(ZEROS, rounds=2, privacy=DifferentialPrivacy(1.1, 1.0))
        return federation.run(ZEROS, rounds=1, privacy=DifferentialPrivacy(2.0, 1.0))

    history = federated.simulate(twice, train, num_clients=3)
    accountant = library.rdp.RdpAccountant()
    accountant.compose(library.GaussianDpEvent(1.1), 2)
    accountant.compose(library.GaussianDpEvent(2.0), 1)
    assert history.rounds[0].epsilon == accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("secure", [None, SecureAggregation()])
def test_a_round_is_released_with_noise_even_if_no_update_came(
    secure: SecureAggregation | None,
) -> None:
    """Otherwise a round that was left out would tell that few were asked."""
    pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")

    def fails(parameters: Any, config: Mapping[str, Any]) -> Update:
        raise RuntimeError("no")

    def main(federation: Federation) -> History:
        privacy = DifferentialPrivacy(1.0, 1.0)
        return federation.run(ZEROS, rounds=1, privacy=privacy, secure=secure)

    history = federated.simulate(main, fails, num_clients=10)
    [report] = history.rounds
    assert (report.arrived, report.note) == ((), "")
    assert report.epsilon is not None
    assert report.epsilon > 0
    assert 0.9 < history.parameters["w"].std() * 10 < 1.1


def test_a_poisson_round_that_asks_nobody_is_released_as_well() -> None:
    pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")
    aggregation = FedAvg(1e-9, sampling="poisson")
    history = run(DifferentialPrivacy(1.0, 1.0), aggregation=aggregation)
    assert history.rounds[0].asked == ()
    assert (history.parameters["w"] != 0).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"aggregation": Median()}, "Median needs each single update"),
        ({"aggregation": FedAvg(0.5)}, r"FedAvg\(0.5, sampling='poisson'\)"),
        ({"patience": Patience(min_updates=3)}, "leave Patience's min_updates out"),
        (
            {"patience": Patience(wait_for=0.8)},
            r"wait_for=0\.8 out.* by 2 \* clip",
        ),
        ({"patience": Patience(wait_for=8)}, "leave Patience's wait_for=8 out"),
        ({"patience": Patience(wait_for=1)}, "leave Patience's wait_for=1 out"),
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
    pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")
    options = {"num_clients": 30, "aggregation": FedAvg(0.5, sampling="poisson")}

    def asked(privacy: DifferentialPrivacy) -> list[tuple[str, ...]]:
        return [report.asked for report in run(privacy, rounds=4, **options).rounds]

    assert asked(DifferentialPrivacy(1.1, 1.0)) != asked(DifferentialPrivacy(1.1, 1.0))
    seeded = DifferentialPrivacy(1.1, 1.0, seed=3)
    assert asked(seeded) == asked(seeded)


def private(federation: Federation, **options: Any) -> History:
    given = {"privacy": DifferentialPrivacy(1.0, 1.0), "secure": SecureAggregation(), "rounds": 1}
    return federation.run(ZEROS, **{**given, **options})


@pytest.mark.parametrize("num_clients", [2, 3])
def test_a_sum_that_hangs_on_one_client_is_refused_with_the_number_that_would_do(
    num_clients: int,
) -> None:
    """Of three clients: with one fewer there is noise alone, so the sum moves by 3 * clip."""
    pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")
    with pytest.raises(FederationError, match=r"Enough are 4 clients \(Patience\(min_clients=4\)"):
        federated.simulate(private, train, num_clients=num_clients)
    history = federated.simulate(private, train, num_clients=4)
    loss = PrivacyLoss()
    loss.note(1.0, 1.0)
    assert history.rounds[-1].epsilon == loss.epsilon(1e-5)


def test_random_cohorts_that_may_be_too_small_for_a_sum_are_refused_or_accounted() -> None:
    library = pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")

    def few(federation: Federation) -> History:
        return private(federation, aggregation=FedAvg(0.2, sampling="poisson"), rounds=2)

    with pytest.raises(FederationError, match=r"each asked with probability 0\.2") as raised:
        federated.simulate(few, train, num_clients=60)
    (enough,) = map(int, re.findall(r"Enough are (\d+) clients", str(raised.value)))
    assert 60 < enough < 120
    missed = 2 * sum(
        math.comb(enough - 1, num) * 0.2**num * 0.8 ** (enough - 1 - num) for num in range(3)
    )
    assert 1e-7 < missed < 0.5e-5
    history = federated.simulate(few, train, num_clients=enough)
    accountant = library.rdp.RdpAccountant()
    accountant.compose(library.PoissonSampledDpEvent(0.2, library.GaussianDpEvent(1.0)), 2)
    assert history.rounds[-1].epsilon == pytest.approx(accountant.get_epsilon(1e-5 - missed))
    assert history.rounds[-1].epsilon > accountant.get_epsilon(1e-5)


def test_an_aggregation_that_does_not_say_how_many_it_asks_has_no_account_of_small_cohorts() -> (
    None
):
    pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")

    class Own(FedAvg):
        fraction = None  # type: ignore[assignment]

        def __init__(self) -> None:
            pass

    def main(federation: Federation) -> History:
        privacy = DifferentialPrivacy(1.0, 1.0, sampling_probability=0.5)
        return private(federation, aggregation=Own(), privacy=privacy)

    with pytest.raises(ValueError, match="Own does not say how many clients it asks"):
        federated.simulate(main, train, num_clients=100)


def drops_out(number: int) -> Any:
    """A client function that raises on the first ``number`` clients."""

    def function(parameters: Any, config: Mapping[str, Any]) -> Update:
        if site().index < number:
            raise OSError("away")
        return train(parameters, config)

    return function


@pytest.mark.parametrize(
    ("num_clients", "num_lost", "hangs"),
    [
        *((6, 0, False), (6, 1, False), (6, 2, True), (6, 3, False), (6, 6, False)),
        *((5, 1, False), (5, 2, True), (5, 3, False)),
    ],
)
def test_a_round_that_hung_on_one_client_by_others_dropping_out_has_no_bound(
    num_clients: int, num_lost: int, hangs: bool
) -> None:
    """Of five and of six clients four are needed, of four three, of seven five."""
    pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")
    history = federated.simulate(private, drops_out(num_lost), num_clients=num_clients)
    assert (history.rounds[-1].epsilon == math.inf) == hangs
    stayed = num_clients - num_lost
    assert len(history.rounds[-1].arrived) == (stayed if stayed >= 4 else 0)
