"""The codecs keep their sizes and error bounds, and show what they can't encode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.codecs import NAMES, Codec, check_dtype, codec_of, kernels

CODECS = [codec_of(name) for name in NAMES]
lengths = st.integers(0, 1000)


def round_trip(codec: Codec, source: np.ndarray) -> np.ndarray:
    encoded = np.empty(codec.encoded_bytes(source.size), np.uint8)
    codec.encode(encoded, source)
    decoded = np.empty_like(source)
    codec.decode(decoded, encoded)
    return decoded


def test_the_sizes_on_the_wire() -> None:
    sizes = {codec.name: codec.encoded_bytes(1024) for codec in CODECS}
    assert sizes == {
        "fp16": 2048,
        "bf16": 2048,
        "int8": 1024 + 4 * 4,
        "int4": 512 + 4 * 4,
        "int2": 256 + 4 * 4,
    }
    assert codec_of("int8").encoded_bytes(257) == 257 + 2 * 4
    assert codec_of("int4").encoded_bytes(257) == 129 + 2 * 4
    assert codec_of("int2").encoded_bytes(261) == 66 + 2 * 4
    assert [codec.encoded_bytes(0) for codec in CODECS] == [0] * len(CODECS)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(count=lengths, exponent=st.integers(-140, 120), seed=st.integers(0, 2**32 - 1))
def test_the_error_stays_in_its_bound(codec: Codec, count: int, exponent: int, seed: int) -> None:
    if codec.name == "fp16":
        exponent = max(min(exponent, 12), -60)
    rng = np.random.default_rng(seed)
    source = (rng.uniform(-8, 8, count) * 2.0**exponent).astype(np.float32)
    decoded = round_trip(codec, source)
    largest = float(np.abs(source).max(initial=0))
    error = np.abs(decoded.astype(np.float64) - source)
    assert float(error.max(initial=0)) <= codec.error_bound(largest)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(count=st.integers(1, 600), seed=st.integers(0, 2**32 - 1))
def test_what_is_decoded_is_encoded_without_loss_by_the_16_bit_codecs(
    codec: Codec, count: int, seed: int
) -> None:
    decoded = round_trip(codec, np.random.default_rng(seed).standard_normal(count).astype("f4"))
    if not codec.name.startswith("int"):
        assert np.array_equal(round_trip(codec, decoded), decoded)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_visible(codec: Codec, bad: float) -> None:
    source = np.ones(600, np.float32)
    source[300] = bad
    decoded = round_trip(codec, source)
    assert not np.isfinite(decoded[300])
    assert np.all(decoded[:256] == 1), "the other blocks are as they were"


MOST = np.finfo(np.float32).max
BOUNDARIES = {
    "fp16": (65504, np.nextafter(np.float32(65520), np.float32(0))),
    "bf16": (float.fromhex("0x1.FEp127"), float.fromhex("0x1.FEFFFEp127")),
    "int8": (MOST, np.nextafter(MOST, np.float32(0))),
    "int4": (MOST, np.nextafter(MOST, np.float32(0))),
    "int2": (MOST, np.nextafter(MOST, np.float32(0))),
}
"""By codec: the largest number that it stands for, and the largest one that is not counted."""


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_beyond_the_range_becomes_the_largest_number_and_is_counted(
    codec: Codec, with_residual: bool
) -> None:
    top, last = BOUNDARIES[codec.name]
    source = np.ones(600, np.float32)
    source[:5] = MOST, -MOST, last, -last, 0
    source[300] = MOST
    encoded, residual = np.empty(codec.encoded_bytes(600), np.uint8), np.zeros(600, np.float32)
    if with_residual:
        num = kernels.encode_with_residual(codec, encoded, residual, source)
    else:
        num = kernels.encode(codec, encoded, source)
    assert num == 3, "the two of the largest float32 in the first block, and the one in the second"
    decoded = np.empty_like(source)
    kernels.decode(codec, decoded, encoded)
    assert np.isfinite(decoded).all()
    assert np.isfinite(residual).all()
    expected = np.float32([top, -top, top, -top])
    assert (np.abs(decoded[:4] - expected) <= np.abs(expected) * 1e-6).all()
    assert decoded[4] == 0
    assert abs(decoded[300] / top - 1) <= 1e-6
    if codec.name == "fp16" and with_residual:
        assert residual[[0, 1, 300]].tolist() == [0, 0, 0], "what is beyond is lost"
        assert residual[2] == last - top


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_inf_and_nan_are_counted_with_their_block_visible(codec: Codec) -> None:
    source = np.ones(600, np.float32)
    source[[3, 4, 5]] = np.inf, -np.inf, np.nan
    encoded = np.empty(codec.encoded_bytes(600), np.uint8)
    assert kernels.encode(codec, encoded, source) == 3
    decoded = np.empty_like(source)
    kernels.decode(codec, decoded, encoded)
    bad = slice(3, 6) if codec.code < 3 else slice(0, 256)
    assert not np.isfinite(decoded[bad]).any()
    assert (np.delete(decoded, bad) == 1).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_sum_of_finite_values_stays_finite(codec: Codec) -> None:
    """By adding what is decoded, and by adding a residual."""
    source = np.ones(600, np.float32)
    source[::2] = MOST
    source[1::4] = -MOST
    encoded = np.empty(codec.encoded_bytes(600), np.uint8)
    kernels.encode(codec, encoded, source)
    total = source.copy()
    total[7] = np.inf
    kernels.decode_accumulate(codec, total, encoded)
    assert total[7] == np.inf, "infinity stays"
    assert np.isfinite(np.delete(total, 7)).all()
    assert total[0] >= np.float32(0.99) * MOST
    assert total[1] <= np.float32(-0.99) * MOST
    residual = source / 2
    num = kernels.encode_with_residual(codec, encoded, residual, source)
    assert num == np.count_nonzero(np.abs(source) > 1)
    decoded = np.empty_like(source)
    kernels.decode(codec, decoded, encoded)
    assert np.isfinite(decoded).all()
    assert np.isfinite(residual).all()


def test_zeros_and_the_tiniest_values() -> None:
    int8 = codec_of("int8")
    assert not round_trip(int8, np.zeros(300, np.float32)).any()
    assert not round_trip(int8, np.full(300, 2.0**-101, np.float32)).any()
    smallest = np.full(300, 2.0**-100, np.float32)
    assert np.allclose(round_trip(int8, smallest), smallest, rtol=1e-6)


def test_every_block_has_its_own_scale() -> None:
    source = np.concatenate([np.full(256, 1e-6), np.full(256, 1e6)]).astype(np.float32)
    assert np.allclose(round_trip(codec_of("int8"), source), source, rtol=1e-6)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(count=st.integers(1, 600), seed=st.integers(0, 2**32 - 1))
def test_no_error_exceeds_its_value(codec: Codec, count: int, seed: int) -> None:
    """What makes error feedback converge: the residual is never larger than what was encoded."""
    rng = np.random.default_rng(seed)
    source = (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count)).astype(np.float32)
    error = np.abs(round_trip(codec, source) - source)
    assert np.all(error <= np.abs(source) * (1 + 1e-6))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_residual_keeps_what_was_lost_and_nothing_that_is_not_finite(codec: Codec) -> None:
    source = np.random.default_rng(0).standard_normal(600).astype(np.float32)
    residual = np.linspace(-1e-3, 1e-3, 600, dtype=np.float32)
    sent = source + residual
    encoded = np.empty(codec.encoded_bytes(600), np.uint8)
    codec.encode_with_residual(encoded, residual, source)
    decoded = np.empty_like(source)
    codec.decode(decoded, encoded)
    assert np.array_equal(residual, sent - decoded)
    source[[3, 300, 301]] = np.nan, np.inf, 1e6  # the last one is beyond fp16
    codec.encode_with_residual(encoded, residual, source)
    codec.decode(decoded, encoded)
    assert not np.isfinite(decoded[[3, 300]]).any()
    assert np.isfinite(residual).all()


def test_decode_accumulate_adds_in_float32() -> None:
    for codec in CODECS:
        source = np.linspace(-3, 3, 700, dtype=np.float32)
        encoded = np.empty(codec.encoded_bytes(700), np.uint8)
        codec.encode(encoded, source)
        target = np.full(700, 10, np.float32)
        codec.decode_accumulate(target, encoded)
        assert np.array_equal(target, np.float32(10) + round_trip(codec, source))


def test_an_unknown_codec_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="no codec 'int3'; the codecs are fp16, bf16, int8, int4, int2"
    ):
        codec_of("int3")


def test_codecs_are_for_float32() -> None:
    check_dtype(codec_of("int8"), np.dtype(np.float32))
    with pytest.raises(TypeError, match="codec='int8' encodes float32 arrays, not float64"):
        check_dtype(codec_of("int8"), np.dtype(np.float64))
