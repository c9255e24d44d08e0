"""The codecs keep their sizes and error bounds, and show what they can't encode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.codecs import NAMES, Codec, check_dtype, codec_of

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
