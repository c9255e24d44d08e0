"""Which plans exist, and what ``make_plan`` says to a caller who asks for others."""

from __future__ import annotations

from typing import Any

import pytest

from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.collectives.registry import ROOTED, algorithms_for, make_plan

PAIRS = [(operation, a) for operation in Operation for a in algorithms_for(operation)]
WITHOUT = {
    (Operation.ALL_TO_ALL, Algorithm.TREE),
    (Operation.ALL_TO_ALL, Algorithm.HIERARCHICAL),
    (Operation.SCATTER, Algorithm.HIERARCHICAL),
    (Operation.GATHER, Algorithm.HIERARCHICAL),
    *((operation, Algorithm.DOUBLING) for operation in Operation if operation != "all_reduce"),
}


def test_every_pair_exists_but_those_that_make_no_sense() -> None:
    everything = {
        (operation, algorithm)
        for operation in Operation
        for algorithm in Algorithm
        if algorithm is not Algorithm.SHARED_MEMORY  # has no plan
    }
    assert everything - set(PAIRS) == WITHOUT


@pytest.mark.parametrize(("operation", "algorithm"), sorted(WITHOUT))
def test_a_missing_pair_is_refused_with_the_list_of_what_there_is(
    operation: Operation, algorithm: Algorithm
) -> None:
    with pytest.raises(
        ValueError, match=f"{operation} has no {algorithm} .*it has: ring, "
    ) as info:
        make_plan(operation, algorithm, 4, 0, nodes=(0, 0, 1, 1))
    assert all(name in str(info.value) for name in algorithms_for(operation))


def test_a_world_of_one_has_nothing_to_do() -> None:
    for operation, algorithm in PAIRS:
        plan = make_plan(operation, algorithm, 1, 0, nodes=(7,))
        assert plan.steps == ()
        assert plan.num_chunks >= 1


def test_chunks_are_named_as_plan_py_says() -> None:
    by_rank = {
        Operation.ALL_GATHER: 5,
        Operation.GATHER: 5,
        Operation.REDUCE_SCATTER: 5,
        Operation.SCATTER: 5,
        Operation.ALL_TO_ALL: 25,
    }
    for operation, algorithm in PAIRS:
        plan = make_plan(operation, algorithm, 5, 3, nodes=(0, 0, 1, 1, 1))
        if operation in by_rank:
            assert plan.num_chunks == by_rank[operation], plan


@pytest.mark.parametrize(
    ("arguments", "keywords", "text"),
    [
        (("all_reduce", "ring", 0, 0), {}, "world_size must be at least 1, not 0"),
        (("all_reduce", "ring", 4, 4), {}, "rank 4 is outside a world of 4"),
        (("all_reduce", "ring", 4, -1), {}, "rank -1 is outside a world of 4"),
        (("broadcast", "ring", 4, 0), {"root": 4}, "root 4 is outside a world of 4"),
        (("all_reduce", "ring", 4, 0), {"root": 1}, "ring all_reduce has no root"),
        (("all_reduce", "hierarchical", 4, 0), {}, "hierarchical all_reduce needs nodes"),
        (("all_reduce", "hierarchical", 4, 0), {"nodes": (0, 1)}, "nodes names 2 ranks"),
        (("all_reduce", "ring", 4, 0), {"nodes": (0,) * 5}, "nodes names 5 ranks"),
        (("all_reduce", "star", 4, 0), {}, "star"),
        (("sort", "ring", 4, 0), {}, "sort"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: tuple[Any, ...], keywords: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        make_plan(*arguments, **keywords)


def test_the_centralized_plans_take_a_centre() -> None:
    for operation in set(Operation) - ROOTED:
        plan = make_plan(operation, Algorithm.CENTRALIZED, 4, 1, root=2)
        assert {step.peer for step in plan.steps} == {2}


def test_the_same_question_gets_the_same_object() -> None:
    first = make_plan(Operation.ALL_REDUCE, Algorithm.RING, 4, 1)
    assert make_plan(Operation.ALL_REDUCE, Algorithm.RING, 4, 1) is first


def test_direct_peers_are_staggered() -> None:
    """In every position of the plan, all ranks address different peers."""
    for operation in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL):
        plans = [make_plan(operation, Algorithm.DIRECT, 7, rank) for rank in range(7)]
        for steps in zip(*(plan.steps for plan in plans), strict=True):
            assert len({step.peer for step in steps}) == 7


def test_a_mistyped_algorithm_gets_the_list_of_algorithms() -> None:
    with pytest.raises(ValueError, match="there is no algorithm 'rng'; the algorithms are ring, "):
        make_plan("all_reduce", "rng", 4, 0)
