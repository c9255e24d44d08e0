"""PowerSGD without a network: ranks are a list here, and a sum over them is a sum."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from potluck import GradientCompressor, PowerSGD
from potluck.compressors.powersgd import LowRankSum

SHAPES = {"a": (30, 20), "b": (50, 40)}


def sources(rank: int, step: int, dtype: type = np.float64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def reduced(
    strategy: PowerSGD, ranks: list[dict[str, np.ndarray]], qs: dict[str, np.ndarray], step: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """One step of all ranks: what is decoded, and the next Q; ``ranks`` become residuals."""
    sums = [LowRankSum(strategy, qs, step) for _ in ranks]
    for each, matrices in zip(sums, ranks, strict=True):
        for name, matrix in matrices.items():
            each.add(name, matrix)
    lefts = [each.begin() for each in sums]
    summed = sum(lefts)
    for left in lefts:
        left[:] = summed
    rights = [each.turn() for each in sums]
    total = sum(rights)
    for each, right in zip(sums, rights, strict=True):
        right[:] = total
        each.lose()
    found = []
    for each in sums:
        decoded = {name: np.empty_like(m) for name, m in ranks[0].items()}
        for name, target in decoded.items():
            each.decode(name, target)
        found.append((decoded, each.qs()))
    for decoded, kept in found[1:]:
        for name, target in decoded.items():
            assert np.array_equal(target, found[0][0][name], equal_nan=True), "ranks differ"
        assert all(np.array_equal(q, found[0][1][name]) for name, q in kept.items())
    return found[0]


@pytest.mark.parametrize(("dtype", "rounding"), [(np.float64, 1e-13), (np.float32, 1e-5)])
def test_what_came_out_is_what_went_in_minus_all_residuals(dtype: type, rounding: float) -> None:
    strategy, size, steps = PowerSGD(2), 3, 6
    went = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    came = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    residuals = [{n: np.zeros(s, dtype) for n, s in SHAPES.items()} for _ in range(size)]
    qs: dict[str, np.ndarray] = {}
    for step in range(steps):
        for rank, residual in enumerate(residuals):
            for name, source in sources(rank, step, dtype).items():
                residual[name] += source
                went[name] += source
        decoded, qs = reduced(strategy, residuals, qs, step)
        for name, each in decoded.items():
            came[name] += each
            assert np.linalg.matrix_rank(each) == 2
    for name in SHAPES:
        owed = sum(residual[name].astype(np.float64) for residual in residuals)
        np.testing.assert_allclose(came[name] + owed, went[name], atol=rounding * 30)


def test_q_of_the_last_step_finds_what_is_large_in_a_few_steps() -> None:
    rng = np.random.default_rng(0)
    large = rng.standard_normal((50, 2)) @ rng.standard_normal((2, 40))
    qs: dict[str, np.ndarray] = {}
    errors = []
    for step in range(4):
        noisy = {"b": large + 0.1 * rng.standard_normal((50, 40))}
        decoded, qs = reduced(PowerSGD(2), [noisy], qs, step)
        errors.append(np.linalg.norm(decoded["b"] - large) / np.linalg.norm(large))
    assert errors[-1] < 0.1 < errors[0]


def test_a_gradient_of_zeros_does_not_end_the_search() -> None:
    """Zeros give a Q of zeros, from which no step would ever leave."""
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    decoded, qs = reduced(PowerSGD(2), [zeros], {})
    assert not any(each.any() for each in decoded.values())
    decoded, _ = reduced(PowerSGD(2), [sources(0, 1)], qs, 1)
    assert all(np.linalg.matrix_rank(each) == 2 for each in decoded.values())


def test_one_ranks_nan_is_visible_to_all_and_kept_by_none() -> None:
    ranks = [sources(0, 0), sources(1, 0)]
    _, qs = reduced(PowerSGD(2), ranks, {})
    before = {name: each.copy() for name, each in ranks[0].items()}
    ranks[1]["a"][3, 4] = np.nan
    decoded, after = reduced(PowerSGD(2), ranks, qs, 1)
    assert np.isnan(decoded["a"]).all(), "all of the tensor, on all ranks"
    assert np.isfinite(decoded["b"]).all(), "and no other"
    assert np.array_equal(after["a"], qs["a"])
    assert np.array_equal(ranks[0]["a"], before["a"]), "nothing was sent, so all is kept"
    assert all(np.isfinite(each).all() for residual in ranks for each in residual.values())
    decoded, _ = reduced(PowerSGD(2), ranks, after, 2)
    assert all(np.isfinite(each).all() for each in decoded.values())


def test_what_does_not_pay_is_sent_as_it_is() -> None:
    strategy = PowerSGD(4, min_rate=2)
    assert strategy.applies_to((100, 100))
    assert strategy.applies_to((64, 3, 3, 32)), "a convolution is a matrix of 64 rows"
    assert not strategy.applies_to((16, 16)), "(16 + 16) * 4 * 2 is not below 256"
    assert strategy.applies_to((17, 17)) == (34 * 4 * 2 < 17 * 17)
    for shape in ((), (10_000,), (0, 5), (1, 1000), (1000, 1)):
        assert not strategy.applies_to(shape)
    compressor = GradientCompressor(strategy)
    for shape in ((), (1000,), (16, 16), (0, 5)):
        source = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        source = np.asarray(source, np.float32)
        small = compressor.compress(source, str(shape))
        assert np.array_equal(small.decompress(), source)
        assert small.nbytes == source.nbytes == strategy.payload_bytes(shape)
        assert not np.any(compressor.residual(str(shape)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_the_object_without_a_network(dtype: type) -> None:
    compressor = GradientCompressor(PowerSGD(3))
    came, went = np.zeros((80, 5, 12)), np.zeros((80, 5, 12))
    for step in range(6):
        source = np.random.default_rng(step).standard_normal(came.shape).astype(dtype)
        small = compressor.compress(source, "w")
        assert small.nbytes == 4 * 3 * (80 + 60) == compressor.compressor.payload_bytes(came.shape)
        assert small.decompress().dtype == dtype
        went += source
        came += small.decompress()
    np.testing.assert_allclose(came + compressor.residual("w"), went, atol=2e-5)
    again = GradientCompressor(PowerSGD(3))
    again.load_state_dict(compressor.state_dict())
    source = np.ones(came.shape, dtype)
    one, other = (each.compress(source, "w").payload for each in (compressor, again))
    assert np.array_equal(one, other)


def test_nan_without_a_network(caplog: pytest.LogCaptureFixture) -> None:
    compressor = GradientCompressor(PowerSGD(2))
    bad = np.ones((50, 40), np.float32)
    bad[3, 4] = np.inf
    with caplog.at_level(logging.WARNING):
        small = compressor.compress(bad, "w")
    assert small.num_nonfinite == 1
    assert "w: 1 of 2000 elements: a value is inf or NaN" in caplog.text
    assert not np.isfinite(small.decompress()).any()
    assert np.isfinite(compressor.residual("w")).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"PowerSGD\(rank=0\): rank must be a positive int"),
        ({"rank": 1.5}, r"rank=1.5\): rank must be an int"),
        ({"rank": True}, r"rank=True\): rank must be an int"),
        ({"rank": 2, "start_step": True}, "start_step must be an int"),
        ({"rank": 2, "min_rate": "2"}, "min_rate must be a number"),
        ({"rank": 2, "start_step": -1}, r"start_step=-1\): start_step is a number of steps"),
        ({"rank": 2, "min_rate": 0.5}, r"min_rate=0.5\): min_rate must be at least 1"),
        ({"rank": 2, "min_rate": float("nan")}, "min_rate must be at least 1 and finite"),
        ({"rank": 2, "seed": -1}, "seed must not be negative"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PowerSGD(**options)
