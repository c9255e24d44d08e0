"""Compressors account for every gradient exactly, keep their sizes, and refuse bad input."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import potluck
from potluck.compressors import BF16, FP16, Compressor, GradientCompressor, Quantize, RandomK, TopK

COMPRESSORS: list[Compressor] = [
    FP16(),
    BF16(),
    Quantize(8),
    Quantize(4),
    Quantize(2),
    TopK(0.1, chunk=64),
    TopK(0.1, chunk=None),
    TopK(0.3, chunk=64, bits=4),
    TopK(0.02, bits=2),
    RandomK(0.3),
    RandomK(0.3, mode="k"),
]
DTYPES = [np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]
RANDOM_K = [1, 2, 5, 7, 9, 11]
RANDOM_BERNOULLI = [3, 8, 10, 11, 13, 14]
ROUNDING = {"float32": 1e-5, "float64": 1e-13, "float16": 1e-5, "bfloat16": 1e-5}


def gradient(count: int, seed: int, dtype: np.dtype = DTYPES[0]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-6, 3, count)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", COMPRESSORS, ids=repr)
@settings(max_examples=15, deadline=None)
@given(count=st.integers(0, 700), num_steps=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_what_came_out_is_what_went_in_minus_the_residual(
    strategy: Compressor, dtype: np.dtype, count: int, num_steps: int, seed: int
) -> None:
    compressor = GradientCompressor(strategy)
    came_in, came_out = np.zeros(count), np.zeros(count)
    for step in range(num_steps):
        source = gradient(count, seed + step, dtype)
        came_in += source.astype(np.float64)
        restored = compressor.decompress(compressor.compress(source))
        assert restored.dtype == dtype
        came_out += restored.astype(np.float64)
    lost = came_in - came_out - compressor.residual()
    largest = np.abs(came_in).max(initial=1) + np.abs(came_out).max(initial=1)
    assert np.abs(lost).max(initial=0) <= ROUNDING[str(dtype)] * num_steps * largest


@pytest.mark.parametrize("strategy", COMPRESSORS, ids=repr)
def test_integers_are_accounted_for_to_the_last_bit(strategy: Compressor) -> None:
    """Sums of small integers are exact in float32, so nothing may be lost by rounding either."""
    if isinstance(strategy, Quantize) or getattr(strategy, "bits", None):
        pytest.skip("a scale of these codecs is no integer")
    compressor = GradientCompressor(strategy)
    came_in, came_out = np.zeros(5000), np.zeros(5000)
    for step in range(20):
        source = np.random.default_rng(step).integers(-900, 900, 5000).astype(np.float32)
        came_in += source
        came_out += compressor.compress(source).decompress()
    assert np.array_equal(came_out + compressor.residual(), came_in)


def test_the_ratios() -> None:
    source = gradient(1 << 20, 0)
    ratios = {repr(s): GradientCompressor(s).compress(source).ratio for s in COMPRESSORS}
    assert ratios["FP16()"] == ratios["BF16()"] == 2
    assert ratios["Quantize(bits=8)"] == pytest.approx(3.938, abs=1e-3)
    assert ratios["Quantize(bits=4)"] == pytest.approx(7.757, abs=1e-3)
    assert ratios["Quantize(bits=2)"] == pytest.approx(15.06, abs=1e-2)
    one_percent = GradientCompressor(TopK(0.01)).compress(source)
    assert one_percent.ratio == pytest.approx(74.1, abs=0.5)  # 4 bytes a value, 1.39 a position
    assert one_percent.nbytes == TopK(0.01).payload_bytes(source.size)
    assert GradientCompressor(TopK(0.01, bits=2)).compress(source).ratio > 240
    assert GradientCompressor(RandomK(0.01, "k")).compress(source).ratio == pytest.approx(100, 1e-3)


def test_top_k_takes_the_largest_of_each_chunk_or_of_all() -> None:
    source = np.array([1, -9, 2, 3, 0, 0.5, -0.25, 0], np.float32)
    whole = GradientCompressor(TopK(0.25, chunk=None)).compress(source).decompress()
    assert whole.tolist() == [0, -9, 0, 3, 0, 0, 0, 0]
    chunks = GradientCompressor(TopK(0.25, chunk=4)).compress(source).decompress()
    assert chunks.tolist() == [0, -9, 0, 0, 0, 0.5, 0, 0]


@pytest.mark.parametrize("mode", ["bernoulli", "k"])
def test_random_is_unbiased_and_the_same_on_every_rank(mode: str) -> None:
    source = gradient(2000, 1)
    ranks = [GradientCompressor(RandomK(0.25, mode), error_feedback=False) for _ in range(2)]
    mean = np.zeros(source.size)
    for _ in range(400):
        one, other = (rank.compress(source) for rank in ranks)
        assert np.array_equal(one.payload, other.payload)
        mean += one.decompress() / 400
    # The deviation of the mean of 400 draws is sqrt(3 / 400) of an element; 6 of these at most.
    assert np.all(np.abs(mean - source) <= 6 * np.abs(source) * (3 / 400) ** 0.5 + 1e-6)


def test_random_chooses_the_same_elements_with_any_numpy() -> None:
    """Ranks with other versions of NumPy must choose alike: these positions never change."""
    assert RandomK(0.5, "k", seed=7).positions(12, 3).tolist() == RANDOM_K
    assert RandomK(0.3, seed=7).positions(20, 3).tolist() == RANDOM_BERNOULLI


@pytest.mark.parametrize("strategy", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inf_and_nan_are_counted_named_and_never_kept(
    strategy: Compressor, dtype: np.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    compressor = GradientCompressor(strategy)
    bad = gradient(600, 0, dtype)
    bad[[5, 400, 599]] = np.nan, np.inf, -np.inf
    with caplog.at_level(logging.WARNING):
        seen = compressor.compress(bad, "layer.weight")
    assert seen.num_nonfinite == compressor.num_nonfinite["layer.weight"] == 3
    assert "layer.weight: 3 of 600 elements: a value is inf or NaN" in caplog.text
    assert not np.isfinite(seen.decompress().astype(np.float32)).all(), "must stay visible"
    assert np.isfinite(compressor.residual("layer.weight")).all()
    after = compressor.compress(gradient(600, 1, dtype), "layer.weight")
    assert np.isfinite(after.decompress().astype(np.float32)).all()
    assert after.num_nonfinite == 0


def test_what_fp16_makes_infinite_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    compressor = GradientCompressor(FP16())
    with caplog.at_level(logging.WARNING):
        assert compressor.compress(np.array([1e6, 1], np.float32)).num_nonfinite == 1
    assert "beyond the range of FP16()" in caplog.text
    assert compressor.residual().tolist() == [0, 0]


def test_each_name_has_its_own_residual_and_the_state_goes_on() -> None:
    first = GradientCompressor(TopK(0.1, chunk=64))
    for step in range(3):
        first.compress(gradient(500, step), "a")
        first.compress(gradient(300, step).reshape(30, 10), "b")
    second = GradientCompressor(TopK(0.1, chunk=64))
    second.load_state_dict(first.state_dict())
    for name, shape in (("a", (500,)), ("b", (30, 10))):
        source = gradient(int(np.prod(shape)), 9).reshape(shape)
        one, other = first.compress(source, name), second.compress(source, name)
        assert np.array_equal(one.payload, other.payload)
        assert one.decompress().shape == shape


def test_shapes_that_are_not_contiguous_or_empty() -> None:
    turned = gradient(600, 0).reshape(20, 30).T
    seen = GradientCompressor(TopK(1.0)).compress(turned).decompress()
    assert np.array_equal(seen, turned)
    for shape in ((0,), (3, 0), ()):
        for strategy in COMPRESSORS:
            seen = GradientCompressor(strategy).compress(np.ones(shape, np.float32))
            assert seen.decompress().shape == shape


def test_the_two_functions() -> None:
    source = gradient(1000, 0)
    small = potluck.quantize_gradients(source, num_bits=8)
    assert np.abs(small.decompress() - source).max() <= np.abs(source).max() / 250
    sparse = potluck.sparsify_gradients(source, sparsity=0.99).decompress()
    kept = np.flatnonzero(sparse)
    assert set(kept) == set(np.argsort(-np.abs(source))[:10])
    assert np.array_equal(sparse[kept], source[kept])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TopK(0), ValueError, r"TopK\(ratio=0\): ratio must be above 0"),
        (lambda: TopK(1.5), ValueError, "ratio must be above 0 and at most 1"),
        (lambda: TopK(float("nan")), ValueError, "ratio must be above 0"),
        (lambda: TopK(0.1, chunk=0), ValueError, "chunk is a positive number"),
        (lambda: TopK(0.1, bits=3), ValueError, "bits must be 8, 4, 2 or None"),
        (lambda: TopK("0.1"), TypeError, "ratio must be a number"),
        (lambda: TopK(True), TypeError, "ratio must be a number"),
        (lambda: TopK(0.1, bits=2.0), TypeError, r"TopK\(bits=2.0\): bits must be an int"),
        (lambda: TopK(0.1, chunk=True), TypeError, "chunk must be an int"),
        (lambda: Quantize(8.0), TypeError, r"Quantize\(bits=8.0\): bits must be an int"),
        (lambda: Quantize("8"), TypeError, r"Quantize\(bits='8'\): bits must be an int"),
        (lambda: RandomK(None), TypeError, "ratio must be a number"),
        (lambda: RandomK(0.1, seed=0.5), TypeError, "seed must be an int"),
        (lambda: GradientCompressor(TopK), TypeError, "it must be one such as TopK"),
        (lambda: Quantize(16), ValueError, r"Quantize\(bits=16\): bits must be 8, 4 or 2"),
        (lambda: RandomK(-0.1), ValueError, "ratio must be above 0"),
        (lambda: RandomK(0.1, "other"), ValueError, "mode must be 'bernoulli' or 'k'"),
        (lambda: RandomK(0.1, seed=-1), ValueError, "seed must not be negative"),
        (
            lambda: GradientCompressor("int8"),
            TypeError,
            "compressor is 'int8'; it must be one such",
        ),
        (lambda: potluck.sparsify_gradients(gradient(9, 0), 1.0), ValueError, "sparsity is 1.0"),
        (lambda: potluck.sparsify_gradients(gradient(9, 0), "x"), TypeError, "sparsity must be a"),
        (lambda: potluck.quantize_gradients(gradient(9, 0), 8.0), TypeError, "bits must be an int"),
        (
            lambda: GradientCompressor(Quantize()).decompress(b""),
            TypeError,
            "returned, not a bytes",
        ),
        (lambda: GradientCompressor(Quantize()).load_state_dict(None), TypeError, "not a NoneType"),
        (lambda: potluck.quantize_gradients(gradient(9, 0), 7), ValueError, "bits must be 8, 4"),
        (lambda: potluck.quantize_gradients(np.ones(3, int)), TypeError, "gradients is int64"),
        (lambda: potluck.quantize_gradients([1.0]), TypeError, "gradients is a list"),
    ],
)
def test_bad_input_is_one_clear_error(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_the_state_of_a_strategy_of_ones_own_fits_another_object_of_it() -> None:
    class Zeros(Compressor):
        def compress(self, source, residual, step):  # type: ignore[no-untyped-def]
            return np.empty(0, np.uint8)

        def decompress(self, payload, shape, step):  # type: ignore[no-untyped-def]
            return np.zeros(shape, np.float32)

        def looks_finite(self, payload, source):  # type: ignore[no-untyped-def]
            return True

    first, second = GradientCompressor(Zeros()), GradientCompressor(Zeros())
    first.compress(gradient(10, 0), "w")
    second.load_state_dict(first.state_dict())
    assert np.array_equal(second.residual("w"), first.residual("w"))


def test_numbers_of_numpy_are_those_of_python() -> None:
    """The text of a compressor is compared with that in a state."""
    made = TopK(np.float64(0.25), chunk=np.int64(64), bits=np.int8(4))
    assert repr(made) == repr(TopK(0.25, chunk=64, bits=4))
    assert repr(RandomK(np.float32(0.5), seed=np.uint8(3))) == repr(RandomK(0.5, seed=3))
    assert repr(Quantize(np.int32(4))) == repr(Quantize(4))


def test_a_shape_a_dtype_or_a_state_that_does_not_fit() -> None:
    compressor = GradientCompressor(Quantize(8))
    compressor.compress(gradient(10, 0), "w")
    with pytest.raises(ValueError, match=r"w is float32 of shape \(11,\), but its residual is"):
        compressor.compress(gradient(11, 0), "w")
    with pytest.raises(ValueError, match="w is float64 of shape"):
        compressor.compress(gradient(10, 0, DTYPES[1]), "w")
    with pytest.raises(
        ValueError, match=r"the state belongs to Quantize\(bits=8\), this compressor is"
    ):
        GradientCompressor(TopK(0.1)).load_state_dict(compressor.state_dict())
    with pytest.raises(ValueError, match="not the state of a GradientCompressor"):
        compressor.load_state_dict({"compressor": "x"})


def test_memory_is_used_again_only_when_nothing_refers_to_it() -> None:
    compressor = GradientCompressor(FP16(), error_feedback=False)
    first = compressor.compress(gradient(1000, 0))
    kept = first.payload[:10]
    place, bits = first.payload.ctypes.data, first.payload.tobytes()
    second = compressor.compress(gradient(1000, 1))
    assert second.payload.ctypes.data != place
    assert first.payload.tobytes() == bits
    del first
    third = compressor.compress(gradient(1000, 2))
    assert kept.tobytes() == bits[:10], "a view counts"
    place = third.payload.ctypes.data
    del third
    assert compressor.compress(gradient(1000, 3)).payload.ctypes.data == place
    smaller = compressor.compress(gradient(10, 3), "another")
    assert smaller.payload.nbytes == 20
