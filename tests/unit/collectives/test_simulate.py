"""The model of time: closed forms from the literature, limits, and what sharing a wire costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from potluck._core.collectives.links import LINKS, LinkModel, Wire
from potluck._core.collectives.plan import Algorithm, Operation, Plan
from potluck._core.collectives.registry import algorithms_for, build_plan, make_plan
from potluck._core.collectives.simulate import chunk_sizes, simulate, simulate_rotated
from potluck._core.types import Engine

DEFAULT = LINKS[Engine.NATIVE]
ALPHA, BETA, GAMMA = 1e-3, 1e-8, 3e-9
NBYTES = 5040 * 1000
WHOLE = 1 << 40
"""A segment longer than any chunk: no pipelining, as closed forms assume."""

PLAIN = LinkModel(Wire(ALPHA, BETA), Wire(ALPHA, BETA), frame_s=0.0, gamma_s_per_byte=GAMMA)


def world_of(
    operation: Operation,
    algorithm: Algorithm,
    world_size: int,
    nodes: tuple[int, ...] | None = None,
) -> list[Plan]:
    return [build_plan(operation, algorithm, world_size, r, nodes=nodes) for r in range(world_size)]


Formula = Callable[[int, float], float]
CLOSED_FORMS: dict[tuple[Operation, Algorithm], Formula] = {
    (Operation.ALL_REDUCE, Algorithm.RING): lambda p, n: (
        2 * (p - 1) * ALPHA + 2 * (p - 1) / p * n * BETA + (p - 1) / p * n * GAMMA
    ),
    (Operation.REDUCE_SCATTER, Algorithm.RING): lambda p, n: (
        (p - 1) * ALPHA + (p - 1) / p * n * (BETA + GAMMA)
    ),
    (Operation.ALL_GATHER, Algorithm.RING): lambda p, n: (p - 1) * (ALPHA + n / p * BETA),
    (Operation.ALL_REDUCE, Algorithm.DOUBLING): lambda p, n: (
        (p.bit_length() - 1) * (ALPHA + n * (BETA + GAMMA))
        + (2 * (ALPHA + n * BETA) + n * GAMMA) * (p.bit_count() > 1)
        # Rank 1, which has no partner beyond, sends meanwhile; rank 0 combines while its wire
        # sends.
        - (ALPHA + n * GAMMA) * (p == 3)
    ),
    (Operation.BROADCAST, Algorithm.RING): lambda p, n: (p - 1) * (ALPHA + n * BETA),
    (Operation.REDUCE, Algorithm.RING): lambda p, n: (p - 1) * (ALPHA + n * (BETA + GAMMA)),
    # The root's port sends w-1 chunks; the last of them has one hop to go.
    (Operation.SCATTER, Algorithm.RING): lambda p, n: ALPHA + (p - 1) / p * n * BETA,
    (Operation.SCATTER, Algorithm.DIRECT): lambda p, n: ALPHA + (p - 1) / p * n * BETA,
    (Operation.GATHER, Algorithm.DIRECT): lambda p, n: ALPHA + (p - 1) / p * n * BETA,
    (Operation.BROADCAST, Algorithm.CENTRALIZED): lambda p, n: ALPHA + (p - 1) * n * BETA,
    (Operation.ALL_GATHER, Algorithm.DIRECT): lambda p, n: ALPHA + (p - 1) / p * n * BETA,
    (Operation.ALL_TO_ALL, Algorithm.DIRECT): lambda p, n: ALPHA + (p - 1) / p * n * BETA,
    (Operation.REDUCE, Algorithm.CENTRALIZED): lambda p, n: ALPHA + (p - 1) * n * BETA + n * GAMMA,
}


@pytest.mark.parametrize(("operation", "algorithm"), sorted(CLOSED_FORMS))
def test_the_model_agrees_with_the_closed_form(operation: Operation, algorithm: Algorithm) -> None:
    for world_size in (2, 3, 4, 7, 8, 16):
        check_closed_form(operation, algorithm, world_size)


def check_closed_form(operation: Operation, algorithm: Algorithm, world_size: int) -> None:
    links = PLAIN
    if (operation, algorithm) == (Operation.SCATTER, Algorithm.RING) and world_size > 2:
        # A relay's port is as busy as the root's, less the latency it starts with.
        links = replace(PLAIN, remote=Wire(0.0, BETA))
        expected = (world_size - 1) / world_size * NBYTES * BETA
    else:
        expected = CLOSED_FORMS[operation, algorithm](world_size, NBYTES)
    simulated = simulate(world_of(operation, algorithm, world_size), NBYTES, links, WHOLE)
    assert simulated.seconds == pytest.approx(expected, rel=1e-3)


def test_a_tree_takes_a_logarithm_of_rounds() -> None:
    latency_only = LinkModel(Wire(1.0, 0.0), Wire(1.0, 0.0), 0.0, 0.0)
    for p in (2, 3, 4, 5, 8, 13, 16, 32):
        # On a binomial tree a chunk makes one hop for every binary digit 1 of its way.
        hops, rounds = max(way.bit_count() for way in range(p)), (p - 1).bit_length()
        for operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.SCATTER):
            plans = world_of(operation, Algorithm.TREE, p)
            assert hops <= simulate(plans, NBYTES, latency_only, WHOLE).seconds <= rounds
        plans = world_of(Operation.BROADCAST, Algorithm.TREE, p)
        height = p.bit_length()
        assert hops <= simulate(plans, NBYTES, latency_only, WHOLE).seconds <= height


def test_a_pipelined_chain_takes_segments_plus_hops_minus_one() -> None:
    links = replace(PLAIN, remote=Wire(0.0, BETA))
    for p, segments in ((2, 10), (5, 10), (9, 100)):
        plans = world_of(Operation.BROADCAST, Algorithm.RING, p)
        segment = NBYTES // segments
        expected = (segments + p - 2) * segment * BETA
        assert simulate(plans, NBYTES, links, segment).seconds == pytest.approx(expected)


def test_a_segmented_double_tree_broadcast_nears_full_bandwidth() -> None:
    """One binary tree would need 2 n beta: its inner ranks send everything twice."""
    links = replace(PLAIN, remote=Wire(0.0, BETA))
    plans = world_of(Operation.BROADCAST, Algorithm.TREE, 15)
    seconds = simulate(plans, NBYTES, links, NBYTES // 400).seconds
    assert NBYTES * BETA <= seconds < 1.1 * NBYTES * BETA


def test_every_frame_costs_its_fixed_price() -> None:
    links = LinkModel(Wire(0.0, 0.0), Wire(0.0, 0.0), frame_s=1.0, gamma_s_per_byte=0.0)
    plans = world_of(Operation.BROADCAST, Algorithm.RING, 2)
    # The receiver works for a frame while the sender works for the next.
    assert simulate(plans, 1000, links, 100).seconds == 11.0
    assert simulate(plans, 0, links, 100).seconds == 2.0  # an empty chunk is one empty segment


def test_a_rank_works_for_one_frame_at_a_time_sent_or_received() -> None:
    links = LinkModel(Wire(0.0, 0.0), Wire(0.0, 0.0), frame_s=1.0, gamma_s_per_byte=0.0)
    star = world_of(Operation.BROADCAST, Algorithm.CENTRALIZED, 4)
    assert simulate(star, 10, links).rank_seconds == (3.0, 2.0, 3.0, 4.0)
    exchange = world_of(Operation.ALL_TO_ALL, Algorithm.DIRECT, 4)
    assert simulate(exchange, 10, links).seconds == 6.0, "three frames sent and three received"


def test_ranks_that_share_processors_take_turns() -> None:
    links = LinkModel(Wire(0.0, 0.0), Wire(0.0, 0.0), frame_s=1.0, gamma_s_per_byte=0.0)
    exchange = world_of(Operation.ALL_TO_ALL, Algorithm.DIRECT, 4)
    for processors, seconds in ((1, 24.0), (2, 12.0), (4, 6.0), (9, 6.0)):
        shared = replace(links, processors=processors)
        assert simulate(exchange, 10, shared).seconds == seconds


def test_the_wire_carries_a_segment_while_the_rank_works_for_the_next() -> None:
    plans = world_of(Operation.BROADCAST, Algorithm.RING, 2)
    for beta, work in ((1e-8, 2e-9), (2e-9, 1e-8)):
        wire = Wire(0.0, beta, work)
        links = LinkModel(wire, wire, frame_s=0.0, gamma_s_per_byte=0.0)
        seconds = simulate(plans, NBYTES, links, NBYTES // 100).seconds
        assert seconds == pytest.approx(1e-8 * NBYTES, rel=0.03)


def test_bytes_to_a_rank_of_the_same_node_do_not_wait_for_the_wire_to_others() -> None:
    """A rank sends all its data to another node, and then to its neighbour."""
    nodes = (0, 1, 0)
    links = LinkModel(Wire(0.0, 1.0), Wire(0.0, 0.0), 0.0, 0.0, nodes=nodes)
    star = [
        build_plan(Operation.BROADCAST, Algorithm.CENTRALIZED, 3, r, nodes=nodes) for r in (0, 1, 2)
    ]
    assert [step.peer for step in star[0].steps] == [1, 2]
    assert simulate(star, 8, links).rank_seconds == (0.0, 8.0, 0.0)


def test_a_slow_pair_slows_the_ring_and_not_the_plan_that_avoids_it() -> None:
    slow = replace(PLAIN, pairs=((1, 2, Wire(ALPHA, 10 * BETA)),))
    ring = world_of(Operation.BROADCAST, Algorithm.RING, 4)
    star = world_of(Operation.BROADCAST, Algorithm.CENTRALIZED, 4)
    assert simulate(ring, NBYTES, slow).seconds > simulate(ring, NBYTES, PLAIN).seconds
    assert simulate(star, NBYTES, slow).seconds == simulate(star, NBYTES, PLAIN).seconds


def test_hierarchical_pays_where_workers_share_a_wire() -> None:
    nodes = tuple(rank // 4 for rank in range(16))
    links = replace(DEFAULT, nodes=nodes)
    hierarchical = world_of(Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, 16, nodes)
    direct = world_of(Operation.ALL_REDUCE, Algorithm.DIRECT, 16)
    nbytes = 20_000_000
    assert (
        3 * simulate(hierarchical, nbytes, links).seconds < simulate(direct, nbytes, links).seconds
    )
    alone = replace(links, shared_wire=False)
    assert simulate(direct, nbytes, alone).seconds < simulate(direct, nbytes, links).seconds / 2


def test_the_nodes_of_a_site_share_its_uplink() -> None:
    """Two sites of four nodes: all that crosses goes over one wire in each direction."""
    sites = ((0, 0, 0, 0, 1, 1, 1, 1),)
    links = replace(PLAIN, nodes=tuple(range(8)), sites=sites)
    direct = world_of(Operation.ALL_TO_ALL, Algorithm.DIRECT, 8)
    crossing = 16 * NBYTES // 8  # 4 nodes send a chunk to each of 4
    seconds = simulate(direct, NBYTES, links).seconds
    assert crossing * BETA <= seconds <= crossing * BETA + 7 / 8 * NBYTES * BETA + 2 * ALPHA
    alone = replace(links, sites=())
    assert simulate(direct, NBYTES, alone).seconds < seconds / 2
    # Three levels: each is a wire of its own, and the narrowest decides.
    racks = (0, 0, 1, 1, 2, 2, 3, 3)
    nested = replace(links, sites=(racks, *sites))
    assert simulate(direct, NBYTES, nested).seconds == pytest.approx(seconds, rel=0.25)
    ring = [build_plan(Operation.ALL_REDUCE, Algorithm.RING, 8, rank) for rank in range(8)]
    assert simulate(ring, NBYTES, nested).seconds == simulate(ring, NBYTES, alone).seconds


@pytest.mark.parametrize("operation", Operation)
def test_bytes_are_counted_where_they_are_sent(operation: Operation) -> None:
    nodes = (0, 0, 1, 1, 1)
    for algorithm in algorithms_for(operation):
        plans = world_of(operation, algorithm, 5, nodes)
        sizes = chunk_sizes(plans[0], 1003)
        expected = [sum(sizes[s.chunk] for s in p.steps if s.action == 0) for p in plans]
        simulated = simulate(plans, 1003, replace(DEFAULT, nodes=nodes), 64)
        assert simulated.bytes_sent == tuple(expected)
        assert all(w <= b for w, b in zip(simulated.wire_bytes_sent, expected, strict=True))
        assert simulated.seconds == max(simulated.rank_seconds)


def test_chunks_are_near_equal_and_add_up() -> None:
    ring = make_plan(Operation.ALL_REDUCE, Algorithm.RING, 4, 0)
    assert chunk_sizes(ring, 10) == [3, 3, 2, 2]
    exchange = make_plan(Operation.ALL_TO_ALL, Algorithm.DIRECT, 3, 0)
    assert chunk_sizes(exchange, 7) == [3, 2, 2] * 3
    barrier = make_plan(Operation.BARRIER, Algorithm.DIRECT, 3, 0)
    assert chunk_sizes(barrier, 7) == [0, 0, 0]


def test_one_rank_tells_all_where_all_do_the_same() -> None:
    for algorithm in (Algorithm.RING, Algorithm.DIRECT):
        plans = world_of(Operation.ALL_REDUCE, algorithm, 8)
        whole = simulate(plans, 8_000_000, DEFAULT, 1 << 18).seconds
        assert simulate_rotated(plans[:1], 8_000_000, DEFAULT, 1 << 18) == pytest.approx(whole)
        links = replace(DEFAULT, nodes=(0, 0, 1, 1, 2, 2, 3, 3))
        whole = simulate(plans, 8_000_000, links, 1 << 18).seconds
        assert simulate_rotated(plans[:2], 8_000_000, links, 1 << 18) == pytest.approx(whole)


def test_a_thousand_ranks_are_no_obstacle() -> None:
    """Trees need a few rounds, chains a thousand hops; both fit the closed form's order."""
    links = replace(PLAIN, gamma_s_per_byte=0.0)
    tree = simulate(world_of(Operation.BROADCAST, Algorithm.TREE, 1000), 0, links)
    assert tree.seconds <= 11 * ALPHA
    chain = simulate(world_of(Operation.BROADCAST, Algorithm.RING, 1000), 0, links)
    assert chain.seconds == pytest.approx(999 * ALPHA)


def test_impossible_questions_are_refused() -> None:
    plans = world_of(Operation.ALL_REDUCE, Algorithm.RING, 3)
    with pytest.raises(ValueError, match="-1 bytes"):
        simulate(plans, -1, PLAIN)
    with pytest.raises(ValueError, match="segments of 0"):
        simulate(plans, 1, PLAIN, 0)
    with pytest.raises(ValueError, match="nodes names 2 ranks in a world of 3"):
        simulate(plans, 1, replace(PLAIN, nodes=(0, 1)))


def test_plans_that_never_finish_are_not_given_a_time() -> None:
    plans = world_of(Operation.ALL_REDUCE, Algorithm.CENTRALIZED, 2)
    stuck = [plans[0], replace(plans[1], steps=tuple(reversed(plans[1].steps)))]
    with pytest.raises(AssertionError, match="never finish"):
        simulate(stuck, 1, PLAIN)
