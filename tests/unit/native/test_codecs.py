"""The native codecs against their twins in potluck._core.codecs, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core import native
from potluck._core.codecs import NAMES, Codec, codec_of
from support.arrays import odd_array, same_bits

pytestmark = [
    pytest.mark.usefixtures("kernel_set"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

F4 = np.dtype(np.float32)
codecs = st.sampled_from([codec_of(name) for name in NAMES])
lengths = st.one_of(st.integers(0, 600), st.integers(0, 10_000))
offsets = st.integers(0, 70)
seeds = st.integers(0, 2**32 - 1)
# Odd bits in every block leave int8 nothing to encode; most values must be ordinary there.
ordinary = st.booleans()


EDGES = np.array(
    [
        *(np.finfo(np.float32).max, 65504, 65519.996, 65520, 2.0**103, 2.0**96, np.inf, np.nan),
        *map(float.fromhex, ("0x1.FEp127", "0x1.FEFFFEp127", "0x1.FFp127", "0x1.FFFFFCp127")),
    ],
    np.float32,
)
EDGES = np.concatenate([EDGES, -EDGES])
"""About the ends of the ranges of codecs."""


def floats(count: int, offset: int, seed: int, is_ordinary: bool) -> np.ndarray:
    array = odd_array(F4, count, offset=offset, seed=seed)
    if is_ordinary:
        rng = np.random.default_rng(seed)
        array[:] = rng.standard_normal(count) * 10.0 ** rng.integers(-38, 38, count)
        array[: count // 2] = rng.standard_normal(count // 2)
        if seed % 3 == 0:
            places = rng.random(count) < 0.01
            array[places] = rng.choice(EDGES, np.count_nonzero(places))
    return array


def space(size: int, offset: int) -> np.ndarray:
    return np.full(size + offset, 0xAB, np.uint8)[offset:]


def same_encoding(codec: Codec, one: np.ndarray, other: np.ndarray, count: int) -> bool:
    if codec.name.startswith("int"):
        at = 4 * -(-count // 256)
        return same_bits(
            one[:at].copy().view("f4"), other[:at].copy().view("f4")
        ) and np.array_equal(one[at:], other[at:])
    dtype = "f2" if codec.name == "fp16" else "bfloat16"
    return same_bits(one.copy().view(dtype), other.copy().view(dtype))


@settings(max_examples=150)
@given(codecs, lengths, offsets, offsets, seeds, ordinary)
def test_encode(
    codec: Codec, count: int, here: int, there: int, seed: int, is_ordinary: bool
) -> None:
    source = floats(count, here, seed, is_ordinary)
    expected = space(codec.encoded_bytes(count), 0)
    codec.encode(expected, source)
    encoded = space(codec.encoded_bytes(count), there)
    assert native.core.encode(codec.code, encoded, source) == codec.num_beyond(source)
    assert same_encoding(codec, encoded, expected, count)


@settings(max_examples=150)
@given(codecs, lengths, offsets, offsets, seeds, ordinary, st.booleans())
def test_decode_and_decode_accumulate(
    codec: Codec, count: int, here: int, there: int, seed: int, is_ordinary: bool, add: bool
) -> None:
    encoded = space(codec.encoded_bytes(count), here)
    codec.encode(encoded, floats(count, 0, seed, is_ordinary))
    target = floats(count, there, seed + 1, True)
    expected = target.copy()
    if add:
        codec.decode_accumulate(expected, encoded)
        native.core.decode_accumulate(codec.code, target, encoded)
    else:
        codec.decode(expected, encoded)
        native.core.decode(codec.code, target, encoded)
    assert same_bits(target, expected)


@settings(max_examples=80)
@given(codecs, lengths, offsets, seeds, ordinary)
def test_what_error_feedback_keeps(
    codec: Codec, count: int, offset: int, seed: int, is_ordinary: bool
) -> None:
    source = floats(count, offset, seed, is_ordinary)
    residual = floats(count, 0, seed + 1, True)
    left = residual.copy()
    expected = space(codec.encoded_bytes(count), 0)
    num_beyond = codec.encode_with_residual(expected, left, source)
    encoded = space(codec.encoded_bytes(count), offset)
    found = native.core.encode_with_residual(codec.code, encoded, residual, source)
    assert found == num_beyond
    assert same_encoding(codec, encoded, expected, count)
    assert same_bits(residual, left)


def test_buffers_of_the_wrong_size_are_refused() -> None:
    values = np.zeros(300, np.float32)
    with pytest.raises(ValueError, match="not of the size"):
        native.core.encode(3, np.zeros(300, np.uint8), values)
    with pytest.raises(ValueError, match="not of the size"):
        native.core.decode(1, values, np.zeros(599, np.uint8))
    with pytest.raises(ValueError, match="no such codec"):
        native.core.encode(9, np.zeros(600, np.uint8), values)
