"""The choice: deterministic, the model's best, and kept."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from potluck._core.collectives import choose
from potluck._core.collectives.choose import (
    ROTATED,
    Chooser,
    _choose,
    choose_coded,
    estimate,
    least_seconds,
)
from potluck._core.collectives.doubling import MAX_BYTES
from potluck._core.collectives.links import LINKS, LinkModel, Wire
from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan
from potluck._core.collectives.registry import algorithms_for, make_plan
from potluck._core.collectives.simulate import simulate
from potluck._core.types import Engine, Group, Member, ReduceOp

DEFAULT = LINKS[Engine.NATIVE]
PAIRS = [(operation, a) for operation in Operation for a in algorithms_for(operation)]
NODES = (0, 0, 0, 0, 1, 1, 1, 1)


def world_of(operation: Operation, algorithm: Algorithm, nodes: tuple[int, ...]) -> list[Plan]:
    return [make_plan(operation, algorithm, len(nodes), r, nodes=nodes) for r in range(len(nodes))]


@pytest.mark.parametrize("nodes", [NODES, tuple(range(6)), (0,) * 5, (0, 1, 0, 1, 2)])
@pytest.mark.parametrize("operation", Operation)
def test_nothing_is_faster_in_the_model_than_what_was_chosen(
    operation: Operation, nodes: tuple[int, ...]
) -> None:
    links = replace(DEFAULT, nodes=nodes)
    for nbytes in (0, 1 << 12, 1 << 22):
        seconds = {
            algorithm: simulate(world_of(operation, algorithm, nodes), nbytes, links).seconds
            for algorithm in algorithms_for(operation)
            if algorithm is not Algorithm.DOUBLING or nbytes <= MAX_BYTES
        }
        chosen = choose(operation, nbytes, len(nodes), op=ReduceOp.SUM, nodes=nodes)
        assert seconds[chosen] <= min(seconds.values()) * 1.01


def test_ring_moves_much_and_fewer_hops_move_little() -> None:
    assert choose(Operation.ALL_REDUCE, 100 << 20, 8) is Algorithm.RING
    assert choose(Operation.ALL_REDUCE, 4, 8) is not Algorithm.RING
    assert choose(Operation.ALL_REDUCE, 100 << 20, 8, nodes=NODES) is Algorithm.HIERARCHICAL


def test_of_plans_that_are_equally_fast_the_one_that_relays_nothing_is_chosen() -> None:
    """The root's wire bounds a gather and a scatter, by whatever algorithm."""
    for operation in (Operation.GATHER, Operation.SCATTER):
        for nbytes in (1 << 20, 16 << 20):
            assert choose(operation, nbytes, 8) is Algorithm.DIRECT


def test_only_small_sums_are_exchanged_whole() -> None:
    for world_size in (2, 4, 8):
        assert choose(Operation.ALL_REDUCE, 4096, world_size, op=ReduceOp.MEAN) == "doubling"
    for world_size in (2, 3, 4, 8):
        for op, nbytes in ((ReduceOp.MAX, 4096), (ReduceOp.SUM, MAX_BYTES + 1), (None, 4)):
            assert choose(Operation.ALL_REDUCE, nbytes, world_size, op=op) != "doubling"


def test_without_nodes_or_on_flat_ones_hierarchical_is_no_candidate() -> None:
    for operation in Operation:
        for nodes in (None, (3,) * 8, tuple(range(8))):
            for nbytes in (0, 1 << 16, 1 << 26):
                chosen = choose(operation, nbytes, 8, nodes=nodes)
                assert chosen is not Algorithm.HIERARCHICAL


def test_a_codec_is_for_direct_plans_or_between_nodes_what_is_faster_in_the_model() -> None:
    def chosen(nbytes: int, nodes: tuple[int, ...] | None = NODES, **more: LinkModel) -> Algorithm:
        return choose_coded(Operation.ALL_REDUCE, nbytes, 8, 0.25, nodes=nodes, **more)

    for nbytes in (0, 1 << 12, 1 << 20, 100 << 20):
        seconds = {}
        for algorithm in (Algorithm.DIRECT, Algorithm.HIERARCHICAL):
            is_direct = algorithm is Algorithm.DIRECT
            links = replace(DEFAULT, nodes=NODES).encoded(0.25, within_nodes=is_direct)
            plans = [
                make_plan(Operation.ALL_REDUCE, algorithm, 8, rank, nodes=NODES, is_coded=True)
                for rank in range(8)
            ]
            seconds[algorithm] = simulate(plans, nbytes, links).seconds
        assert seconds[chosen(nbytes)] <= min(seconds.values()) * 1.01
    assert chosen(100 << 20) is Algorithm.HIERARCHICAL
    # Where the wires between nodes are as fast as memory, encoding everywhere saves more.
    fast = replace(DEFAULT, remote=Wire(DEFAULT.remote.alpha_s, 1 / 8e10))
    assert chosen(100 << 20, links=fast) is Algorithm.DIRECT
    for flat in (None, (3,) * 8, tuple(range(8))):
        assert chosen(100 << 20, flat) is Algorithm.DIRECT
    for operation in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER):
        assert choose_coded(operation, 100 << 20, 8, 0.25, nodes=NODES) is Algorithm.DIRECT


