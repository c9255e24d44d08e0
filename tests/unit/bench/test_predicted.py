"""What the cost model says beside a measurement, and where it has nothing to say."""

from __future__ import annotations

import pytest

from potluck._core.engine.loop.native import is_available
from potluck.cli.bench.comparison import predicted_s
from potluck.cli.bench.peers import PEERS
from potluck.cli.bench.placement import Here

MIB = 1 << 20


class TwoMachines(Here):
    def local_rank(self, rank: int) -> int:
        return rank % 2


def of(peer: str, nbytes: int = MIB, placement: Here | None = None) -> float | None:
    return predicted_s(PEERS[peer], "all-reduce", 4, nbytes, placement or Here())


@pytest.mark.parametrize("peer", ["gloo", "mpi", "potluck-int8"])
def test_other_libraries_and_codecs_are_not_modelled(peer: str) -> None:
    assert of(peer) is None


def test_calls_over_links_are_and_take_longer_with_more_data() -> None:
    for peer in ("potluck-tls", "potluck-ring", "potluck-python"):
        small, large = of(peer), of(peer, 16 * MIB)
        assert small is not None
        assert large is not None
        assert 0 < small < large, peer


def test_the_best_algorithm_is_not_slower_than_a_given_one() -> None:
    best, ring = of("potluck", placement=TwoMachines()), of("potluck-ring", placement=TwoMachines())
    assert best is not None
    assert ring is not None
    assert best <= ring


@pytest.mark.skipif(not is_available(), reason="shared memory needs the native core")
def test_calls_through_shared_memory_have_no_plan_to_model() -> None:
    assert of("potluck") is None
