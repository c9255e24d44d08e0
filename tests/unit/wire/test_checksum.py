"""CRC-32C: known values, in pieces, and the native twin's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import native
from potluck.wire.checksum import crc32c


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next two: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_values(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum
    if native.available:
        assert native.core.crc32c(data) == checksum
        assert native.core.crc32c_lanes(data) == checksum
        assert native.core.crc32c_portable(data) == checksum


@given(st.integers(0, 60_000), st.integers(0, 9), st.integers(0, 2**32 - 1), st.data())
def test_pieces_and_twins_agree(size: int, offset: int, seed: int, draw: st.DataObject) -> None:
    data = memoryview(np.random.default_rng(seed).bytes(size + offset))[offset:]
    cut = draw.draw(st.integers(0, size))
    whole = crc32c(data)
    assert crc32c(data[cut:], crc32c(data[:cut])) == whole
    if native.available:
        assert native.core.crc32c(data) == whole
        assert native.core.crc32c(data[cut:], native.core.crc32c(data[:cut])) == whole
        assert native.core.crc32c_lanes(data) == whole
        assert native.core.crc32c_portable(data) == whole


def test_a_flipped_bit_is_seen() -> None:
    data = bytearray(np.random.default_rng(3).bytes(50_000))
    before = crc32c(data)
    data[31_415] ^= 0x10
    assert crc32c(data) != before
