"""Collectives as frames on the wire: early and late segments, disagreement, hang detection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from potluck._core.collectives.plan import Action
from potluck._core.wire.dtypes import code_of
from potluck._core.wire.frames import Kind
from potluck.errors import Desync, LinkError, OperationTimeout, PeerLost

LoopOf = Callable[..., Any]
COPY, REDUCE, SEND = Action.COPY, Action.REDUCE, Action.SEND
PATIENCE_S = 60.0
UINT8 = code_of(np.dtype(np.uint8))
SEGMENT = 64 << 10
OVERHEAD = 256


def ending() -> contextlib.AbstractContextManager[None]:
    """Of a frame that ends its link the loop may read no more than the header."""
    return contextlib.suppress(OSError, LinkError)


def segment(peer: Any, call: Any, data: bytes, number: int = 0, sequence: int = 0) -> None:
    peer.say(
        Kind.DATA,
        data,
        sequence=sequence,
        segment=number,
        fingerprint=call.fingerprint,
        dtype=UINT8,
    )


def test_segments_are_combined_and_passed_on(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    call = rank0.call((REDUCE, 1), (SEND, 2), data=b"\1" * (SEGMENT + 3))
    segment(rank0.ranks[1], call, b"\2" * SEGMENT)
    frame, payload = rank0.ranks[2].hear(Kind.DATA)
    assert payload == b"\3" * SEGMENT
    assert (frame.sequence, frame.chunk, frame.segment) == (0, 0, 0)
    assert (frame.fingerprint, frame.dtype) == (call.fingerprint, UINT8)
    assert not call.work.done()
    segment(rank0.ranks[1], call, b"\2" * 3, 1)
    frame, payload = rank0.ranks[2].hear(Kind.DATA)
    assert (frame.segment, payload) == (1, b"\3" * 3)
    call.work.wait(PATIENCE_S)


def test_segments_of_a_call_to_come_are_kept_and_pay_credit(loop_of: LoopOf) -> None:
    rank0 = loop_of(max_early_bytes=1)  # so the least that there is: three segments
    peer = rank0.ranks[1]
    plan = rank0.plan((COPY, 1), data=bytes(SEGMENT))
    segment(peer, plan, b"\7" * SEGMENT)
    call = rank0.start(plan)
    call.work.wait(PATIENCE_S)
    assert call.data.tobytes() == b"\7" * SEGMENT
    # BEGUN comes first if the call begins while the segment is still on its way.
    assert peer.hear(Kind.CREDIT, after=Kind.BEGUN)[0].sequence == SEGMENT + OVERHEAD


def test_a_receiver_that_holds_much_says_which_call_it_has_begun(loop_of: LoopOf) -> None:
    """Else a sender that has spent its credit on later calls would never send the first one's."""
    rank0 = loop_of(max_early_bytes=1)
    peer = rank0.ranks[1]
    plans = [rank0.plan((COPY, 1), data=bytes(SEGMENT), sequence=n) for n in range(2)]
    segment(peer, plans[1], b"\1" * SEGMENT, sequence=1)
    call = rank0.start(plans[0])
    assert peer.hear(Kind.BEGUN)[0].sequence == 0
    segment(peer, plans[0], b"\0" * SEGMENT)
    call.work.wait(PATIENCE_S)


def test_a_sender_without_credit_waits_until_the_call_has_begun(loop_of: LoopOf) -> None:
    rank0 = loop_of(max_early_bytes=1)
    peer = rank0.ranks[1]
    for number in range(4):
        rank0.call((SEND, 1), data=bytes(SEGMENT), sequence=number)
    for number in range(3):
        assert peer.hear(Kind.DATA)[0].sequence == number
    peer.say(Kind.CLOSE)  # is answered after all that may be sent
    peer.hear(Kind.CLOSE_ACK)
    peer.say(Kind.BEGUN, sequence=3)
    assert peer.hear(Kind.DATA)[0].sequence == 3


