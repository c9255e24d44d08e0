"""Checks of the options that a script passes: an error names the class, the option, the value."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any


def number(owner: str, option: str, value: Any) -> float:
    """``value``, Python's or NumPy's, as a float; TypeError for what is no real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}({option}={value!r}): {option} must be a number")
    return float(value)


def integer(owner: str, option: str, value: Any) -> int:
    """``value``, Python's or NumPy's, as an int; TypeError for anything else, 8.0 too."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{owner}({option}={value!r}): {option} must be an int")
    return int(value)


def ratio(owner: str, value: Any) -> float:
    """``number`` of the option ``ratio``; ValueError unless it is above 0 and at most 1."""
    share = number(owner, "ratio", value)
    if not 0 < share <= 1:
        raise ValueError(f"{owner}(ratio={value}): ratio must be above 0 and at most 1")
    return share


def seed(owner: str, value: Any) -> int:
    """``integer`` of the option ``seed``; ValueError for a negative one."""
    chosen = integer(owner, "seed", value)
    if chosen < 0:
        raise ValueError(f"{owner}(seed={value}): seed must not be negative")
    return chosen


def thresholds(owner: str, dense_below: Any, warmup_steps: Any) -> tuple[int, int]:
    """``integer`` of the two options that say what is not compressed; ValueError if negative."""
    dense_below = integer(owner, "dense_below", dense_below)
    warmup_steps = integer(owner, "warmup_steps", warmup_steps)
    if dense_below < 0 or warmup_steps < 0:
        raise ValueError(
            f"dense_below is {dense_below} and warmup_steps {warmup_steps}; neither may be negative"
        )
    return dense_below, warmup_steps


def put(options: Any, **values: Any) -> None:
    """Set checked values on a frozen dataclass, in its ``__post_init__``: NumPy's numbers become
    Python's, so that equal options have equal text on all ranks and in checkpoints."""
    for name, value in values.items():
        object.__setattr__(options, name, value)
