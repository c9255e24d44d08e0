from __future__ import annotations

from dataclasses import replace

import pytest

from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.engine.call import Call
from potluck._core.types import ReduceOp

CALL = Call(Operation.REDUCE, Algorithm.TREE, "float32", (2, 3), ReduceOp.SUM, 1, 1024, (0, 2))


def test_equal_calls_have_equal_fingerprints() -> None:
    assert replace(CALL).fingerprint == CALL.fingerprint
    assert 0 <= CALL.fingerprint < 2**64


@pytest.mark.parametrize(
    "change",
    [
        {"operation": Operation.ALL_REDUCE},
        {"algorithm": Algorithm.DIRECT},
        {"dtype": "int32"},
        {"shape": (3, 2)},
        {"shape": (6,)},
        {"op": ReduceOp.MAX},
        {"op": None},
        {"root": 0},
        {"segment_bytes": 2048},
        {"ranks": (2, 0)},
        {"ranks": ()},
    ],
)
def test_whatever_ranks_must_agree_on_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert replace(CALL, **change).fingerprint != CALL.fingerprint


def test_a_call_reads_like_one() -> None:
    assert str(CALL) == "reduce(float32, shape (2, 3), op sum, root 1, tree)"
    assert str(replace(CALL, operation=Operation.BARRIER, op=None)) == "barrier"
