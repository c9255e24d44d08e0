"""What the hierarchical plans are for: a node's wire carries one rank's bytes, not its workers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core.collectives.choose import Chooser, estimate, fastest
from potluck._core.collectives.links import LINKS, Sites, measured_links, named_sites, sites_of
from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan
from potluck._core.collectives.registry import ROOTED, algorithms_for, build_plan, make_plan
from potluck._core.collectives.simulate import chunk_sizes, simulate
from potluck._core.collectives.verify import verify
from potluck._core.engine.arrays.coding import coded_steps, takers_of
from potluck._core.types import Engine, Group, MeasuredPath, Member, ReduceOp

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


@st.composite
def nests(draw: st.DrawFn) -> tuple[tuple[int, ...], Sites]:
    """The nodes of ranks, and one to three levels of groups of them."""
    nodes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=14).map(tuple))
    level, sites = nodes, []
    for _ in range(draw(st.integers(1, 3))):
        into = {group: draw(st.integers(0, 3)) for group in sorted(set(level))}
        level = tuple(into[group] for group in level)
        sites.append(level)
    return nodes, tuple(sites)


@pytest.mark.costly
@settings(max_examples=150, deadline=None, derandomize=True)
@given(nest=nests(), seed=st.integers(0, 1 << 16))
def test_nested_plans_are_right_for_every_nesting_and_root(
    nest: tuple[tuple[int, ...], Sites], seed: int
) -> None:
    nodes, sites = nest
    world = len(nodes)
    for operation in algorithms_of_hierarchy():
        for root in range(world) if operation in ROOTED else (0,):
            plans = [
                build_plan(operation, Algorithm.HIERARCHICAL, world, r, root, nodes, sites=sites)
                for r in range(world)
            ]
            verify(plans)
            verify(plans, seed=seed)


def algorithms_of_hierarchy() -> list[Operation]:
    return [each for each in Operation if Algorithm.HIERARCHICAL in algorithms_for(each)]


@pytest.mark.parametrize("world", range(1, 25))
def test_nested_plans_of_every_world_size(world: int) -> None:
    """Nodes of two workers, racks of two nodes, sites of two racks, the last ones incomplete."""
    nodes = tuple(rank // 2 for rank in range(world))
    sites = (tuple(rank // 4 for rank in range(world)), tuple(rank // 8 for rank in range(world)))
    for operation in algorithms_of_hierarchy():
        verify(
            [
                build_plan(operation, Algorithm.HIERARCHICAL, world, r, 0, nodes, sites=sites)
                for r in range(world)
            ]
        )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(nest=nests())
def test_a_nested_all_reduce_costs_a_site_what_it_costs_one_rank_in_a_ring(
    nest: tuple[tuple[int, ...], Sites],
) -> None:
    nodes, sites = nest
    outer, num = sites[-1], len(set(sites[-1]))
    plans = [
        build_plan(
            Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, len(nodes), rank, 0, nodes, sites=sites
        )
        for rank in range(len(nodes))
    ]
    nbytes = plans[0].num_chunks * 10
    for ways in bytes_between_nodes(plans, outer, nbytes):
        assert set(ways.values()) == {2 * (num - 1) * nbytes // num}


def test_groups_that_are_not_nested_are_refused() -> None:
    for sites in (((0, 1, 0, 0),), ((0, 0, 1),), ((0, 0, 1, 1), (0, 1, 0, 0))):
        with pytest.raises(ValueError, match="each of these is in one of those"):
            build_plan(
                Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, 4, 0, 0, (0, 0, 1, 1), sites=sites
            )


def paths_of(rate: Callable[[int, int], float], num: int) -> list[MeasuredPath]:
    return [
        MeasuredPath(f"n{a}", f"n{b}", 1e-3, rate(a, b))
        for a in range(num)
        for b in range(num)
        if a != b and rate(a, b)
    ]


FAST, WIFI, WAN = 1e9, 5e7, 2e6


@pytest.mark.parametrize(
    ("rate", "sites"),
    [
        (lambda a, b: FAST, ()),
        (lambda a, b: FAST if a // 2 == b // 2 else FAST / 3, ()),  # no gap
        (lambda a, b: FAST if a // 3 == b // 3 else WAN, ((0, 0, 0, 1, 1, 1),)),
        (lambda a, b: 0.0 if a // 3 == b // 3 else WAN, ((0, 0, 0, 1, 1, 1),)),  # not measured
        (lambda a, b: WAN if a == 5 or b == 5 else FAST, ((0, 0, 0, 0, 0, 1),)),
        (lambda a, b: WAN if a == 5 else FAST, ((0, 0, 0, 0, 0, 1),)),  # slow in one direction
        (
            lambda a, b: FAST if a // 2 == b // 2 else WIFI if a // 4 == b // 4 else WAN,
            ((0, 0, 1, 1, 2, 2), (0, 0, 0, 0, 1, 1)),
        ),
        (lambda a, b: WAN, ()),  # every node alone
        (lambda a, b: FAST if abs(a - b) == 1 else WAN, ()),  # a chain: no groups
    ],
)
def test_sites_are_found_in_what_was_measured(
    rate: Callable[[int, int], float], sites: Sites
) -> None:
    nodes = [f"n{rank}" for rank in range(6)]
    assert sites_of(nodes, paths_of(rate, 6), FAST) == sites
    # Two workers a node, in another order of ranks.
    doubled = sites_of([*nodes, *nodes], paths_of(rate, 6), FAST)
    assert doubled == tuple(level + level for level in sites)


def test_nested_levels_are_chosen_where_the_model_says_so() -> None:
    """Two houses of four nodes: a ring of nodes would carry nearly twice the bytes between them."""
    nodes = [f"n{rank}" for rank in range(8)]
    paths = paths_of(lambda a, b: FAST if a % 2 == b % 2 else WAN, 8)
    links = measured_links(LINKS[Engine.NATIVE], nodes, paths)
    assert links.sites == (((0, 1) * 4),)
    size, flat = 64 << 20, tuple(range(8))
    found = fastest(Operation.ALL_REDUCE, size, 8, nodes=flat, links=links)
    assert found[0] is Algorithm.HIERARCHICAL
    for algorithm in (Algorithm.RING, Algorithm.TREE, Algorithm.DIRECT):
        plan = build_plan(Operation.ALL_REDUCE, algorithm, 8, 0)
        assert found[1] < 0.75 * estimate(plan, size, replace(links, nodes=flat)), algorithm
    even = measured_links(LINKS[Engine.NATIVE], nodes, paths_of(lambda a, b: FAST, 8))
    assert fastest(Operation.ALL_REDUCE, size, 8, nodes=flat, links=even)[0] is Algorithm.RING


@pytest.mark.parametrize(
    ("names", "sites"),
    [
        ("home home cabin cabin", ((0, 0, 1, 1),)),
        ("home Home HOME cabin", ((0, 0, 0, 1),)),
        ("home/r1 home/r1 home/r2 cabin", ((0, 0, 1, 2), (0, 0, 0, 1))),
        ("a/b/c/d a/b/c/d a/b/c/e cabin", ((0, 0, 1, 2), (0, 0, 0, 1))),  # equal levels are one
        ("home/r1 cabin/r1 home/r1 cabin/r1", ((0, 1, 0, 1),)),  # two racks of one name
        ("home home home/r1 home/r1", ((0, 0, 1, 1),)),  # no rack is a rack, too
        ("home home - -", ((0, 0, 1, 2),)),  # without a name: alone
        ("home home home home", ()),
        ("home cabin attic barn", ()),
        ("home - - -", ()),
        ("- - - -", ()),
    ],
)
def test_sites_by_name(names: str, sites: Sites) -> None:
    nodes = [f"n{rank}" for rank in range(4)]
    named = [name if name != "-" else "" for name in names.split()]
    assert named_sites(nodes, named) == sites
    doubled = named_sites([*nodes, *nodes], [*named, *named])
    assert doubled == tuple(level + level for level in sites)


def test_names_win_over_measured_links_which_decide_where_names_say_nothing() -> None:
    nodes = tuple(range(4))
    paths = tuple(paths_of(lambda a, b: FAST if a % 2 == b % 2 else WAN, 4))

    def sites(*names: str) -> Sites:
        members = tuple(Member(str(k), f"n{k}", site=name) for k, name in enumerate(names))
        return Chooser(Group(1, 0, members, paths=paths), range(4), nodes).sites

    assert sites("", "", "", "") == ((0, 1, 0, 1),)
    assert sites("home", "home", "cabin", "cabin") == ((0, 0, 1, 1),)
    assert sites("home", "home", "cabin", "") == ((0, 0, 1, 2),)
    assert sites("home", "", "", "") == ((0, 1, 0, 1),)


@pytest.mark.parametrize("size", [1 << 20, 64 << 20])
def test_named_levels_are_chosen_where_no_link_was_measured(size: int) -> None:
    nodes = [f"n{rank}" for rank in range(8)]
    names = [f"site{rank // 4}/rack{rank // 2}" for rank in range(8)]
    links = measured_links(LINKS[Engine.NATIVE], nodes, (), names)
    found = fastest(Operation.ALL_REDUCE, size, 8, ReduceOp.SUM, nodes=tuple(range(8)), links=links)
    assert found[0] is Algorithm.HIERARCHICAL
