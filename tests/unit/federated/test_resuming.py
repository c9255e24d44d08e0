"""A server that is killed goes on after its last whole round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck import federated
from potluck.errors import CheckpointError
from potluck.federated import (
    DifferentialPrivacy,
    FedAdam,
    FedAvg,
    Federation,
    History,
    Patience,
    SecureAggregation,
    Update,
    site,
)


class KilledServer(Exception):
    pass


def train(parameters: Any, config: Mapping[str, Any]) -> Update:
    random = np.random.default_rng([config["seed"], site().index])
    moved = parameters["w"] + random.uniform(-3, 3, 20).astype(np.float32)
    return Update({"w": moved}, 500 + 600 * site().index, {"loss": float(config["round"])})


def run(*, dies_after: int = 99, seen: list[int] | None = None, **options: Any) -> History:
    def evaluate(number: int, parameters: Any) -> Mapping[str, float]:
        if seen is not None:
            seen.append(number)
        if number > dies_after:
            raise KilledServer
        return {"first": float(parameters["w"][0]), "undefined": np.nan}

    def main(federation: Federation) -> History:
        options.setdefault("rounds", 5)
        return federation.run({"w": np.zeros(20, np.float32)}, evaluate=evaluate, **options)

    return federated.simulate(main, train, num_clients=4, seed=3)


@pytest.mark.parametrize("secure", [None, SecureAggregation(max_samples=100)], ids=["", "secure"])
@pytest.mark.parametrize("aggregation", [FedAvg, FedAdam])
def test_a_resumed_run_ends_as_an_undisturbed_one(
    aggregation: Any, secure: SecureAggregation | None, tmp_path: Path
) -> None:
    """With the moments of the aggregation, and the range that secure aggregation has found."""
    options = {"secure": secure, "rounds": 5}
    undisturbed = run(aggregation=aggregation(), **options)
    with pytest.raises(KilledServer):
        run(aggregation=aggregation(), dies_after=3, checkpoint=tmp_path, **options)
    seen: list[int] = []
    resumed = run(aggregation=aggregation(), checkpoint=tmp_path, seen=seen, **options)
    assert seen == [4, 5], "the fourth round was not whole"
    tolerance = {"atol": 0} if secure is None else {"atol": 1e-5}  # it rounds at random
    np.testing.assert_allclose(resumed.parameters["w"], undisturbed.parameters["w"], **tolerance)
    assert resumed.parameters["w"].dtype == np.float32
    assert [each.metrics for each in resumed.rounds] == [
        each.metrics for each in undisturbed.rounds
    ]
    assert [each.saturation for each in resumed.rounds] == [
        each.saturation for each in undisturbed.rounds
    ]
    assert np.isnan(resumed.rounds[0].evaluation["undefined"])


def test_what_was_released_before_the_kill_counts(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="pip install 'potluck[privacy]'")
    privacy = DifferentialPrivacy(1.0, 1.0)
    expected = run(privacy=privacy).rounds[-1].epsilon
    with pytest.raises(KilledServer):
        run(privacy=privacy, dies_after=2, checkpoint=tmp_path)
    assert run(privacy=privacy, checkpoint=tmp_path).rounds[-1].epsilon == expected


def test_a_run_that_is_over_is_not_run_again(tmp_path: Path) -> None:
    first = run(checkpoint=tmp_path)
    seen: list[int] = []
    again = run(checkpoint=tmp_path, seen=seen)
    assert seen == []
    np.testing.assert_array_equal(again.parameters["w"], first.parameters["w"])
    more = run(checkpoint=tmp_path, seen=seen, rounds=7)
    assert seen == [6, 7]
    assert len(more.rounds) == 7


def test_the_checkpoint_of_another_federation_is_refused(tmp_path: Path) -> None:
    run(checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=r"its aggregation is FedAvg, not FedAdam.*directory"):
        run(checkpoint=tmp_path, aggregation=FedAdam())

    def other(federation: Federation) -> History:
        return federation.run({"w": np.zeros(3)}, rounds=1, checkpoint=tmp_path)

    with pytest.raises(
        CheckpointError, match=r"array 'w' has shape \(20,\), the global one \(3,\)"
    ):
        federated.simulate(other, train, num_clients=2)


def test_answer_times_are_kept_for_the_deadline(tmp_path: Path) -> None:
    """A first deadline of 600 s after each restart would be a long wait for a client that hangs."""
    deadlines = federated.patience.Deadlines(Patience())
    deadlines.note([2.0, 3.0], 0, 600.0)
    fresh = federated.patience.Deadlines(Patience())
    fresh.seconds = deadlines.seconds
    assert fresh.next_s() == deadlines.next_s() < 600
