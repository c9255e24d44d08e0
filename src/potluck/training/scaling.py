"""Dynamic loss scaling: how the scale follows overflows. Pure.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2: float16 gradients too
small for the format become zero, so the loss is multiplied by a factor before backward. Too large
a factor overflows: then the step is skipped and the factor made smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor, and by what rule it changes.

    It is multiplied by ``growth`` after ``interval`` steps in a row without an overflow
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
        """The scale for the next step.

        FloatingPointError when even the smallest one overflows: then it is the loss itself.
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
