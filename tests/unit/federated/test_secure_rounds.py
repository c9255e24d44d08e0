"""Secure aggregation in whole rounds: the aggregation gets what it would get without."""

from __future__ import annotations

import re
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
from potluck.federated.secure.client import MaskingClient
from potluck.federated.secure.masking import NUM_EXTRA
from potluck.federated.secure.settings import Range


def train(parameters: Any, config: Mapping[str, Any]) -> Update:
    random = np.random.default_rng([site().index, config["round"]])
    moved = {name: each + random.uniform(-0.5, 0.5, 40) for name, each in parameters.items()}
    return Update(moved, 10 + site().index)


def run(client: Any = train, **options: Any) -> History:
    def main(federation: Federation) -> History:
        return federation.run({"w": np.zeros(40)}, **{"rounds": 2, **options})

    return federated.simulate(main, client, num_clients=7)


@pytest.mark.parametrize("aggregation", [FedAvg, FedAdam])
def test_the_model_is_the_one_without_secure_aggregation(aggregation: Any) -> None:
    plain = run(aggregation=aggregation())
    hidden = run(aggregation=aggregation(), secure=SecureAggregation())
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


def test_clients_that_pull_apart_at_a_fixed_point_are_not_cut_off() -> None:
    """The mean change is 0 there, and that of each client is not."""
    targets = [0.9, 0.1, 0.1, 0.1]

    def pulls(parameters: Any, config: Mapping[str, Any]) -> Update:
        return Update({"w": np.full(4, targets[site().index])}, 100)

    def main(federation: Federation) -> History:
        found = []
        history = federation.run(
            {"w": np.zeros(4)},
            rounds=24,
            secure=SecureAggregation(),
            evaluate=lambda number, now: found.append(float(now["w"][0])) or {},
        )
        np.testing.assert_allclose(found, 0.3, atol=1e-7)
        return history

    history = federated.simulate(main, pulls, num_clients=4)
    assert [each.saturation for each in history.rounds] == [0.0] * 24


def test_the_range_becomes_finer_while_all_changes_are_small() -> None:
    """And never 0, when nothing changes."""
    here = Range(1.0, 1000)
    here.follow(0.0, 1, (0,) * 8)
    assert here.limit == 1.0
    for _ in range(2000):
        here.follow(0.0, 0, (0,) * 8)
    assert 0 < here.limit < 1e-11


def test_samples_beyond_the_bound_are_reported_and_covered_in_the_next_round(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sizes = [60_000, 500, 500]

    def own(parameters: Any, config: Mapping[str, Any]) -> Update:
        value = 0.9 if site().index == 0 else 0.1
        return Update({"w": np.full(4, value)}, sizes[site().index])

    def main(federation: Federation) -> History:
        return federation.run({"w": np.zeros(4)}, rounds=2, secure=SecureAggregation())

    history = federated.simulate(main, own, num_clients=3)
    assert [each.num_heavy for each in history.rounds] == [1, 0]
    plain = (0.9 * 60_000 + 0.1 * 1000) / 61_000
    np.testing.assert_allclose(history.parameters["w"], plain, atol=1e-6)
    assert "1 clients count with fewer samples than they have" in capfd.readouterr().err


class Hostile:
    """Makes client 3 break the protocol of ``MaskingClient`` at one of its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __call__(self, method: str, change: Any) -> None:
        right = getattr(MaskingClient, method)

        def wrong(own: MaskingClient, *arguments: Any) -> Any:
            found = right(own, *arguments)
            return change(found) if own._name == "3" else found

        self._patch.setattr(MaskingClient, method, wrong)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Hostile:
    return Hostile(monkeypatch)


def junk(sealed: dict[str, bytes], targets: str) -> dict[str, bytes]:
    return {n: bytes(len(each)) if n in targets else each for n, each in sealed.items()}


@pytest.mark.parametrize(
    ("method", "change", "text"),
    [
        ("keys", lambda keys: dict.fromkeys(keys, bytes(32)), "gives no shared secret"),
        ("keys", lambda keys: dict.fromkeys(keys, keys["mask"]), "is that of client 3, too"),
        ("shares", lambda shares: {"0": shares["0"]}, "not for the clients that take part"),
        ("shares", lambda shares: dict.fromkeys(shares, b""), "bytes are needed"),
        ("masked", lambda words: words[1:], "49 words, not 51|50 words, not 51"),
    ],
)
def test_a_client_that_breaks_the_protocol_is_named_and_the_round_goes_on(
    hostile: Hostile, method: str, change: Any, text: str
) -> None:
    hostile(method, change)
    plain = run(lambda p, config: train(p, config) if site().index != 3 else None, rounds=1)
    history = run(rounds=1, secure=SecureAggregation())
    assert re.search(text, history.rounds[0].missing["3"])
    assert not history.rounds[0].note
    np.testing.assert_allclose(history.parameters["w"], plain.parameters["w"], atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda opened: {"seeds": {}, "keys": {}},
        lambda opened: opened | {"seeds": {n: bytes(66) for n in opened["seeds"]}},
    ],
)
def test_a_client_that_opens_other_shares_spoils_nothing_and_is_left_out(
    hostile: Hostile, change: Any
) -> None:
    hostile("unmask", change)
    history = run(secure=SecureAggregation())
    assert history.rounds[0].arrived == tuple("0123456")
    assert not history.rounds[0].note
    assert history.rounds[1].arrived == tuple("012456")
    why = "left out: in round 1 it opened other shares than it was given"
    assert history.rounds[1].missing == {"3": why}


def test_a_client_whose_shares_others_cannot_read_costs_one_round(hostile: Hostile) -> None:
    hostile("shares", lambda shares: junk(shares, "0124"))
    history = run(secure=SecureAggregation())
    why = "made shares that others can't read"
    assert history.rounds[0].note == f"client 3 {why}; the parameters stay"
    assert history.rounds[1].arrived == tuple("012456")
    assert history.rounds[1].missing == {"3": f"left out: in round 1 it {why}"}
    assert not history.rounds[1].note


def test_a_client_that_accuses_another_falsely_has_no_effect(hostile: Hostile) -> None:
    hostile("unmask", lambda opened: {"unread": ["0", "1"]})
    history = run(secure=SecureAggregation())
    assert [each.arrived for each in history.rounds] == [tuple("0123456")] * 2
    assert not any(each.note or each.missing for each in history.rounds)


def test_junk_under_a_mask_is_refused_and_the_model_stays(hostile: Hostile) -> None:
    chance = np.random.default_rng(0)
    size = 40 + NUM_EXTRA
    hostile("masked", lambda words: chance.integers(0, 2**32, size, dtype=np.uint32))
    history = run(secure=SecureAggregation())
    for each in history.rounds:
        assert "this is no sum of clients' changes: one of them has sent something" in each.note
        assert each.saturation is None
    assert not history.parameters["w"].any()


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="Krum needs each single update"):
        run(aggregation=Krum(), secure=SecureAggregation())
    with pytest.raises(ValueError, match=r"threshold is 0\.5; a fraction above 0.5"):
        SecureAggregation(threshold=0.5)
    with pytest.raises(ValueError, match="limit=0"):
        SecureAggregation(limit=0)
