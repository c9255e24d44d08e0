"""A state from one rank to the others: whole, in pieces, and checked."""

from __future__ import annotations

import numpy as np
import pytest

from potluck.checkpoint.state import digest, encode
from potluck.context import DistributedContext
from potluck.errors import CheckpointError
from potluck.testing.world import WorldError, run_world
from potluck.training.transfer import PIECE_BYTES, broadcast_state


@pytest.mark.parametrize("length", [0, 1, PIECE_BYTES // 8, 2 * PIECE_BYTES // 8 + 5])
@pytest.mark.parametrize("source", [0, 2])
def test_whoever_wants_it_gets_the_state_of_the_source(length: int, source: int) -> None:
    state = {"w": np.arange(float(length)), "step": 7}

    def work(ctx: DistributedContext) -> object:
        mine = state if ctx.rank == source else None
        return broadcast_state(ctx, mine, source, wanted=ctx.rank == 1)

    results = run_world(3, work)
    assert results[1]["step"] == 7
    assert np.array_equal(results[1]["w"], state["w"])
    assert results[0] is None
    assert results[2] is None


def test_a_state_that_arrives_damaged_is_not_used() -> None:
    def work(ctx: DistributedContext) -> object:
        if ctx.rank == 1:
            return broadcast_state(ctx, None, 0, wanted=True)
        data = np.frombuffer(encode({"w": np.ones(3)}), np.uint8).copy()
        header = np.zeros(40, np.uint8)
        header[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
        header[8:] = np.frombuffer(bytes.fromhex(digest(data.tobytes())), np.uint8)
        data[-1] ^= 1
        ctx.broadcast(header, root=0)
        ctx.broadcast(data, root=0)
        return None

    with pytest.raises(WorldError) as caught:
        run_world(2, work)
    assert isinstance(caught.value.errors[1], CheckpointError)
    error = str(caught.value.errors[1])
    assert "the state from rank 0" in error
    assert "arrived damaged" in error


def test_an_impossible_length_is_refused_before_memory_is_taken() -> None:
    def work(ctx: DistributedContext) -> object:
        if ctx.rank == 0:
            header = np.full(40, 255, np.uint8)
            ctx.broadcast(header, root=0)
            return None
        return broadcast_state(ctx, None, 0, wanted=True)

    with pytest.raises(WorldError) as caught:
        run_world(2, work)
    assert isinstance(caught.value.errors[1], CheckpointError)
