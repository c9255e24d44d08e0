"""The end of a group: the close handshake, a peer that leaves, an abort."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from potluck._core.wire import frames
from potluck._core.wire.frames import Abort, Kind
from potluck.errors import GroupClosed, PeerLost

LoopOf = Callable[..., Any]
PATIENCE_S = 60.0


def test_a_close_is_acknowledged_and_the_group_goes_on(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    rank0.ranks[1].say(Kind.CLOSE)
    rank0.ranks[1].hear(Kind.CLOSE_ACK)
    rank0.ranks[1].link.close()
    rank0.send(2, b"still here").wait(PATIENCE_S)
    assert rank0.ranks[2].hear(Kind.EAGER)[1] == b"still here"


def test_closing_ends_a_link_once_the_peer_has_read_all(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    peer = rank0.ranks[1]
    rank0.send(1, b"last words").wait(PATIENCE_S)
    closing = threading.Thread(target=rank0.loop.close)
    closing.start()
    assert peer.hear(Kind.EAGER)[1] == b"last words"
    peer.hear(Kind.CLOSE)
    peer.say(Kind.CLOSE_ACK)
    assert peer.hears_end()
    closing.join(PATIENCE_S)
    with pytest.raises(GroupClosed, match="was closed on this rank"):
        rank0.send(1, b"too late").wait(PATIENCE_S)


def test_an_operation_that_needs_a_rank_that_left_ends(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    work, _ = rank0.receive(1, 3)
    rank0.ranks[1].say(Kind.CLOSE)
    rank0.ranks[1].hear(Kind.CLOSE_ACK)
    rank0.ranks[1].link.close()
    with pytest.raises(PeerLost, match=r"it left the group \(its context was closed\)") as caught:
        work.wait(PATIENCE_S)
    assert caught.value.rank == 1


def test_a_second_close_makes_no_sense(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    work, _ = rank0.receive(1, 3)
    rank0.ranks[1].say(Kind.CLOSE)
    rank0.ranks[1].say(Kind.CLOSE)
    with pytest.raises(PeerLost, match="a second CLOSE"):
        work.wait(PATIENCE_S)


def test_an_abort_is_raised_and_passed_on_with_its_cause(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    work, _ = rank0.receive(2, 3)
    lost = Abort("PeerLost", "lost rank 7 of another day", 2, certain=True)
    rank0.ranks[1].say(Kind.ABORT, frames.encode_abort(lost))
    with pytest.raises(PeerLost, match="lost rank 7 of another day") as caught:
        work.wait(PATIENCE_S)
    assert (caught.value.rank, caught.value.certain) == (2, True)
    told = frames.decode_abort(rank0.ranks[2].hear(Kind.ABORT)[1])
    assert (told.error, told.text, told.rank) == ("PeerLost", lost.text, 2)
    assert told.certain


def test_a_link_that_breaks_off_ends_the_group(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    work, _ = rank0.receive(2, 3)
    rank0.ranks[1].link.close()
    with pytest.raises(PeerLost) as caught:
        work.wait(PATIENCE_S)
    assert (caught.value.rank, caught.value.certain) == (1, True)
    told = frames.decode_abort(rank0.ranks[2].hear(Kind.ABORT)[1])
    assert (told.error, told.rank) == ("PeerLost", 1)
