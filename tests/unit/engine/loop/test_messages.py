"""Point-to-point messages as frames on the wire: eager, rendezvous, credit, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from potluck._core.wire import frames
from potluck._core.wire.dtypes import code_of
from potluck._core.wire.frames import EAGER_BYTES, Kind
from potluck.errors import Desync, PeerLost

LoopOf = Callable[..., Any]
PATIENCE_S = 60.0
UINT8 = code_of(np.dtype(np.uint8))
LARGE = bytes(range(256)) * 1000
"""Four segments, the last one not whole."""
SEGMENT = 64 << 10


def rts(nbytes: int) -> bytes:
    return frames.encode_rts(frames.Rts(nbytes))


def test_a_small_message_is_sent_at_once(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    work = rank0.send(1, b"hello", tag=7)
    frame, payload = rank0.ranks[1].hear(Kind.EAGER)
    assert (frame.tag, frame.dtype, frame.sequence, payload) == (7, UINT8, 1, b"hello")
    work.wait(PATIENCE_S)


def test_a_large_message_is_announced_and_sent_once_it_is_clear(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    peer = rank0.ranks[1]
    work = rank0.send(1, LARGE, tag=7)
    frame, payload = peer.hear(Kind.RTS)
    assert frames.decode_rts(payload).nbytes == len(LARGE)
    assert (frame.tag, frame.dtype) == (7, UINT8)
    assert not work.done()
    peer.say(Kind.CTS, sequence=frame.sequence)
    pieces = [peer.hear(Kind.PIECE) for _ in range(4)]
    assert [piece.segment for piece, _ in pieces] == [0, 1, 2, 3]
    assert {piece.sequence for piece, _ in pieces} == {frame.sequence}
    assert b"".join(payload for _, payload in pieces) == LARGE
    work.wait(PATIENCE_S)


def test_a_message_finds_the_receive_that_waits_for_it(loop_of: LoopOf) -> None:
    rank0 = loop_of(num_peers=2)
    work, array = rank0.receive(-1, 5, tag=7)
    rank0.ranks[2].say(Kind.EAGER, b"hello", sequence=1, tag=7, dtype=UINT8)
    work.wait(PATIENCE_S)
    assert array.tobytes() == b"hello"
    assert work.source == 2


def test_unexpected_messages_are_kept_in_order(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    for number, text in enumerate((b"one", b"two", b"six")):
        rank0.ranks[1].say(Kind.EAGER, text, sequence=number, tag=number // 2, dtype=UINT8)
    for tag, text in ((1, b"six"), (0, b"one"), (0, b"two")):
        work, array = rank0.receive(1, 3, tag=tag)
        work.wait(PATIENCE_S)
        assert array.tobytes() == text


def test_a_large_message_is_cleared_when_its_receive_is_called(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    peer = rank0.ranks[1]
    peer.say(Kind.RTS, rts(len(LARGE)), sequence=9, dtype=UINT8)
    work, array = rank0.receive(1, len(LARGE))
    frame, _ = peer.hear(Kind.CTS)
    assert frame.sequence == 9
    for number in range(4):
        part = LARGE[number * SEGMENT : (number + 1) * SEGMENT]
        peer.say(Kind.PIECE, part, sequence=9, segment=number, dtype=UINT8)
    work.wait(PATIENCE_S)
    assert array.tobytes() == LARGE
    assert work.source == 1


def test_without_credit_a_small_message_is_announced_too(loop_of: LoopOf) -> None:
    rank0 = loop_of(max_early_bytes=1)  # so the least that there is: three segments
    peer = rank0.ranks[1]
    message = bytes(EAGER_BYTES)
    for _ in range(3):
        rank0.send(1, message)
        peer.hear(Kind.EAGER)
    rank0.send(1, message)
    peer.hear(Kind.RTS)
    peer.say(Kind.CREDIT, sequence=2 * (EAGER_BYTES + 256))
    peer.say(Kind.CLOSE)  # is answered in order, so the credit has been counted then
    peer.hear(Kind.CLOSE_ACK)
    rank0.send(1, message)
    peer.hear(Kind.EAGER)


def test_credit_returns_when_a_message_was_received_not_when_it_came(loop_of: LoopOf) -> None:
    rank0 = loop_of(max_early_bytes=1)
    peer = rank0.ranks[1]
    peer.say(Kind.EAGER, bytes(EAGER_BYTES), sequence=1, dtype=UINT8)
    rank0.send(1, b"was that all?")
    peer.hear(Kind.EAGER)
    rank0.receive(1, EAGER_BYTES)[0].wait(PATIENCE_S)
    frame, _ = peer.hear(Kind.CREDIT)
    assert frame.sequence == EAGER_BYTES + 256


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (lambda peer: peer.say(Kind.CTS, sequence=5), "a CTS for message #5, which was not ann"),
        (lambda peer: peer.say(Kind.PIECE, b"abc", sequence=5), "a piece of message #5 that is"),
        (lambda peer: peer.say(Kind.RTS, b"\xc1"), "not the payload of an RTS frame"),
        (lambda peer: peer.say(Kind.CREDIT, sequence=1), "credit for 1 bytes, but only 0 were"),
        (lambda peer: peer.say(Kind.EAGER, b"x", epoch=2), "a frame of epoch 2 in epoch 1"),
        (lambda peer: peer.say(Kind.EAGER, b"x", source=2), "a frame of rank 2 on the link to r"),
    ],
)
def test_frames_that_make_no_sense_end_the_group(
    loop_of: LoopOf, said: Callable[[Any], None], reason: str
) -> None:
    rank0 = loop_of(num_peers=2)
    work, _ = rank0.receive(2, 3)
    said(rank0.ranks[1])
    with pytest.raises(PeerLost, match=reason) as caught:
        work.wait(PATIENCE_S)
    assert caught.value.rank == 1
    told = frames.decode_abort(rank0.ranks[2].hear(Kind.ABORT)[1])
    assert (told.error, told.rank) == ("PeerLost", 1)
    assert reason in told.text


def test_a_message_announced_twice_ends_the_group(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    peer = rank0.ranks[1]
    peer.say(Kind.RTS, rts(100_000), sequence=9, dtype=UINT8)
    rank0.receive(1, 100_000)
    peer.hear(Kind.CTS)
    peer.say(Kind.RTS, rts(100_000), sequence=9, dtype=UINT8)
    work, _ = rank0.receive(1, 100_000)
    with pytest.raises(PeerLost, match="announced message #9 again before it had sent it"):
        work.wait(PATIENCE_S)


def test_a_message_of_another_size_is_a_desync(loop_of: LoopOf) -> None:
    rank0 = loop_of()
    work, _ = rank0.receive(1, 3)
    rank0.ranks[1].say(Kind.EAGER, b"hello", sequence=1, dtype=UINT8)
    with pytest.raises(Desync, match="sent 5 bytes of uint8") as caught:
        work.wait(PATIENCE_S)
    assert caught.value.rank == 1
