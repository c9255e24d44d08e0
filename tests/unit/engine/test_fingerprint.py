"""A call in 64 bits, from which other ranks' errors name it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.engine.call import Call
from potluck._core.engine.fingerprint import OPERATIONS, describe, undescribed
from potluck._core.types import ReduceOp
from potluck._core.wire.dtypes import NAMES

CALL = Call(Operation.ALL_REDUCE, Algorithm.TREE, "float32", (2, 3), ReduceOp.SUM)


def test_a_fingerprint_says_which_call_it_is() -> None:
    assert describe(CALL.fingerprint) == "all_reduce(float32, 6 elements, op sum, tree)"
    gather = replace(CALL, operation=Operation.GATHER, op=None, shape=(), dtype="bfloat16")
    assert describe(gather.fingerprint) == "gather(bfloat16, 1 element, tree)"
    assert describe(replace(CALL, operation=Operation.BARRIER).fingerprint) == "barrier"
    coded = replace(CALL, algorithm=Algorithm.DIRECT, codec="int8")
    assert describe(coded.fingerprint) == (
        "all_reduce(float32, 6 elements, op sum, direct, codec int8)"
    )
    coded = replace(coded, algorithm=Algorithm.HIERARCHICAL, codec="bf16")
    assert describe(coded.fingerprint) == (
        "all_reduce(float32, 6 elements, op sum, hierarchical, codec bf16)"
    )
    huge = replace(CALL, shape=(1 << 30,))
    assert describe(huge.fingerprint) == (
        "all_reduce(float32, at least 8388607 elements, op sum, tree)"
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_dtype_op_and_algorithm_has_its_place(operation: Operation) -> None:
    for dtype, op, algorithm in itertools.product(NAMES, (None, *ReduceOp), Algorithm):
        text = describe(Call(operation, algorithm, dtype, (5,), op).fingerprint)
        expected = [dtype, "5 elements", *([f"op {op}"] if op else []), algorithm.value]
        is_barrier = operation is Operation.BARRIER
        assert text == ("barrier" if is_barrier else f"{operation}({', '.join(expected)})")


@pytest.mark.parametrize("nonsense", [0, 1, undescribed("x"), 2**64 - 1, 1 << 60, 13 << 60])
def test_what_a_broken_peer_sends_is_described_as_nothing(nonsense: int) -> None:
    assert describe(nonsense) == ""


def test_the_engines_own_calls_are_not_described() -> None:
    assert describe(replace(CALL, parent_call="all_reduce(...)").fingerprint) == ""
