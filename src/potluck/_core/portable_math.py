"""Functions of numbers that are equal on all machines, as the C library's are not."""

from __future__ import annotations

import math
from decimal import Context, Decimal

_CONTEXT = Context(prec=28)


def power(base: float, exponent: float) -> float:
    """``base ** exponent`` for a ``base`` above 0, or for 0 and an ``exponent`` above 0.

    The last bit of the C library's ``pow`` depends on the system and on the processor. Cost: some
    microseconds if ``exponent`` is a whole number, about 0.3 ms if not (except for 0.5).
    """
    if exponent == 0.5:
        return math.sqrt(base)
    return float(_CONTEXT.power(Decimal(float(base)), Decimal(float(exponent))))
