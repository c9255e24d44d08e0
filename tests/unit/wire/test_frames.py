from __future__ import annotations

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.wire import frames
from potluck._core.wire.frames import (
    EAGER_BYTES,
    FRAME_BYTES,
    IN_LINK_MEMORY,
    LINK_MEMORY_KINDS,
    MAX_CONTROL,
    MAX_PAYLOAD,
    Abort,
    Frame,
    Kind,
    Rts,
    decode,
    decode_abort,
    decode_rts,
    encode,
    encode_abort,
    encode_rts,
)
from potluck.errors import ProtocolError

BOUNDS = {
    Kind.DATA: MAX_PAYLOAD,
    Kind.EAGER: EAGER_BYTES,
    Kind.RTS: MAX_CONTROL,
    Kind.PIECE: MAX_PAYLOAD,
    Kind.ABORT: MAX_CONTROL,
}
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def good_frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(Kind))
    return Frame(
        kind,
        epoch=draw(U32),
        channel=draw(U32),
        chunk=draw(U32),
        sequence=draw(U64),
        segment=draw(U32),
        length=draw(st.integers(0, BOUNDS.get(kind, 0))),
        fingerprint=draw(U64),
        source=draw(st.integers(0, 2**16 - 1)),
        dtype=draw(st.integers(0, 255)),
        flags=draw(st.sampled_from([0, IN_LINK_MEMORY])) if kind in LINK_MEMORY_KINDS else 0,
        tag=draw(st.integers(-(2**31), 2**31 - 1)),
    )


def test_a_frame_is_48_bytes() -> None:
    assert FRAME_BYTES == 48


@given(good_frames())
def test_what_is_encoded_is_decoded(frame: Frame) -> None:
    header = encode(frame)
    assert len(header) == FRAME_BYTES
    assert decode(header) == decode(memoryview(header)) == frame


@given(st.binary(min_size=FRAME_BYTES, max_size=FRAME_BYTES))
def test_random_headers_are_protocol_errors(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(header)


@given(good_frames(), st.integers(0, FRAME_BYTES - 1), st.integers(1, 255))
def test_a_changed_byte_gives_another_frame_or_a_protocol_error(
    frame: Frame, index: int, change: int
) -> None:
    header = bytearray(encode(frame))
    header[index] ^= change
    try:
        other = decode(header)
    except ProtocolError:
        return
    assert other != frame
    assert other.length <= BOUNDS.get(other.kind, 0)


@pytest.mark.parametrize("kind", Kind)
def test_lengths_are_bounded_by_kind(kind: Kind) -> None:
    bound = BOUNDS.get(kind, 0)
    assert decode(encode(Frame(kind, 1, length=bound))).length == bound
    with pytest.raises(ProtocolError, match=f"a {kind.name} frame announces"):
        decode(encode(Frame(kind, 1, length=bound + 1)))
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
        decode(encode(Frame(kind, 1, length=2**32 - 1)))


def test_what_is_wrong_is_said() -> None:
    good = encode(Frame(Kind.CLOSE, 1))
    with pytest.raises(ProtocolError, match="begins with b'HTTP'"):
        decode(b"HTTP" + good[4:])
    with pytest.raises(ProtocolError, match="protocol 9; this is protocol 1"):
        decode(good[:2] + b"\x09" + good[3:])
    with pytest.raises(ProtocolError, match="unknown kind 200"):
        decode(good[:3] + b"\xc8" + good[4:])
    with pytest.raises(ProtocolError, match="unknown flags 0x2"):
        decode(encode(Frame(Kind.DATA, 1, flags=2)))


@pytest.mark.parametrize("kind", sorted(set(Kind) - LINK_MEMORY_KINDS))
def test_only_bulk_payloads_may_lie_in_the_shared_memory(kind: Kind) -> None:
    """The tag of a message would be lost to the number of the slot."""
    with pytest.raises(ProtocolError, match="in link memory"):
        decode(encode(Frame(kind, 1, flags=IN_LINK_MEMORY)))


aborts = st.builds(
    Abort,
    error=st.text(max_size=20),
    text=st.text(max_size=100),
    rank=st.integers(-1, 100),
    operation=st.text(max_size=50),
    certain=st.booleans(),
)


@given(aborts)
def test_aborts_travel(abort: Abort) -> None:
    assert decode_abort(encode_abort(abort)) == abort


@given(st.text(min_size=10), st.integers(0, 9))
def test_a_long_abort_is_cut_not_lost(piece: str, more: int) -> None:
    text = piece * (MAX_CONTROL // 10 + more)
    body = encode_abort(Abort("PeerLost", text, 3, operation=text))
    assert len(body) <= MAX_CONTROL
    abort = decode_abort(body)
    assert (abort.error, abort.rank, abort.operation) == ("PeerLost", 3, "")
    assert abort.text.endswith(" ...")
    assert text.startswith(abort.text.removesuffix(" ..."))


@given(st.integers(0, 2**63 - 1))
def test_requests_travel(nbytes: int) -> None:
    assert decode_rts(encode_rts(Rts(nbytes))).nbytes == nbytes


GOOD_ABORT = msgspec.msgpack.encode({"error": "E", "text": "t", "rank": 1})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80",
        b"\xc1",
        GOOD_ABORT[:-1],
        GOOD_ABORT + b"\x00",
        GOOD_ABORT.replace(b"\xa1t", b"\xa1\xff"),
        GOOD_ABORT.replace(b"\x01", b"\xa1x"),
        b"\x81\xa1q" + b"\x91" * 16_000,
        struct.pack(">BI", 0xDD, 0xFFFFFFFF),
        struct.pack(">BI", 0xC6, 0xFFFFFFFF),
    ],
)
def test_malformed_bodies_are_protocol_errors(body: bytes) -> None:
    for decoder in (decode_abort, decode_rts):
        with pytest.raises(ProtocolError, match=r"not the payload of an (ABORT|RTS) frame"):
            decoder(body)


@given(st.binary(max_size=200))
def test_random_bodies_raise_nothing_else(body: bytes) -> None:
    for decoder in (frames.decode_abort, frames.decode_rts):
        with contextlib.suppress(ProtocolError):
            decoder(body)
