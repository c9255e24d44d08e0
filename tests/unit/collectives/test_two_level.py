"""Who does what on two levels: every block whole, on every rank that wants it, once per wire."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.collectives.plan import Operation
from potluck.collectives.two_level import has_levels, members_of, pays, schedule

OPERATIONS = (
    Operation.ALL_REDUCE,
    Operation.BROADCAST,
    Operation.REDUCE,
    Operation.REDUCE_SCATTER,
    Operation.ALL_GATHER,
)
LAYOUTS = (
    st.lists(st.integers(-2, 3), min_size=3, max_size=12)
    .map(tuple)
    .filter(lambda nodes: has_levels(Operation.ALL_REDUCE, nodes))
)
SIZES = st.sampled_from([0, 1, 5000, 1 << 22, 100 << 20, 1 << 34])


def run(
    operation: Operation, nodes: tuple[int, ...], nbytes: int, root: int
) -> list[list[set[int]]]:
    """``held[rank][chunk]``: whose contributions a rank ends with, if all do as they should."""
    plan = schedule(operation, nbytes, nodes, root)
    members = members_of(nodes)
    num_chunks = plan.blocks[0].num_chunks
    assert [block.chunk for block in plan.blocks] == list(range(num_chunks))
    held = [[{rank} for _ in range(num_chunks)] for rank in range(len(nodes))]
    for block in plan.blocks:
        assert block.num_chunks == num_chunks
        here = {}  # what each speaker has of the block
        for speaker, ranks in zip(block.speakers, members, strict=True):
            assert speaker in ranks
            here[speaker] = set(ranks) if plan.combines else {speaker}
        home = None if block.home is None else block.speakers[block.home]
        everything = set().union(*here.values())
        if plan.between is Operation.ALL_REDUCE:
            assert home is None
            here = dict.fromkeys(here, everything)
        elif plan.between is Operation.REDUCE:
            here = {home: everything}
        else:
            here = dict.fromkeys(here, here[home])
        for speaker, ranks in zip(block.speakers, members, strict=True):
            for rank in ranks if plan.copies else (speaker,):
                if speaker in here:
                    held[rank][block.chunk] = here[speaker]
    return held


@settings(max_examples=150, deadline=None, derandomize=True)
@given(nodes=LAYOUTS, nbytes=SIZES, data=st.data())
def test_every_rank_ends_with_what_it_should(
    nodes: tuple[int, ...], nbytes: int, data: st.DataObject
) -> None:
    everyone, root = set(range(len(nodes))), data.draw(st.sampled_from(range(len(nodes))))
    for operation in OPERATIONS:
        held = run(operation, nodes, nbytes, root if operation in ("broadcast", "reduce") else 0)
        num_chunks = len(held[0])
        for rank, chunks in enumerate(held):
            for chunk, whose in enumerate(chunks):
                owner = chunk * len(nodes) // num_chunks
                if operation is Operation.ALL_REDUCE:
                    assert whose == everyone
                elif operation is Operation.BROADCAST:
                    assert whose == {root}
                elif operation is Operation.ALL_GATHER:
                    assert whose == {owner}
                elif rank == (root if operation is Operation.REDUCE else owner):
                    assert whose == everyone


@settings(max_examples=50, deadline=None, derandomize=True)
@given(nodes=LAYOUTS)
def test_workers_take_turns_at_speaking_for_their_node(nodes: tuple[int, ...]) -> None:
    blocks = schedule(Operation.ALL_REDUCE, 1 << 34, nodes).blocks
    members = members_of(nodes)
    lanes = min(map(len, members))
    for place, ranks in enumerate(members):
        shares = [sum(block.speakers[place] == rank for block in blocks) for rank in ranks]
        assert all(share == 0 for share in shares[lanes:])
        assert max(shares[:lanes]) - min(shares[:lanes]) <= 1
        assert Fraction(sum(shares), len(blocks)) == 1


@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 1, 2)])
def test_without_two_levels_there_are_none(nodes: tuple[int, ...]) -> None:
    assert not pays(Operation.ALL_REDUCE, 1 << 30, nodes)
    with pytest.raises(ValueError, match="several nodes"):
        schedule(Operation.ALL_REDUCE, 1 << 30, nodes)


@pytest.mark.parametrize("operation", [each for each in Operation if each not in OPERATIONS])
def test_some_operations_stay_on_one_level(operation: Operation) -> None:
    assert not pays(operation, 1 << 30, (0, 0, 1, 1))


def test_they_pay_for_large_data_and_many_workers() -> None:
    """Small data is not worth three calls and a barrier; large data is, more so where nodes are
    unlike, as plans over links then have a busiest rank."""
    for nodes in ((0,) * 4 + (1,) * 4, (0, 0, 0, 1)):
        assert not pays(Operation.ALL_REDUCE, 4096, nodes)
        assert pays(Operation.ALL_REDUCE, 100 << 20, nodes)
