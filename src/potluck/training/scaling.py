"""Dynamic loss scaling: the scale after overflows and after steps without one. Pure.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2: gradients that are too
small for float16 become zero, so the loss is multiplied by a scale before backward. If the scale is
too large, gradients overflow: then the step is skipped and the scale is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from potluck._core import hints


@hints.of_init({}, "potluck.torch.LossScale(scale=1024.0)", same=hints.SCALE)
@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """A loss scale, with the rule by which it changes.

    ``scale`` is multiplied by ``growth`` after ``interval`` consecutive steps without an overflow
    (``num_good`` so far), and by ``backoff`` after each overflow.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 2.0**-14
    num_good: int = 0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and self.growth > 1 and 0 < self.backoff < 1 and self.interval > 0):
            raise ValueError(
                f"scale {self.scale} and interval {self.interval} must be positive, growth "
                f"{self.growth} above 1, backoff {self.backoff} between 0 and 1"
            )

    def after(self, overflow: bool) -> LossScale:
        """The loss scale of the next step.

        FloatingPointError if the scale would fall below ``minimum``: then the loss itself
        overflows.
        """
        if overflow:
            smaller = self.scale * self.backoff
            if smaller < self.minimum:
                raise FloatingPointError(
                    f"gradients are not finite even at a loss scale of {self.scale:g}: the loss "
                    "is infinite or NaN, or the training diverges; lower the learning rate"
                )
            return replace(self, scale=smaller, num_good=0)
        if self.num_good + 1 == self.interval:
            return replace(self, scale=self.scale * self.growth, num_good=0)
        return replace(self, num_good=self.num_good + 1)
