"""What the hierarchical plans are for: a node's wire carries one rank's bytes, not its workers'."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.collectives.links import LINKS
from potluck.collectives.plan import Action, Algorithm, Operation, Plan
from potluck.collectives.registry import build_plan, make_plan
from potluck.collectives.simulate import chunk_sizes, simulate
from potluck.collectives.verify import verify
from potluck.engine.arrays.coding import coded_steps, takers_of
from potluck.types import Engine

LAYOUTS = st.lists(st.integers(-2, 4), min_size=2, max_size=16).map(tuple)


def plans_of(operation: Operation, nodes: tuple[int, ...], root: int = 0) -> list[Plan]:
    world = len(nodes)
    return [
        build_plan(operation, Algorithm.HIERARCHICAL, world, rank, root=root, nodes=nodes)
        for rank in range(world)
    ]


def bytes_between_nodes(
    plans: list[Plan], nodes: tuple[int, ...], nbytes: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes that every node sends to other nodes, and that it receives from them."""
    sizes = chunk_sizes(plans[0], nbytes)
    sent, received = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
    for plan in plans:
        for action, peer, chunk in plan.steps:
            if action is Action.SEND and nodes[peer] != nodes[plan.rank]:
                sent[nodes[plan.rank]] += sizes[chunk]
                received[nodes[peer]] += sizes[chunk]
    return sent, received


@settings(max_examples=60, deadline=None, derandomize=True)
@given(nodes=LAYOUTS)
def test_an_all_reduce_costs_a_node_what_it_costs_one_rank_in_a_ring(
    nodes: tuple[int, ...],
) -> None:
    num_nodes = len(set(nodes))
    plans = plans_of(Operation.ALL_REDUCE, nodes)
    nbytes = plans[0].num_chunks * 10
    for ways in bytes_between_nodes(plans, nodes, nbytes):
        assert set(ways.values()) == {2 * (num_nodes - 1) * nbytes // num_nodes}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(nodes=LAYOUTS, seed=st.integers(0, 1 << 16))
def test_with_a_codec_an_all_reduce_costs_a_node_the_same_and_a_sum_is_passed_on_by_its_owner_only(
    nodes: tuple[int, ...], seed: int
) -> None:
    num_nodes, world = len(set(nodes)), len(nodes)
    algorithm = Algorithm.HIERARCHICAL
    plans = [
        build_plan(Operation.ALL_REDUCE, algorithm, world, rank, nodes=nodes, is_coded=True)
        for rank in range(world)
    ]
    verify(plans)
    verify(plans, seed=seed)
    nbytes = plans[0].num_chunks * 10
    for ways in bytes_between_nodes(plans, nodes, nbytes):
        assert set(ways.values()) == {2 * (num_nodes - 1) * nbytes // num_nodes}
    for plan in plans:
        coded = coded_steps(plan, nodes)
        takers = takers_of(plan, coded)
        for chunk in range(plan.num_chunks):
            crossing = [
                step.action
                for step, is_coded in zip(plan.steps, coded, strict=True)
                if is_coded and step.chunk == chunk
            ]
            away = num_nodes - 1
            owner = [Action.REDUCE] * away + [Action.SEND] * away
            assert crossing in ([], owner, [Action.SEND, Action.COPY]), "encoded more than once"
            assert takers.get(chunk, 0) == (away if crossing and crossing == owner else 0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(nodes=LAYOUTS, data=st.data())
def test_a_broadcast_enters_every_node_once_and_leaves_it_at_most_once(
    nodes: tuple[int, ...], data: st.DataObject
) -> None:
    root = data.draw(st.sampled_from(range(len(nodes))))
    for operation in (Operation.BROADCAST, Operation.REDUCE):
        plans = plans_of(operation, nodes, root)
        nbytes = plans[0].num_chunks * 10
        sent, received = bytes_between_nodes(plans, nodes, nbytes)
        if operation is Operation.REDUCE:
            sent, received = received, sent
        for node in set(nodes):
            assert received[node] == (0 if node == nodes[root] else nbytes)
            assert sent[node] <= nbytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(nodes=LAYOUTS)
def test_gathered_chunks_enter_a_node_once_and_scattered_sums_leave_it_once(
    nodes: tuple[int, ...],
) -> None:
    nbytes = len(nodes) * 10
    foreign = {node: nbytes - 10 * nodes.count(node) for node in nodes}
    plans = plans_of(Operation.ALL_GATHER, nodes)
    assert bytes_between_nodes(plans, nodes, nbytes)[1] == foreign
    plans = plans_of(Operation.REDUCE_SCATTER, nodes)
    assert bytes_between_nodes(plans, nodes, nbytes)[0] == foreign


def test_leaders_share_the_work_of_their_node() -> None:
    """With 2 nodes of 4, every worker sends as many bytes to the other node as its mates."""
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    plans = plans_of(Operation.ALL_REDUCE, nodes)
    sent = simulate(plans, 8000, replace(LINKS[Engine.NATIVE], nodes=nodes)).wire_bytes_sent
    assert sum(sent) == 2 * 8000
    assert set(sent) == {2000}


def test_node_numbers_are_only_names() -> None:
    one = plans_of(Operation.ALL_REDUCE, (0, 0, 1, 1, 2))
    other = plans_of(Operation.ALL_REDUCE, (9, 9, -4, -4, 5))
    assert one == other


@pytest.mark.parametrize("operation", [Operation.ALL_REDUCE, Operation.ALL_GATHER])
def test_on_nodes_of_one_rank_it_is_a_ring(operation: Operation) -> None:
    ring = [make_plan(operation, Algorithm.RING, 6, rank) for rank in range(6)]
    ours = plans_of(operation, (0, 1, 2, 3, 4, 5))
    assert [len(plan.steps) for plan in ours] == [len(plan.steps) for plan in ring]
    for plan in ours:
        assert {step.peer for step in plan.steps} == {(plan.rank - 1) % 6, (plan.rank + 1) % 6}
