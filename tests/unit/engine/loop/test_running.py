"""The three rules of plans: what may move, and what must wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan, Step
from potluck._core.engine.arrays.layout import Buffers, Chunks, Layout
from potluck._core.engine.call import Call
from potluck._core.engine.loop.running import CompiledPlan, as_bytes, from_bytes
from potluck._core.types import ReduceOp

SEND, COPY, REDUCE = Action.SEND, Action.COPY, Action.REDUCE


def running(
    twin: SimpleNamespace,
    *steps: tuple[Action, int, int],
    chunks: Chunks | None = None,
    segment_bytes: int = 16,
    op: ReduceOp = ReduceOp.SUM,
    peers: tuple[int, ...] = (0, 1, 2, 3),
    result: np.ndarray | None = None,
) -> Any:
    """Chunks are 5 int64 each unless given: three segments of 16 bytes."""
    names = {chunk for _, _, chunk in steps}
    plan = Plan(
        Operation.ALL_REDUCE, Algorithm.RING, 4, 0, len(names), tuple(Step(*each) for each in steps)
    )
    arrays = chunks or {name: np.arange(5) for name in names}
    layout = Layout()
    for name, array in arrays.items():
        layout.places[name] = layout.scratch(array.size)
    dtype = next(iter(arrays.values())).dtype
    call = Call(plan.operation, plan.algorithm, "int64", (5,), op, 0, segment_bytes)
    num_result = None if result is None else result.size
    compiled = CompiledPlan(
        plan, call, layout, channel=0, peers=peers, dtype=dtype, num_result=num_result
    )
    buffers = Buffers(None, result, np.concatenate(list(arrays.values())))
    run = twin.run(compiled, buffers, 7)
    if chunks is not None:  # the test looks at their memory
        chunks.update(layout.chunks(buffers))
    return run


def send(run: Any, peer: int) -> tuple[int, int, list[int]]:
    segment = run.next_send(peer)
    assert segment is not None
    run.issue(peer, segment)
    run.sent(segment)
    return segment.chunk, segment.number, segment.data.tolist()


def receive(run: Any, peer: int, values: list[int]) -> None:
    segment = run.next_receive(peer)
    assert segment is not None
    assert run.is_ready(segment)
    run.arrived(peer, segment)
    run.apply(segment, np.array(values))


def test_a_step_goes_segment_by_segment_in_order(twin: SimpleNamespace) -> None:
    run = running(twin, (SEND, 1, 0))
    assert [send(run, 1) for _ in range(3)] == [(0, 0, [0, 1]), (0, 1, [2, 3]), (0, 2, [4])]
    assert run.next_send(1) is None
    assert run.is_complete


def test_a_chunk_is_sent_on_as_its_segments_arrive(twin: SimpleNamespace) -> None:
    """Rule 1 holds per segment, so a relay need not wait for the whole chunk."""
    run = running(twin, (COPY, 1, 0), (SEND, 2, 0))
    assert run.next_send(2) is None
    receive(run, 1, [10, 11])
    assert send(run, 2) == (0, 0, [10, 11])
    assert run.next_send(2) is None
    receive(run, 1, [12, 13])
    receive(run, 1, [14])
    assert send(run, 2) == (0, 1, [12, 13])
    assert not run.is_complete
    assert send(run, 2) == (0, 2, [14])
    assert run.is_complete


def test_bytes_not_yet_sent_are_not_overwritten(twin: SimpleNamespace) -> None:
    run = running(twin, (SEND, 1, 0), (COPY, 2, 0))
    due = run.next_receive(2)
    assert due is not None
    assert not run.is_ready(due)
    segment = run.next_send(1)
    assert segment is not None
    run.issue(1, segment)
    assert not run.is_ready(due), "handed to the link, but still in our memory"
    run.sent(segment)
    assert run.is_ready(due)


def test_steps_on_one_link_keep_their_order(twin: SimpleNamespace) -> None:
    """Rule 2: chunk 1 is ready, but chunk 0 comes first on this link."""
    run = running(twin, (COPY, 2, 0), (SEND, 1, 0), (SEND, 1, 1), (SEND, 3, 2))
    assert run.next_send(1) is None
    assert send(run, 3)[0] == 2
    receive(run, 2, [1, 1])
    assert send(run, 1)[:2] == (0, 0)
    assert run.next_send(1) is None, "the second segment of chunk 0 is due, not chunk 1"


def test_links_do_not_wait_for_each_other(twin: SimpleNamespace) -> None:
    """Rule 3."""
    run = running(twin, (SEND, 1, 0), (SEND, 2, 1), (COPY, 3, 2))
    receive(run, 3, [5, 5])
    assert send(run, 2)[0] == 1
    assert send(run, 1)[0] == 0


def test_reductions_combine_and_copies_replace(twin: SimpleNamespace) -> None:
    chunks = {0: np.array([1, 2]), 1: np.array([3, 4])}
    run = running(twin, (REDUCE, 1, 0), (COPY, 1, 1), chunks=chunks)
    segment = run.next_receive(1)
    assert segment is not None
    assert run.combines(segment)
    receive(run, 1, [10, 20])
    receive(run, 1, [30, 40])
    assert chunks[0].tolist() == [11, 22]
    assert chunks[1].tolist() == [30, 40]
    assert run.next_receive(1) is None


def test_an_empty_chunk_is_one_empty_segment(twin: SimpleNamespace) -> None:
    run = running(twin, (SEND, 1, 0), (COPY, 1, 1), chunks={0: np.empty(0), 1: np.empty(0)})
    assert send(run, 1) == (0, 0, [])
    receive(run, 1, [])
    assert run.is_complete


def test_segments_are_whole_elements_however_small_the_bound(twin: SimpleNamespace) -> None:
    run = running(twin, (SEND, 1, 0), segment_bytes=3)
    assert [send(run, 1)[2] for _ in range(5)] == [[0], [1], [2], [3], [4]]


def test_a_mean_divides_once_all_is_in(twin: SimpleNamespace) -> None:
    array = np.array([4.0, 8.0])
    run = running(twin, (COPY, 1, 0), chunks={0: array}, op=ReduceOp.MEAN, result=array)
    run.conclude()
    assert array.tolist() == [1.0, 2.0]


def test_who_is_awaited_and_for_what(twin: SimpleNamespace) -> None:
    run = running(twin, (COPY, 1, 0), (SEND, 2, 0), peers=(10, 11, 12, 13))
    assert run.send_peers == (12,)
    assert run.receive_peers == (11,)
    assert run.awaited() == [
        (11, "step 1 of 2, COPY chunk 0"),
        (12, "step 2 of 2, SEND chunk 0"),
    ]
    assert str(run) == "all_reduce(int64, shape (5,), op sum, ring) #7"


def test_a_peer_whose_frames_all_lie_here_is_not_needed_any_more(twin: SimpleNamespace) -> None:
    run = running(twin, (COPY, 1, 0), (COPY, 2, 0), (SEND, 3, 0))
    assert [run.needs(peer) for peer in range(4)] == [False, True, True, True]
    for number in range(3):
        assert run.needs(2)
        segment = run.next_receive(2)
        assert segment.number == number, "what has arrived is not expected again"
        assert not run.is_ready(segment)
        run.arrived(2, segment)
    assert run.next_receive(2) is None
    assert not run.needs(2)
    assert [peer for peer, _ in run.awaited()] == [1, 3]


def test_a_link_is_ahead_by_more_than_a_segment(twin: SimpleNamespace) -> None:
    run = running(twin, (SEND, 1, 0), (SEND, 2, 1))
    send(run, 1)
    assert not run.is_ahead(1, 2)
    send(run, 1)
    assert run.is_ahead(1, 2)
    assert not run.is_ahead(2, 1)
    send(run, 2)
    assert not run.is_ahead(1, 2)


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3), ()])
def test_arrays_as_bytes_and_back(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype=np.float32)
    data = as_bytes(array.reshape(-1))
    assert len(data) == array.nbytes
    assert not data.readonly
    data[:] = bytes(array.nbytes)
    assert (from_bytes(data, array.dtype) == 0).all()
    assert (array == 0).all()
