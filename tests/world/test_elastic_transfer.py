"""A state from one rank to the others: whole, in pieces, and checked."""

from __future__ import annotations

import json
import re
import resource

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck.checkpoint.state import digest, encode, head_bytes, specs, specs_in
from potluck.errors import CheckpointError
from potluck.testing.world import WorldError, run_world
from potluck.training.transfer import (
    MAX_OWN_BYTES,
    PIECE_BYTES,
    Expected,
    broadcast_state,
    gather_states,
)


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
        data = bytearray(encode({"w": np.ones(3)}))
        header, head = announced(len(data), bytes(data))
        data[-1] ^= 1
        ctx.broadcast(header, root=0)
        ctx.broadcast(head, root=0)
        ctx.broadcast(np.frombuffer(data, np.uint8)[len(head) :], root=0)
        return None

    with pytest.raises(WorldError) as caught:
        run_world(2, work)
    assert isinstance(caught.value.errors[1], CheckpointError)
    error = str(caught.value.errors[1])
    assert "the state from rank 0" in error
    assert "arrived damaged" in error


def announced(length: int, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """What a sender broadcasts before the tensors: lengths and hash; the head of the state."""
    head = data[: head_bytes(data)]
    lengths = length.to_bytes(8, "little") + len(head).to_bytes(8, "little")
    header = lengths + bytes.fromhex(digest(data))
    return np.frombuffer(header, np.uint8).copy(), np.frombuffer(head, np.uint8).copy()


def head_of(**tensors: tuple[str, list[int]]) -> bytes:
    """The head of a state, as a hostile rank writes it: no tensor has its bytes."""
    described = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()}
    text = json.dumps(described | {"__metadata__": {"potluck.tree": "null"}}).encode()
    return len(text).to_bytes(8, "little") + text


def refusal_of(length: int, head: bytes, expected: Expected | None = None) -> str:
    """The error of rank 1, to which rank 0 announces a state of ``length`` bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def work(ctx: DistributedContext) -> object:
        if ctx.rank == 0:
            for part in announced(length, head):
                ctx.broadcast(part, root=0)
            return None
        return broadcast_state(ctx, None, 0, wanted=True, expected=expected)

    with pytest.raises(WorldError) as caught:
        run_world(2, work)
    assert isinstance(caught.value.errors[1], CheckpointError)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 256 << 10, "the length was believed"
    return str(caught.value.errors[1])


HUGE = head_of(w=("F32", [1 << 30]))
MINE = {"model": {"w": np.zeros((3, 2), np.float32), "step": np.zeros((), np.int64)}}


@pytest.mark.parametrize(
    ("length", "head", "error"),
    [
        (1 << 42, b"\xff" * 8, "a state with a head of 8 bytes|not the head"),
        (4, head_of(w=("F32", [1])), "a state with a head of"),
        (len(HUGE) + (1 << 33), HUGE, "its head says other"),
        (len(HUGE) + (4 << 30), HUGE, r"of 4294967296 bytes; this rank, whose own state has 0"),
        (9, head_of(w=("F32", [-1])), "not the head of a potluck state|with a head of"),
        (1 << 40, head_of(w=("F32", [-1])), "not the head of a potluck state.*-1 is no size"),
        (1 << 40, head_of(w=("F4096", [1])), "not the head of a potluck state.*F4096"),
        (1 << 40, b"\x05" + bytes(7) + b"[[[[[", "not the head of a potluck state"),
    ],
)
def test_an_impossible_state_is_refused_before_memory_is_taken(
    length: int, head: bytes, error: str
) -> None:
    assert re.search(error, refusal_of(length, head))


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"model/w": ("F32", [3, 2])}, "'model/step' is missing there, int64 of shape () here"),
        (
            {"model/w": ("F32", [3, 3]), "model/step": ("I64", [])},
            "'model/w' is float32 of shape (3, 3) there, float32 of shape (3, 2) here",
        ),
        (
            {"model/w": ("F64", [3, 2]), "model/step": ("I64", [])},
            "'model/w' is float64 of shape (3, 2) there, float32 of shape (3, 2) here",
        ),
    ],
)
def test_a_state_of_another_model_names_the_first_difference(
    tensors: dict[str, tuple[str, list[int]]], error: str
) -> None:
    head = head_of(**tensors)
    length = len(head) + sum(spec.nbytes for spec in specs_in(head).values())
    said = refusal_of(length, head, Expected(own=MINE, fixed=MINE))
    assert f"the state of rank 0 (worker 0) belongs to another model: {error}" in said
    assert said.endswith("give every rank the same model")


def test_what_a_rank_does_not_know_of_a_state_is_bounded_by_its_own_and_an_argument() -> None:
    """An optimizer has moments only after its first step, which a newcomer has not made."""
    moments = {"model": MINE["model"], "m": np.ones(1000), "v": np.ones(1000)}
    own = sum(spec.nbytes for spec in specs(MINE).values())

    def work(ctx: DistributedContext, room: int) -> object:
        expected = Expected(own=MINE, fixed=MINE, max_bytes=room)
        mine = moments if ctx.rank == 0 else None
        return broadcast_state(ctx, mine, 0, wanted=ctx.rank == 1, expected=expected)

    received = run_world(2, lambda ctx: work(ctx, 16_000 + own - 8 * own))[1]
    assert received["m"].tolist() == [1.0] * 1000
    with pytest.raises(WorldError) as caught:
        run_world(2, lambda ctx: work(ctx, 16_000 + own - 8 * own - 1))
    assert "takes 8 times that and 15775 bytes (max_state_bytes" in str(caught.value.errors[1])


def test_states_of_the_ranks_own_are_bounded_together() -> None:
    def work(ctx: DistributedContext) -> object:
        if ctx.rank == 0:
            ctx.all_gather(np.array([MAX_OWN_BYTES // 2 + 1], np.int64))
            return None
        return gather_states(ctx, None)

    with pytest.raises(WorldError) as caught:
        run_world(2, work)
    error = str(caught.value.errors[1])
    assert "rank 0 (worker 0) announces a state of 536870913 bytes of its own" in error
