"""The gradient noise scale, and the batch size that follows from it. Pure.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018
(arXiv:1812.06162). The gradient of a batch of B samples is the true gradient G plus noise of
covariance Sigma / B, so its squared length is on average |G|^2 + tr(Sigma) / B. Two batch sizes
give both unknowns (appendix A.1): here one rank's gradient before the reduction, and the reduced
gradient. Their ratio, the simple noise scale B = tr(Sigma) / |G|^2, is the batch size up to which
more samples give nearly proportionally more progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from potluck._core import hints
from potluck._core.checks import checked_whole


@hints.of_init(hints.NOISE, "potluck.torch.NoiseBatching(min_batch=32, max_batch=512)")
@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseBatching:
    """Adapt the global batch size to the gradient noise scale, in [``min_batch``, ``max_batch``].

    ``smoothing`` is the weight of the newest estimate (the average over the steps between two
    adaptations). The batch size changes if the noise scale differs from it by more than the
    fraction ``threshold``, by at most the factor ``max_change`` at a time, and after ``warmup``
    estimates at the earliest. A single rank can't measure the noise and keeps its batch size.
    """

    min_batch: int
    max_batch: int
    smoothing: float = 0.1
    threshold: float = 0.2
    max_change: float = 2.0
    warmup: int = 2

    def __post_init__(self) -> None:
        checked_whole("min_batch", self.min_batch, at_least=1)
        if not self.min_batch <= checked_whole("max_batch", self.max_batch, at_least=1):
            raise ValueError(
                f"min_batch {self.min_batch} and max_batch {self.max_batch}: "
                "min_batch <= max_batch must hold"
            )
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing is {self.smoothing}; it must be above 0 and at most 1")
        if not self.threshold >= 0 or not self.max_change > 1:
            raise ValueError(
                f"threshold {self.threshold} must not be negative, "
                f"max_change {self.max_change} must be above 1"
            )

    def clamp(self, size: float) -> int:
        """``size`` as an integer between the bounds."""
        return int(min(max(size, self.min_batch), self.max_batch))


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """Exponential moving averages of |G|^2 (``signal``) and tr(Sigma) (``noise``).

    The two are averaged separately, because the ratio of two unbiased estimates is biased.
    """

    signal: float = 0.0
    noise: float = 0.0
    num: int = 0

    def after(self, signal: float, noise: float, smoothing: float) -> NoiseEstimate:
        """The averages with one more estimate; an estimate that is not finite is ignored."""
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return self
        # Plain means at first, so that the first estimate does not weigh more than later ones.
        new = max(smoothing, 1 / (self.num + 1))
        return NoiseEstimate(
            (1 - new) * self.signal + new * signal,
            (1 - new) * self.noise + new * noise,
            self.num + 1,
        )

    @property
    def scale(self) -> float:
        """The simple noise scale in samples; inf if the signal is not positive, NaN without
        estimates."""
        if not self.num:
            return math.nan
        if self.signal <= 0:
            return math.inf
        return max(self.noise, 0.0) / self.signal


def unbiased(
    small_square: float, small: int, big_square: float, big: int
) -> tuple[float, float] | None:
    """Unbiased |G|^2 and tr(Sigma) from the squared gradient norms at two batch sizes.

    Equations A.2 and A.3 of the paper. None unless ``small`` < ``big``.
    """
    if not 0 < small < big:
        return None
    signal = (big * big_square - small * small_square) / (big - small)
    noise = (small_square - big_square) / (1 / small - 1 / big)
    return signal, noise


def next_batch(current: int, estimate: NoiseEstimate, options: NoiseBatching) -> tuple[int, str]:
    """The next batch size, and the reason in words."""
    current = options.clamp(current)
    if estimate.num < options.warmup:
        return current, f"{estimate.num} of {options.warmup} estimates"
    wanted = options.clamp(estimate.scale)
    if abs(wanted - current) <= options.threshold * current:
        return current, f"noise scale {estimate.scale:.0f}"
    low, high = current / options.max_change, current * options.max_change
    size = options.clamp(round(min(max(wanted, low), high)))
    return size, f"noise scale {estimate.scale:.0f}"
