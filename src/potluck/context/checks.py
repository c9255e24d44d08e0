"""Checks of the ranks, tags, numbers and shapes that a caller passes."""

from __future__ import annotations

import operator

import numpy as np


def checked_rank(name: str, rank: object, world_size: int) -> int:
    """The rank in the argument ``name``; TypeError unless it is an integer."""
    if not isinstance(rank, int | np.integer):
        raise TypeError(f"{name} is a rank, an integer from 0 to {world_size - 1}, not {rank!r}")
    return int(rank)


def checked_tag(tag: object) -> int:
    """The tag of a message; ValueError unless it is an integer from 0 to 2**31 - 1."""
    if not isinstance(tag, int | np.integer) or not 0 <= tag < 2**31:
        raise ValueError(f"a tag is an integer from 0 to 2**31 - 1, not {tag!r}")
    return int(tag)


def checked_whole(name: str, value: object, *, at_least: int) -> int:
    """The number in the argument ``name``; TypeError unless it is whole (2.0 is not), ValueError
    below ``at_least``."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r:.100}; it must be a whole number") from None
    if number < at_least:
        raise ValueError(f"{name} is {number}; it must be at least {at_least}")
    return number


def check_parts(operation: str, shape: tuple[int, ...], world_size: int) -> None:
    """ValueError unless there is one part for each rank."""
    if not shape or shape[0] != world_size:
        raise ValueError(
            f"{operation} takes one part per rank: the first dimension must be "
            f"{world_size}, the shape is {shape}"
        )
