"""The gradient noise scale, and the batch size for it. Pure.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018
(arXiv:1812.06162). The gradient of a batch of B samples is the true gradient G plus noise of
covariance Sigma / B, so its squared length is on average |G|^2 + tr(Sigma) / B. Two batch sizes
give two equations for the two unknowns |G|^2 and tr(Sigma) (appendix A.1): here one rank's gradient
before the all_reduce, and the reduced gradient. The simple noise scale tr(Sigma) / |G|^2 is the
batch size up to which a step makes nearly proportional progress with more samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from potluck.training.policy import NoiseBatching


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """Exponential moving averages of |G|^2 (``signal``) and tr(Sigma) (``noise``), of ``num``
    estimates.

    They are averaged separately, because the mean of ratios of unbiased estimates is biased.
    """

    signal: float = 0.0
    noise: float = 0.0
    num: int = 0

    def after(self, signal: float, noise: float, smoothing: float) -> NoiseEstimate:
        """The averages with one more estimate, of weight ``smoothing``; an estimate that is not
        finite is ignored."""
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return self
        # At first the arithmetic mean: an average that began with the first estimate would keep it
        # at a larger weight than later ones.
        new = max(smoothing, 1 / (self.num + 1))
        return NoiseEstimate(
            (1 - new) * self.signal + new * signal,
            (1 - new) * self.noise + new * noise,
            self.num + 1,
        )

    @property
    def scale(self) -> float:
        """The simple noise scale in samples; inf if |G|^2 is not positive, NaN without
        estimates."""
        if not self.num:
            return math.nan
        if self.signal <= 0:
            return math.inf
        return max(self.noise, 0.0) / self.signal


def unbiased(
    small_square: float, small: int, big_square: float, big: int
) -> tuple[float, float] | None:
    """Unbiased estimates of |G|^2 and tr(Sigma): ``small_square`` and ``big_square`` are squared
    norms of gradients, of ``small`` and of ``big`` samples.

    Equations A.2 and A.3 of the paper. None unless ``small`` < ``big``.
    """
    if not 0 < small < big:
        return None
    signal = (big * big_square - small * small_square) / (big - small)
    noise = (small_square - big_square) / (1 / small - 1 / big)
    return signal, noise


def next_batch(current: int, estimate: NoiseEstimate, options: NoiseBatching) -> tuple[int, str]:
    """The batch size after ``current`` for this noise scale, and the reason in words."""
    current = options.clamp(current)
    if estimate.num < options.warmup:
        return current, f"{estimate.num} of {options.warmup} estimates"
    wanted = options.clamp(estimate.scale)
    if abs(wanted - current) <= options.threshold * current:
        return current, f"noise scale {estimate.scale:.0f}"
    low, high = current / options.max_change, current * options.max_change
    size = options.clamp(round(min(max(wanted, low), high)))
    return size, f"noise scale {estimate.scale:.0f}"
