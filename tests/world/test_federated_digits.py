"""Federations that learn handwritten digits, also with hostile clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from potluck import federated
from potluck.federated import (
    FedAdam,
    FedAvg,
    Federation,
    FedProx,
    FedYogi,
    Krum,
    Median,
    TrimmedMean,
    Update,
    site,
)
from support.digits import accuracy, alike, train, trained, zeros

CLIENTS = 10


def learned(aggregation: Any, client: Any = train, rounds: int = 10) -> float:
    def main(federation: Federation) -> float:
        return accuracy(federation.run(zeros(), rounds=rounds, aggregation=aggregation).parameters)

    return federated.simulate(main, client, num_clients=CLIENTS)


AGGREGATIONS = (FedAvg(), FedProx(0.01), FedAdam(), FedYogi())


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda each: type(each).__name__)
def test_digits_are_learned(aggregation: Any) -> None:
    assert learned(aggregation) > 0.88


def test_median_and_krum_hold_against_flipped_signs_and_fedavg_falls() -> None:
    """A fifth of the clients send the opposite of what they have learned, ten times as large."""

    def honest(parameters: Any, config: Mapping[str, Any]) -> Update:
        rows = alike(site().index, CLIENTS)
        return Update(trained(parameters, config, rows), len(rows))

    def hostile(parameters: Any, config: Mapping[str, Any]) -> Update:
        first = {name: array.copy() for name, array in parameters.items()}
        update = honest(parameters, config)
        if site().index not in (3, 7):
            return update
        flipped = {name: old - 10 * (update.parameters[name] - old) for name, old in first.items()}
        return Update(flipped, update.num_samples)

    clean = learned(FedAvg(), honest)
    found = {
        type(aggregation).__name__: learned(aggregation, hostile)
        for aggregation in (FedAvg(), Median(), Krum(2, keep=6), TrimmedMean(0.2))
    }
    print(f"without hostile clients {clean:.3f}; with two of ten: {found}")
    assert found["FedAvg"] < clean - 0.2
    assert found["Median"] > clean - 0.02
    assert found["Krum"] > clean - 0.02
