"""Plans that spare the pairs of ranks that can't reach each other."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core.collectives.plan import Algorithm, Operation, Plan
from potluck._core.collectives.registry import ROOTED, build_plan, crossing
from potluck._core.collectives.spanning_tree import Cut, connects, cut_of
from potluck._core.collectives.verify import verify

TREE = Algorithm.SPANNING_TREE


def plans_of(operation: Operation, world_size: int, root: int, cut: Cut) -> list[Plan]:
    ranks = range(world_size)
    return [build_plan(operation, TREE, world_size, r, root, cut=cut) for r in ranks]


def prove(operation: Operation, world_size: int, cut: Cut) -> None:
    for root in range(world_size) if operation in ROOTED else [0]:
        plans = plans_of(operation, world_size, root, cut)
        verify(plans)
        used = cut_of((plan.rank, step.peer) for plan in plans for step in plan.steps)
        assert not set(used) & set(cut)
        assert crossing(operation, TREE, world_size, root, None, cut, False) is None


@pytest.mark.parametrize("operation", Operation)
def test_every_pair_may_be_cut_in_worlds_of_3_to_8(operation: Operation) -> None:
    for world_size in range(3, 9):
        for pair in combinations(range(world_size), 2):
            prove(operation, world_size, (pair,))


@pytest.mark.parametrize("operation", Operation)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_links_that_connect_all_will_do(operation: Operation, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(3, 8))
    pairs = list(combinations(range(world_size), 2))
    cut = cut_of(data.draw(st.sets(st.sampled_from(pairs), max_size=len(pairs) - world_size + 1)))
    if connects(world_size, cut):
        prove(operation, world_size, cut)
    else:
        with pytest.raises(ValueError, match="do not connect all"):
            plans_of(operation, world_size, 0, cut)


def test_around_a_rank_with_all_its_links_the_tree_is_a_star() -> None:
    plans = plans_of(Operation.BROADCAST, 5, 0, ((0, 1), (0, 2)))
    assert {step.peer for step in plans[3].steps} == {0, 1, 2, 4}
    for rank in (0, 1, 2, 4):
        assert {step.peer for step in plans[rank].steps} == {3}


def test_a_chain_of_links_is_followed_to_its_end() -> None:
    chain = cut_of(set(combinations(range(4), 2)) - {(0, 2), (2, 3), (1, 3)})
    assert connects(4, chain)
    plans = plans_of(Operation.GATHER, 4, 0, chain)
    assert [{step.peer for step in plan.steps} for plan in plans] == [{2}, {3}, {0, 3}, {1, 2}]


def test_links_that_do_not_connect_all_are_named() -> None:
    alone = ((0, 2), (1, 2))
    assert not connects(3, alone)
    assert connects(2, ())
    assert not connects(2, ((0, 1),))
    with pytest.raises(ValueError, match="no way leads to 2, without the links 0-2, 1-2"):
        plans_of(Operation.ALL_REDUCE, 3, 0, alone)


def test_other_algorithms_are_known_to_need_a_cut_link() -> None:
    def needs(algorithm: Algorithm, cut: Cut) -> tuple[int, int] | None:
        return crossing(Operation.ALL_REDUCE, algorithm, 4, 0, None, cut, False)

    assert needs(Algorithm.RING, ((1, 2),)) == (1, 2)
    assert needs(Algorithm.RING, ((0, 2),)) is None
    assert needs(Algorithm.DIRECT, ((0, 2),)) == (0, 2)
    assert needs(Algorithm.CENTRALIZED, ((1, 2), (2, 3))) is None
