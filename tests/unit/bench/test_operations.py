"""What is expected of each collective, and the bandwidth that follows from its time."""

from __future__ import annotations

import numpy as np
import pytest

from potluck.cli.bench import operations
from potluck.testing.world import run_world

NAMES = {
    "all-reduce": lambda ctx, mine: ctx.all_reduce(mine),
    "reduce": lambda ctx, mine: ctx.reduce(mine),
    "broadcast": lambda ctx, mine: ctx.broadcast(mine),
    "reduce-scatter": lambda ctx, mine: ctx.reduce_scatter(mine.reshape(ctx.world_size, -1)),
    "all-gather": lambda ctx, mine: ctx.all_gather(mine),
    "all-to-all": lambda ctx, mine: ctx.all_to_all(mine.reshape(ctx.world_size, -1)),
}


@pytest.mark.parametrize("operation", operations.OPERATIONS)
def test_expected_results_are_those_of_the_engine(operation: str) -> None:
    world_size = 3
    inputs = [operations.known(operation, world_size, 1200, rank) for rank in range(world_size)]
    assert not (inputs[0] == inputs[1]).any()
    results = run_world(
        world_size, lambda ctx: NAMES[operation](ctx, inputs[ctx.rank].copy()).reshape(-1)
    )
    for rank, result in enumerate(results):
        expected = operations.expected(operation, world_size, 1200, rank)
        if expected.size:
            np.testing.assert_allclose(result, expected, atol=1e-6)
        else:
            assert (operation, rank > 0) == ("reduce", True)


def test_the_size_is_that_of_the_whole_data() -> None:
    lengths = {name: operations.zeros(name, 4, 4096).nbytes for name in operations.OPERATIONS}
    assert lengths.pop("all-gather") == 1024
    assert set(lengths.values()) == {4096}
    with pytest.raises(ValueError, match="8 bytes are less than one float32 for each of 4 ranks"):
        operations.zeros("all-gather", 4, 8)


def test_bus_bandwidth_is_what_crosses_each_wire() -> None:
    # From nccl-tests' doc/PERFORMANCE.md: 2 (n-1)/n for all-reduce, (n-1)/n, or 1.
    bandwidth = {
        name: operations.bus_bandwidth(name, 4, 1000, 2.0) for name in operations.OPERATIONS
    }
    assert bandwidth == {
        "all-reduce": 750.0,
        "reduce-scatter": 375.0,
        "all-gather": 375.0,
        "broadcast": 500.0,
        "reduce": 500.0,
        "all-to-all": 375.0,
    }


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(ValueError, match="'gather' is not measured; choose from all-reduce"):
        operations.expected("gather", 2, 4096, 0)


def test_inputs_repeat_after_a_prime_number_of_elements() -> None:
    known = operations.known("all-reduce", 2, 1 << 20, 1)
    assert known.nbytes == 1 << 20
    assert (known[:100] == known[65_521:65_621]).all()
    assert not (known[:65_536] == known[65_536:131_072]).any()