def test_measured_links_change_the_answer() -> None:
    """Where latency is everything, two hops beat fourteen."""
    far = Wire(alpha_s=0.5, beta_s_per_byte=1e-9)
    links = LinkModel(far, far, frame_s=1e-6, gamma_s_per_byte=0.0)
    assert choose(Operation.ALL_REDUCE, 100 << 20, 8) is Algorithm.RING
    assert choose(Operation.ALL_REDUCE, 100 << 20, 8, links=links) is Algorithm.DIRECT


def test_a_group_with_a_rank_on_the_python_engine_chooses_by_its_model() -> None:
    def of(*engines: Engine) -> Chooser:
        members = tuple(
            Member(str(rank), f"node{rank}", engine=engine) for rank, engine in enumerate(engines)
        )
        choosers = [Chooser(Group(1, rank, members), range(4), (0, 1, 2, 3)) for rank in range(4)]
        for operation, nbytes in questions:
            assert len({each.choose(operation, nbytes, 4) for each in choosers}) == 1
        return choosers[0]

    questions = [(operation, 1 << power) for operation in Operation for power in range(4, 26)]
    native = of(*[Engine.NATIVE] * 4)
    mixed = of(Engine.NATIVE, Engine.NATIVE, Engine.PYTHON, Engine.NATIVE)
    differs = 0
    for operation, nbytes in questions:
        by_engine = [
            choose(operation, nbytes, 4, nodes=(0, 1, 2, 3), links=LINKS[engine])
            for engine in (Engine.NATIVE, Engine.PYTHON)
        ]
        assert by_engine == [each.choose(operation, nbytes, 4) for each in (native, mixed)]
        differs += by_engine[0] is not by_engine[1]
    assert differs, "then one model would do"


@pytest.mark.parametrize("operation", Operation)
def test_the_bound_that_saves_simulations_is_a_bound(
    operation: Operation,
) -> None:
    for algorithm in algorithms_for(operation):
        check_bound(operation, algorithm)


def check_bound(operation: Operation, algorithm: Algorithm) -> None:
    slow = Wire(1e-3, 1e-7, 1e-9)
    for links in (
        replace(DEFAULT, nodes=NODES),
        replace(DEFAULT, nodes=NODES, local=Wire(0.0, 1e-8)),
        replace(DEFAULT, nodes=NODES, pairs=((0, 5, slow), (2, 0, slow))),
        replace(DEFAULT, nodes=NODES).encoded(0.25, within_nodes=True),
        replace(LINKS[Engine.PYTHON], nodes=tuple(range(8))),
        replace(DEFAULT, nodes=NODES, processors=2),
    ):
        for nbytes in (0, 1000, 10 << 20):
            plan = make_plan(operation, algorithm, 8, 0, nodes=links.nodes)
            least = least_seconds(plan, nbytes, links)
            assert 0 < least <= estimate(plan, nbytes, links) * (1 + 1e-9)


@pytest.mark.parametrize("operation", Operation)
def test_the_shortened_simulation_of_large_data_is_near_the_whole_one(
    operation: Operation,
) -> None:
    for algorithm in algorithms_for(operation):
        check_shortened(operation, algorithm)


def check_shortened(operation: Operation, algorithm: Algorithm) -> None:
    links = replace(DEFAULT, nodes=NODES)
    nbytes = 250 << 20
    whole = simulate(world_of(operation, algorithm, NODES), nbytes, links).seconds
    plan = make_plan(operation, algorithm, 8, 0, nodes=NODES)
    assert estimate(plan, nbytes, links) == pytest.approx(whole, rel=0.25)


def test_rotated_plans_do_look_alike_from_every_rank() -> None:
    for algorithm, operation in ROTATED:
        plans = [make_plan(operation, algorithm, 9, rank) for rank in range(9)]

        def seen_from(plan: Plan) -> list[tuple[Action, int]]:
            return [(action, (peer - plan.rank) % 9) for action, peer, _ in plan.steps]

        assert all(seen_from(plan) == seen_from(plans[0]) for plan in plans)


def test_sizes_of_one_power_of_two_share_an_answer() -> None:
    _choose.cache_clear()
    for nbytes in (513, 700, 1024):
        choose(Operation.ALL_REDUCE, nbytes, 4)
    assert _choose.cache_info().misses == 1
    choose(Operation.ALL_REDUCE, 1025, 4)
    assert _choose.cache_info().misses == 2


def test_the_first_answer_for_64_ranks_does_not_hold_training_up() -> None:
    nodes = tuple(rank // 4 for rank in range(64))
    started = time.monotonic()
    for operation in Operation:
        choose(operation, 1 << 20, 64, nodes=nodes)
    assert time.monotonic() - started < 60, "nine answers; under half a second on an idle machine"


def test_a_world_of_one_gets_an_answer_and_a_bad_question_none() -> None:
    for operation in Operation:
        assert choose(operation, 100, 1) in algorithms_for(operation)
    with pytest.raises(ValueError, match="nbytes must not be negative"):
        choose(Operation.ALL_REDUCE, -1, 4)
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        choose(Operation.ALL_REDUCE, 1, 0)