def test_a_segment_that_is_not_due_ends_the_group(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    call = rank0.call((COPY, 1), data=bytes(2 * SEGMENT))
    with ending():
        segment(rank0.ranks[1], call, bytes(SEGMENT), 1)
    with pytest.raises(PeerLost, match="it sent segment 1 of chunk 0, which is not due"):
        call.work.wait(PATIENCE_S)


def test_segments_wait_for_their_memory_and_are_applied_in_the_order_of_the_plan(
    loop_of: LoopOf,
) -> None:
    rank0 = loop_of(num_peers=2)
    call = rank0.call((COPY, 1), (COPY, 2), data=bytes(2 * SEGMENT))
    for number in range(2):
        segment(rank0.ranks[2], call, b"\2" * SEGMENT, number)
    for number in range(2):
        segment(rank0.ranks[1], call, b"\1" * SEGMENT, number)
    call.work.wait(PATIENCE_S)
    assert call.data.tobytes() == b"\2" * 2 * SEGMENT


NOT_IN_THE_PLAN: dict[str, tuple[int, int, dict[str, int]]] = {
    "again": (0, SEGMENT, {}),
    "out of order": (2, SEGMENT, {}),
    "of another chunk": (1, SEGMENT, {"chunk": 7}),
    "larger": (1, 16 << 20, {}),
    "of another dtype": (1, SEGMENT, {"dtype": 4}),
}


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("which", NOT_IN_THE_PLAN)
def test_only_what_the_plan_receives_next_from_a_peer_may_wait(
    loop_of: LoopOf, which: str, is_early: bool
) -> None:
    """Rank 1 says nothing, so that all frames of rank 2 would wait: for ever, and without end."""
    rank0 = loop_of(num_peers=2, max_early_bytes=64 << 20)
    plan = rank0.plan((COPY, 1), (COPY, 2), data=bytes(3 * SEGMENT))
    number, nbytes, fields = NOT_IN_THE_PLAN[which]
    if not is_early:
        rank0.start(plan)
    segment(rank0.ranks[2], plan, bytes(SEGMENT), 0)
    described = {"fingerprint": plan.fingerprint, "dtype": UINT8, **fields}
    with ending():
        rank0.ranks[2].say(Kind.DATA, bytes(nbytes), segment=number, **described)
    if is_early:
        rank0.ranks[2].say(Kind.CLOSE)  # is answered after all that came before
        rank0.ranks[2].hear(Kind.CLOSE_ACK)
        rank0.start(plan)
    with pytest.raises(PeerLost, match=f"it sent segment {number} of chunk .*not due") as caught:
        plan.work.wait(PATIENCE_S)
    assert caught.value.rank == 2


def test_a_peer_sends_no_more_than_the_plan_receives_from_it(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    call = rank0.call((COPY, 1), (COPY, 2), data=bytes(2 * SEGMENT))
    for number in range(2):
        segment(rank0.ranks[2], call, bytes(SEGMENT), number)
    with ending():
        segment(rank0.ranks[2], call, bytes(SEGMENT), 2)
    with pytest.raises(PeerLost, match="it sent segment 2 of chunk 0, which is not due") as caught:
        call.work.wait(PATIENCE_S)
    assert caught.value.rank == 2


def test_a_segment_of_another_call_that_would_wait_is_a_desync(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    call = rank0.call((COPY, 1), (COPY, 2), data=bytes(2 * SEGMENT))
    segment(rank0.ranks[2], call, bytes(SEGMENT))
    rank0.ranks[2].say(
        Kind.DATA, bytes(SEGMENT), segment=1, fingerprint=call.fingerprint ^ 1, dtype=UINT8
    )
    with pytest.raises(Desync) as caught:
        call.work.wait(PATIENCE_S)
    assert caught.value.rank == 2


def test_a_late_segment_ends_the_group(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    call = rank0.call((COPY, 1), data=bytes(3))
    segment(rank0.ranks[1], call, b"abc")
    call.work.wait(PATIENCE_S)
    later = rank0.call((COPY, 1), data=bytes(3), sequence=1)
    segment(rank0.ranks[1], call, b"abc")
    with pytest.raises(PeerLost, match="a frame of operation #0, which has ended"):
        later.work.wait(PATIENCE_S)


@pytest.mark.parametrize("is_early", [False, True])
def test_another_call_is_a_desync(loop_of: LoopOf, is_early: bool) -> None:
    rank0 = loop_of()
    plan = rank0.plan((COPY, 1), data=bytes(3))
    fields = {"fingerprint": plan.fingerprint ^ 1, "dtype": UINT8}
    if is_early:
        rank0.ranks[1].say(Kind.DATA, b"abc", **fields)
        rank0.ranks[1].say(Kind.CLOSE)
        rank0.ranks[1].hear(Kind.CLOSE_ACK)
    call = rank0.start(plan)
    if not is_early:
        rank0.ranks[1].say(Kind.DATA, b"abc", **fields)
    with pytest.raises(Desync) as caught:
        call.work.wait(PATIENCE_S)
    assert caught.value.rank == 1


# ---------------------------------------------------------------- hang detection


def test_a_stalled_call_tells_whom_it_waits_for_which_call_it_is_in(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    call = rank0.call((COPY, 1), data=bytes(3))
    query, _ = rank0.ranks[1].hear(Kind.HANG_QUERY)
    assert (query.sequence, query.segment, query.fingerprint) == (0, 0, call.fingerprint)
    rank0.ranks[1].say(Kind.HANG_QUERY, sequence=0, fingerprint=call.fingerprint ^ 1)
    with pytest.raises(Desync) as caught:
        call.work.wait(PATIENCE_S)
    assert caught.value.rank == 1


def test_a_query_about_a_call_to_come_is_compared_when_it_begins(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    plan = rank0.plan((COPY, 1), data=bytes(3))
    rank0.ranks[1].say(Kind.HANG_QUERY, sequence=0, fingerprint=plan.fingerprint ^ 1)
    rank0.ranks[1].say(Kind.CLOSE)
    rank0.ranks[1].hear(Kind.CLOSE_ACK)
    with pytest.raises(Desync):
        rank0.start(plan).work.wait(PATIENCE_S)


def test_an_overdue_call_names_the_rank_that_has_not_made_it(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=3)
    call = rank0.call((COPY, 1), data=bytes(3), timeout_s=2.0)
    rank0.ranks[1].hear(Kind.HANG_QUERY)  # it stalls
    for peer in rank0.ranks.values():
        query, _ = peer.hear(Kind.HANG_QUERY)
        assert query.segment == 1, "to be answered, and passed on"
    rank0.ranks[1].say(Kind.HANG_REPORT, sequence=0, chunk=1, segment=1)
    rank0.ranks[1].say(Kind.HANG_REPORT, sequence=0, chunk=3, segment=0)
    with pytest.raises(OperationTimeout, match=r"rank 3 .* has not made this call") as caught:
        call.work.wait(PATIENCE_S)
    assert caught.value.rank == 3


def test_of_silent_ranks_the_one_that_is_waited_for_is_named(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=3)
    call = rank0.call((COPY, 2), data=bytes(3), timeout_s=0.3)
    with pytest.raises(OperationTimeout) as caught:
        call.work.wait(PATIENCE_S)
    assert caught.value.rank == 2


def test_a_query_is_answered_and_passed_on_and_so_are_the_reports(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    call = rank0.call((COPY, 2), data=bytes(3))
    rank0.ranks[2].hear(Kind.HANG_QUERY)  # it stalls, and asks nothing more
    rank0.ranks[1].say(Kind.HANG_QUERY, sequence=0, segment=1, fingerprint=call.fingerprint)
    mine, _ = rank0.ranks[1].hear(Kind.HANG_REPORT)
    assert (mine.chunk, mine.segment) == (0, 1)
    passed_on, _ = rank0.ranks[2].hear(Kind.HANG_QUERY)
    assert (passed_on.segment, passed_on.fingerprint) == (1, call.fingerprint)
    rank0.ranks[2].say(Kind.HANG_REPORT, sequence=0, chunk=2, segment=0)
    theirs, _ = rank0.ranks[1].hear(Kind.HANG_REPORT)
    assert (theirs.chunk, theirs.segment) == (2, 0)


def test_a_query_about_a_call_that_was_not_made_says_so(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    rank0.ranks[1].say(Kind.HANG_QUERY, sequence=4, segment=1, fingerprint=5)
    report, _ = rank0.ranks[1].hear(Kind.HANG_REPORT)
    assert (report.sequence, report.chunk, report.segment) == (4, 0, 0)
