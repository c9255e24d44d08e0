"""What a call asks for is compiled once, and checked when it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from potluck._core import collectives
from potluck._core.codecs import codec_of
from potluck._core.collectives import Draft, Rank, VerificationError, centralized
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.engine.arrays.coding import Encoding
from potluck._core.engine.compiler import Compiler
from potluck._core.engine.request import Request
from potluck._core.types import Group, Member, ReduceOp

MEMBERS = tuple(Member(str(rank), node=str(rank)) for rank in range(3))


def compiler(segment_bytes: int = 1024) -> Compiler:
    return Compiler(Group(1, 1, MEMBERS), 0, (0, 1, 2), (0, 1, 2), segment_bytes)


def asked(dtype: Any = np.float32, size: int = 6, **changes: Any) -> Request:
    array = np.zeros(size, dtype)
    request = Request(Operation.ALL_REDUCE, array, array, ReduceOp.SUM, timeout_s=30.0)
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def test_a_registered_algorithm_is_verified_around_the_links_that_are_cut() -> None:
    def nothing_if_cut(rank: Rank) -> Draft:
        return Draft(1, []) if rank.cut else centralized.all_reduce(rank)

    collectives.register("nothing_if_cut", "all_reduce", nothing_if_cut)
    request = asked(algorithm=Algorithm("nothing_if_cut"))
    assert compiler().compile(request)
    group = Group(1, 1, MEMBERS, cut=((0, 1),))
    with pytest.raises(VerificationError):
        Compiler(group, 0, (0, 1, 2), (0, 1, 2), 1024).compile(request)


def test_the_same_call_on_other_memory_is_the_same_compiled_plan() -> None:
    compile_ = compiler().compile
    assert compile_(asked()) is compile_(asked(timeout_s=1.0))


@pytest.mark.parametrize(
    "other",
    [
        asked(np.float64),
        asked(size=7),
        asked(op=ReduceOp.MEAN),
        asked(algorithm=Algorithm.RING),
        asked(algorithm=Algorithm.CENTRALIZED, root=2),
        asked(encoding=Encoding(codec_of("fp16"))),
        asked(encoding=Encoding(codec_of("fp16"), np.zeros(6, np.float32))),
    ],
    ids=lambda request: str(request.algorithm),
)
def test_whatever_changes_the_plan_is_compiled_apart(other: Request) -> None:
    compile_ = compiler().compile
    assert compile_(asked()) is not compile_(other)


def test_segments_are_counted_when_a_plan_is_compiled() -> None:
    compiled = compiler(segment_bytes=4).compile(asked(size=6, algorithm=Algorithm.RING))
    assert compiled.num_segments == {0: 2, 1: 2, 2: 2}
    assert compiled.sends.keys() == {2}
    assert compiled.receives.keys() == {0}


def test_what_has_no_meaning_is_refused_each_time() -> None:
    compile_ = compiler().compile
    for _ in range(2):
        with pytest.raises(ValueError, match="root 3 is outside a world of 3"):
            compile_(asked(root=3))
        with pytest.raises(TypeError, match="mean of int64"):
            compile_(asked(np.int64, op=ReduceOp.MEAN))
        with pytest.raises(ValueError, match="the residual holds one float32"):
            compile_(asked(encoding=Encoding(codec_of("fp16"), np.zeros(5, np.float32))))
