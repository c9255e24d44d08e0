"""Algorithms of one's own: refused before they run where they would hang or give wrong results."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from potluck._core import collectives
from potluck._core.collectives import Action, Draft, Operation, Rank, Step, VerificationError
from potluck._core.collectives.plan import Algorithm
from potluck._core.collectives.registry import digest


def through_rank_0(rank: Rank) -> Draft:
    """A chain to rank 0, which adds, and a chain back."""
    steps = []
    last = rank.world_size - 1
    if rank.rank < last:
        steps.append(Step(Action.REDUCE, rank.rank + 1, 0))
    if rank.rank:
        steps.append(Step(Action.SEND, rank.rank - 1, 0))
        steps.append(Step(Action.COPY, rank.rank - 1, 0))
    if rank.rank < last:
        steps.append(Step(Action.SEND, rank.rank + 1, 0))
    return Draft(1, steps)


def without(action: Action, of: int) -> Callable[[Rank], Draft]:
    def builder(rank: Rank) -> Draft:
        draft = through_rank_0(rank)
        if rank.rank == of:
            return Draft(1, [step for step in draft.steps if step.action is not action])
        return draft

    return builder


def everyone_first_receives(rank: Rank) -> Draft:
    right, left = rank.right(), rank.left()
    return Draft(1, [Step(Action.REDUCE, left, 0), Step(Action.SEND, right, 0)])


def verified(name: str, world_size: int = 4) -> str:
    return digest(Operation.ALL_REDUCE, Algorithm(name), world_size, 0, None)


def test_a_registered_algorithm_is_verified_for_each_world() -> None:
    collectives.register("chain_of_mine", "all_reduce", through_rank_0)
    collectives.register("chain_of_mine", "all_reduce", through_rank_0)  # as a module reloaded
    assert len({verified("chain_of_mine", size) for size in range(1, 9)}) == 8
    assert "chain_of_mine" not in list(Algorithm)
    assert "chain_of_mine" not in collectives.algorithms_for(Operation.ALL_REDUCE), "never chosen"


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (without(Action.SEND, 2), "rank 1, step 0 .*: is never sent"),
        (without(Action.COPY, 2), "is never received"),
        (without(Action.REDUCE, 0), "is never received"),
        (everyone_first_receives, "deadlock"),
        (lambda rank: Draft(1, []), "lacking the contribution of rank 1, 2, 3"),
        (lambda rank: Draft(1, [Step(Action.SEND, 7, 0)]), "has no such peer"),
    ],
)
def test_plans_that_hang_or_give_wrong_results_are_refused(builder, message: str) -> None:
    name = f"wrong_{abs(hash(message))}_{id(builder)}"
    collectives.register(name, "all_reduce", builder)
    with pytest.raises(VerificationError, match=message):
        verified(name)


def test_what_can_not_be_registered() -> None:
    with pytest.raises(ValueError, match="'ring' can't be the name of an algorithm"):
        collectives.register("ring", "all_reduce", through_rank_0)
    with pytest.raises(ValueError, match="take another identifier"):
        collectives.register("my ring", "all_reduce", through_rank_0)
    with pytest.raises(TypeError, match="it must be a function of a Rank"):
        collectives.register("mine", "all_reduce", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sum_all"):
        collectives.register("mine", "sum_all", through_rank_0)
    collectives.register("taken", "all_reduce", through_rank_0)
    with pytest.raises(ValueError, match="another all_reduce algorithm 'taken' already"):
        collectives.register("taken", "all_reduce", everyone_first_receives)
    with pytest.raises(ValueError, match=r"there is no algorithm 'unknown'; .*taken"):
        Algorithm("unknown")
