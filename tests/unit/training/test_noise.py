"""The noise scale: exact where the expectation is put in, right on average where it is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from potluck.training.noise import NoiseEstimate, next_batch, unbiased
from potluck.training.policy import NoiseBatching

OPTIONS = NoiseBatching(min_batch=8, max_batch=512, threshold=0.2, max_change=2.0, warmup=2)


@pytest.mark.parametrize(("small", "big"), [(1, 2), (8, 64), (3, 1000)])
def test_expected_squares_give_back_signal_and_noise_exactly(small: int, big: int) -> None:
    """E|g_B|^2 = |G|^2 + tr(Sigma)/B, so equations A.2 and A.3 must invert that."""
    signal, noise = 0.75, 40.0
    found = unbiased(signal + noise / small, small, signal + noise / big, big)
    assert found is not None
    assert found == pytest.approx((signal, noise), rel=1e-12)


def test_equal_batch_sizes_say_nothing() -> None:
    assert unbiased(1.0, 8, 1.0, 8) is None
    assert unbiased(1.0, 0, 1.0, 8) is None


def test_the_estimate_is_right_on_drawn_gradients() -> None:
    """Four ranks of eight samples; true gradient (3, 4), so |G|^2 = 25; tr(Sigma) = 2 * 10^2."""
    rng = np.random.default_rng(20181214)
    samples = np.array([3.0, 4.0]) + 10.0 * rng.standard_normal((4000, 4, 8, 2))
    ranks = samples.mean(axis=2)
    whole = ranks.mean(axis=1)
    estimate = NoiseEstimate()
    found = []
    for local, reduced in zip(ranks, whole, strict=True):
        for gradient in local:
            pair = unbiased(float(gradient @ gradient), 8, float(reduced @ reduced), 32)
            assert pair is not None
            found.append(pair)
    signal, noise = np.mean(found, axis=0)
    # Within two of the standard errors of these means, which are 0.9 and 2.6; without the
    # correction for the noise in each square the signal would be 25 + 200 / 32.
    assert signal == pytest.approx(25, abs=1.8)
    assert noise == pytest.approx(200, abs=5.2)
    estimate = estimate.after(float(signal), float(noise), 0.1)
    assert estimate.scale == pytest.approx(8, rel=0.3)


def test_the_average_begins_as_a_mean_and_leaves_out_what_is_not_finite() -> None:
    estimate = NoiseEstimate().after(1.0, 10.0, 0.1).after(3.0, 30.0, 0.1)
    assert (estimate.signal, estimate.noise, estimate.num) == (2.0, 20.0, 2)
    assert estimate.after(math.inf, 1.0, 0.1) == estimate
    assert estimate.after(1.0, math.nan, 0.1) == estimate
    assert math.isnan(NoiseEstimate().scale)
    assert NoiseEstimate(-0.1, 5.0, 3).scale == math.inf


@pytest.mark.parametrize(
    ("current", "scale", "expected"),
    [
        (64, 70.0, 64),  # within the threshold
        (64, 100.0, 100),
        (64, 1000.0, 128),  # at most doubled
        (64, 1.0, 32),  # at most halved
        (12, 1.0, 8),  # never below min_batch
        (400, 1e9, 512),  # never above max_batch
        (64, math.inf, 128),
    ],
)
def test_the_batch_follows_the_noise_scale_in_steps(
    current: int, scale: float, expected: int
) -> None:
    estimate = NoiseEstimate(1.0, scale, 5) if math.isfinite(scale) else NoiseEstimate(0, 1, 5)
    assert next_batch(current, estimate, OPTIONS)[0] == expected


def test_too_few_estimates_change_nothing_and_say_so() -> None:
    assert next_batch(64, NoiseEstimate(1.0, 1.0, 1), OPTIONS) == (64, "1 of 2 estimates")


def test_bounds_must_make_sense() -> None:
    with pytest.raises(ValueError, match="min_batch 9 and max_batch 8"):
        NoiseBatching(min_batch=9, max_batch=8)
    with pytest.raises(ValueError, match="max_change"):
        NoiseBatching(min_batch=1, max_batch=8, max_change=1.0)
