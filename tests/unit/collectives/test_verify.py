"""Every plan is proven; and the proof is worth something: broken plans are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan, Step
from potluck._core.collectives.registry import ROOTED, algorithms_for, build_plan, make_plan
from potluck._core.collectives.verify import VerificationError, verify

PAIRS = [(operation, a) for operation in Operation for a in algorithms_for(operation)]
SEND, COPY, REDUCE = Action


def world_of(
    operation: Operation,
    algorithm: Algorithm,
    world_size: int,
    root: int = 0,
    nodes: tuple[int, ...] | None = None,
) -> list[Plan]:
    return [
        build_plan(operation, algorithm, world_size, rank, root=root, nodes=nodes)
        for rank in range(world_size)
    ]


def roots_of(operation: Operation, algorithm: Algorithm, world_size: int) -> list[int]:
    if operation not in ROOTED and algorithm is not Algorithm.CENTRALIZED:
        return [0]
    if world_size <= 8:
        return list(range(world_size))
    return [0, world_size // 2, world_size - 1]


def layouts_of(world_size: int) -> list[tuple[int, ...]]:
    ranks = range(world_size)
    layouts = {
        (0,) * world_size,
        tuple(ranks),
        tuple(rank // 4 for rank in ranks),
        tuple(rank % 3 for rank in ranks),
        tuple(min(rank, 5) for rank in ranks),
        tuple(max(0, rank - world_size // 2) for rank in reversed(ranks)),
    }
    return sorted(layouts)


@pytest.mark.costly
@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_every_plan_is_right_in_worlds_of_1_to_32(
    operation: Operation, algorithm: Algorithm
) -> None:
    hierarchical = algorithm is Algorithm.HIERARCHICAL
    for world_size in range(1, 33):
        layouts = layouts_of(world_size) if hierarchical else [None]
        roots = roots_of(operation, algorithm, world_size)
        if hierarchical and world_size > 8:
            roots = roots[-2:]
        for nodes in layouts:
            for root in roots:
                verify(world_of(operation, algorithm, world_size, root, nodes))


@pytest.mark.costly
@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_layout_root_and_schedule_will_do(
    operation: Operation, algorithm: Algorithm, data: st.DataObject
) -> None:
    nodes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=14).map(tuple))
    root = data.draw(st.sampled_from(roots_of(operation, algorithm, len(nodes))))
    seed = data.draw(st.integers(0, 999))
    verify(world_of(operation, algorithm, len(nodes), root, nodes), seed=seed)


@pytest.mark.parametrize("algorithm", algorithms_for(Operation.ALL_REDUCE))
def test_larger_worlds_are_right_too(algorithm: Algorithm) -> None:
    nodes = tuple(rank // 7 for rank in range(65))
    verify(world_of(Operation.ALL_REDUCE, algorithm, 65, nodes=nodes))


# Mutations. NODES makes the hierarchical plans use both floors.

NODES = (0, 1, 0, 1, 1)


def edited(plans: list[Plan], rank: int, steps: list[Step]) -> list[Plan]:
    return [replace(p, steps=tuple(steps)) if p.rank == rank else p for p in plans]


@pytest.mark.parametrize("operation", Operation)
def test_any_step_dropped_or_sent_astray_is_noticed(operation: Operation) -> None:
    for algorithm in algorithms_for(operation):
        check_spoilt_steps(operation, algorithm)


def check_spoilt_steps(operation: Operation, algorithm: Algorithm) -> None:
    plans = world_of(operation, algorithm, 5, 0, NODES)
    for plan in plans:
        for index, step in enumerate(plan.steps):
            before, after = list(plan.steps[:index]), list(plan.steps[index + 1 :])
            other_peer = next(r for r in range(5) if r not in (plan.rank, step.peer))
            mutants = [[], [step, step], [step._replace(peer=other_peer)]]
            if plan.num_chunks > 1:
                mutants.append([step._replace(chunk=(step.chunk + 1) % plan.num_chunks)])
            if step.action is not SEND and operation is not Operation.BARRIER:
                mutants.append([step._replace(action=COPY if step.action is REDUCE else REDUCE)])
            for mutant in mutants:
                with pytest.raises(VerificationError, match=r"rank \d"):
                    verify(edited(plans, plan.rank, before + mutant + after))


@pytest.mark.parametrize("operation", Operation)
def test_no_plan_makes_a_transfer_it_could_do_without(operation: Operation) -> None:
    """Dropping a send *and* its receive leaves a plan that runs, and is wrong."""
    for algorithm in algorithms_for(operation):
        check_dropped_transfers(operation, algorithm)


def check_dropped_transfers(operation: Operation, algorithm: Algorithm) -> None:
    plans = world_of(operation, algorithm, 5, 0, NODES)
    for plan in plans:
        num_sent: dict[int, int] = {}
        for index, step in enumerate(plan.steps):
            if step.action is not SEND:
                continue
            place = num_sent.get(step.peer, 0)
            num_sent[step.peer] = place + 1
            receiver = plans[step.peer]
            receives = [
                i
                for i, (action, peer, _) in enumerate(receiver.steps)
                if action is not SEND and peer == plan.rank
            ]
            mutant = edited(plans, plan.rank, [*plan.steps[:index], *plan.steps[index + 1 :]])
            cut = receives[place]
            rest = [*receiver.steps[:cut], *receiver.steps[cut + 1 :]]
            with pytest.raises(VerificationError, match=r"rank \d"):
                verify(edited(mutant, step.peer, rest))


def make_world(operation: Operation, num_chunks: int, *steps: list[Step]) -> list[Plan]:
    return [
        Plan(operation, Algorithm.DIRECT, len(steps), rank, num_chunks, tuple(mine))
        for rank, mine in enumerate(steps)
    ]


def test_a_contribution_counted_twice_is_refused() -> None:
    plans = make_world(
        Operation.REDUCE,
        1,
        [Step(REDUCE, 1, 0), Step(REDUCE, 1, 0)],
        [Step(SEND, 0, 0), Step(SEND, 0, 0)],
    )
    text = (
        r"^direct reduce of 2, rank 0, step 1 \(REDUCE chunk 0 from rank 1\): "
        r"counts the contribution of rank 1 twice$"
    )
    with pytest.raises(VerificationError, match=text):
        verify(plans)


def test_two_ranks_that_both_send_first_are_a_deadlock() -> None:
    """With buffers they would get away with it; a plan must not need buffers, but for doubling."""
    plans = make_world(
        Operation.ALL_REDUCE,
        1,
        [Step(SEND, 1, 0), Step(REDUCE, 1, 0)],
        [Step(SEND, 0, 0), Step(REDUCE, 0, 0)],
    )
    with pytest.raises(VerificationError, match=r"^deadlock: .*rank [01], step 0 .*waits for"):
        verify(plans)


def test_swapped_steps_on_one_chunk_are_a_deadlock() -> None:
    plans = world_of(Operation.ALL_REDUCE, Algorithm.CENTRALIZED, 3)
    swapped = edited(plans, 2, list(reversed(plans[2].steps)))
    with pytest.raises(VerificationError, match=r"^deadlock: .*rank 2, step 1"):
        verify(swapped)


def test_swapped_steps_on_one_link_are_refused() -> None:
    plans = world_of(Operation.ALL_GATHER, Algorithm.RING, 3)
    steps = list(plans[1].steps)
    steps[0], steps[2] = steps[2], steps[0]
    text = r"rank 1, step 0 \(SEND chunk 0 to rank 2\): the receiver expects chunk 1"
    with pytest.raises(VerificationError, match=text):
        verify(edited(plans, 1, steps))


def test_sending_what_one_does_not_have_is_refused() -> None:
    plans = make_world(Operation.BROADCAST, 1, [Step(COPY, 1, 0)], [Step(SEND, 0, 0)])
    with pytest.raises(VerificationError, match=r"rank 1, step 0 .*sends garbage"):
        verify(plans)


def test_ending_with_garbage_is_refused() -> None:
    plans = make_world(Operation.BROADCAST, 2, [Step(SEND, 1, 0)], [Step(COPY, 0, 0)])
    with pytest.raises(VerificationError, match=r"rank 1: ends with garbage in chunk 1"):
        verify(plans)


@pytest.mark.parametrize(
    ("operation", "parts"), [(Operation.SCATTER, 2), (Operation.ALL_TO_ALL, 4)]
)
def test_chunks_that_are_not_the_operations_parts_are_refused(
    operation: Operation, parts: int
) -> None:
    """A plan that moves too few of them would leave the rest of the result as it was."""
    plans = make_world(operation, 1, [Step(SEND, 1, 0)], [Step(COPY, 0, 0)])
    with pytest.raises(VerificationError, match=rf"has 1 chunks; the parts.* are {parts}, one"):
        verify(plans)


def test_a_contribution_that_is_lost_is_refused() -> None:
    plans = make_world(Operation.REDUCE, 1, [Step(COPY, 1, 0)], [Step(SEND, 0, 0)])
    text = r"rank 0: ends with chunk 0 lacking the contribution of rank 0"
    with pytest.raises(VerificationError, match=text):
        verify(plans)


def test_a_result_that_two_ranks_computed_separately_is_refused() -> None:
    """Every contribution once on every rank, yet ranks 0 and 1 added them in different orders."""
    plans = make_world(
        Operation.ALL_REDUCE,
        1,
        [Step(SEND, 3, 0), Step(REDUCE, 4, 0), Step(REDUCE, 2, 0)]
        + [Step(SEND, peer, 0) for peer in (2, 3, 4)],
        [Step(SEND, 4, 0), Step(REDUCE, 3, 0), Step(REDUCE, 2, 0)],
        [
            *(Step(REDUCE, peer, 0) for peer in (3, 4)),
            *(Step(SEND, peer, 0) for peer in (0, 1)),
            Step(COPY, 0, 0),
        ],
        [Step(SEND, 2, 0), Step(COPY, 0, 0), Step(SEND, 1, 0), Step(COPY, 0, 0)],
        [Step(SEND, 2, 0), Step(COPY, 1, 0), Step(SEND, 0, 0), Step(COPY, 0, 0)],
    )
    with pytest.raises(VerificationError, match=r"rank 1: .*computed otherwise than rank 0's"):
        verify(plans)


def test_leaving_a_barrier_early_is_refused() -> None:
    plans = make_world(Operation.BARRIER, 1, [Step(REDUCE, 1, 0)], [Step(SEND, 0, 0)])
    with pytest.raises(VerificationError, match=r"rank 1: may leave before rank 0 has come"):
        verify(plans)


def test_plans_of_different_collectives_are_refused() -> None:
    plans = world_of(Operation.ALL_REDUCE, Algorithm.RING, 3)
    other = make_plan(Operation.ALL_REDUCE, Algorithm.DIRECT, 3, 1)
    with pytest.raises(VerificationError, match="not of one collective"):
        verify([plans[0], other, plans[2]])
    with pytest.raises(VerificationError, match="stands at place 0"):
        verify([plans[1], plans[0], plans[2]])
    with pytest.raises(VerificationError, match="no plans"):
        verify([])
    with pytest.raises(VerificationError, match="no such peer"):
        verify(edited(plans, 1, [Step(SEND, 1, 0)]))
    with pytest.raises(VerificationError, match="no such chunk"):
        verify(edited(plans, 1, [Step(SEND, 2, 3)]))


@pytest.mark.parametrize("operation", Operation)
def test_the_verdict_does_not_depend_on_the_schedule(operation: Operation) -> None:
    for algorithm in algorithms_for(operation):
        check_verdicts(operation, algorithm)


def check_verdicts(operation: Operation, algorithm: Algorithm) -> None:
    rng = random.Random(f"{operation} {algorithm}")
    plans = world_of(operation, algorithm, 5, 0, NODES)
    for _ in range(30):
        rank = rng.randrange(5)
        steps = list(plans[rank].steps)
        rng.shuffle(steps)
        verdicts = {is_right(edited(plans, rank, steps), seed) for seed in (None, 1, 2)}
        assert len(verdicts) == 1


def is_right(plans: list[Plan], seed: int | None) -> bool:
    try:
        verify(plans, seed=seed)
    except VerificationError:
        return False
    return True


def test_shuffled_steps_of_a_chain_are_refused_but_those_of_a_pairwise_exchange_are_not() -> None:
    """A pairwise all_to_all uses every link and chunk once, so its order is only a preference."""
    for algorithm, harmless in ((Algorithm.DIRECT, True), (Algorithm.RING, False)):
        plans = world_of(Operation.ALL_TO_ALL, algorithm, 5)
        backwards = edited(plans, 2, list(reversed(plans[2].steps)))
        assert is_right(backwards, None) is harmless
