"""Batch size from the noise of the gradient. Pure.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018
(arXiv:1812.06162). The gradient of a batch of B samples is the true gradient G plus noise of
covariance Sigma / B, so its squared length is on average |G|^2 + tr(Sigma) / B. Two batch sizes
give both unknowns (appendix A.1): here one rank's gradient before the reduction, and the reduced
one. Their ratio, the simple noise scale B = tr(Sigma) / |G|^2, is the batch size up to which more
samples still buy nearly proportionally more progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseBatching:
    """Let the global batch follow the noise scale, between ``min_batch`` and ``max_batch``.

    ``smoothing`` is the weight of the newest estimate (the average over the steps between two
    adaptations). The batch changes when the noise scale is off by more than the fraction
    ``threshold``, at most by the factor ``max_change`` at a time, and not before ``warmup``
    estimates. Needs two ranks: on one nothing is measured and the batch stays as it is.
    """

    min_batch: int
    max_batch: int
    smoothing: float = 0.1
    threshold: float = 0.2
    max_change: float = 2.0
    warmup: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.min_batch <= self.max_batch:
            raise ValueError(
                f"min_batch {self.min_batch} and max_batch {self.max_batch}: "
                "1 <= min_batch <= max_batch must hold"
            )
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing is {self.smoothing}; it must be above 0 and at most 1")
        if not self.threshold >= 0 or not self.max_change > 1:
            raise ValueError(
                f"threshold {self.threshold} must not be negative, "
                f"max_change {self.max_change} must be above 1"
            )

    def clamp(self, size: float) -> int:
        """``size`` as a whole number between the bounds."""
        return int(min(max(size, self.min_batch), self.max_batch))


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """Exponential averages of |G|^2 (``signal``) and tr(Sigma) (``noise``).

    They are averaged apart because the ratio of two unbiased estimates is biased.
    """

    signal: float = 0.0
    noise: float = 0.0
    num: int = 0

    def after(self, signal: float, noise: float, smoothing: float) -> NoiseEstimate:
        """With one more estimate in it; one that is not finite is left out."""
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return self
        # The first ones are plain means, so that the start does not weigh more than the rest.
        new = max(smoothing, 1 / (self.num + 1))
        return NoiseEstimate(
            (1 - new) * self.signal + new * signal,
            (1 - new) * self.noise + new * noise,
            self.num + 1,
        )

    @property
    def scale(self) -> float:
        """The simple noise scale in samples; infinite when no signal shows, NaN when unknown."""
        if not self.num:
            return math.nan
        if self.signal <= 0:
            return math.inf
        return max(self.noise, 0.0) / self.signal


def unbiased(
    small_square: float, small: int, big_square: float, big: int
) -> tuple[float, float] | None:
    """Unbiased |G|^2 and tr(Sigma) from squared gradient lengths at batch sizes small < big.

    Equations A.2 and A.3 of the paper. None if the sizes do not differ.
    """
    if not 0 < small < big:
        return None
    signal = (big * big_square - small * small_square) / (big - small)
    noise = (small_square - big_square) / (1 / small - 1 / big)
    return signal, noise


def next_batch(current: int, estimate: NoiseEstimate, options: NoiseBatching) -> tuple[int, str]:
    """The batch size to go on with, and why."""
    current = options.clamp(current)
    if estimate.num < options.warmup:
        return current, f"{estimate.num} of {options.warmup} estimates"
    wanted = options.clamp(estimate.scale)
    if abs(wanted - current) <= options.threshold * current:
        return current, f"noise scale {estimate.scale:.0f}"
    low, high = current / options.max_change, current * options.max_change
    size = options.clamp(round(min(max(wanted, low), high)))
    return size, f"noise scale {estimate.scale:.0f}"
