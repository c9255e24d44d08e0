"""Checks of the ranks, tags, numbers, durations and shapes that a caller passes."""

from __future__ import annotations

import operator
from datetime import timedelta
from typing import Any

Duration = float | timedelta
"""Seconds, or a timedelta."""


def checked_rank(name: str, rank: Any, world_size: int) -> int:
    """The rank in the argument ``name``; TypeError unless it is an integer."""
    try:
        return operator.index(rank)
    except TypeError:
        raise TypeError(
            f"{name} is a rank, an integer from 0 to {world_size - 1}, not {rank!r}"
        ) from None


def check_within(name: str, rank: int, world_size: int) -> None:
    """ValueError unless the rank in the argument ``name`` is one of ``world_size``."""
    if not 0 <= rank < world_size:
        raise ValueError(f"{name} {rank} is outside a world of {world_size}")


def check_peer(peer: int, rank: int, world_size: int) -> None:
    """ValueError unless ``rank`` can send a message to ``peer``."""
    check_within("rank", peer, world_size)
    if peer == rank:
        raise ValueError(f"rank {peer} is this rank; a message to oneself needs no network")


def checked_tag(tag: Any) -> int:
    """The tag of a message; ValueError unless it is an integer from 0 to 2**31 - 1."""
    try:
        number = operator.index(tag)
    except TypeError:
        number = -1
    if not 0 <= number < 2**31:
        raise ValueError(f"a tag is an integer from 0 to 2**31 - 1, not {tag!r}")
    return number


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


def checked_seconds(timeout: Any, name: str = "timeout", *, at_least: float | None = None) -> float:
    """The duration in the argument ``name`` as a number of seconds.

    It is a number, or a ``timedelta`` (also NumPy's and pandas'). TypeError for anything else;
    ValueError unless it is above 0, or ``at_least`` that; NaN never is. inf is no limit.
    """
    try:
        if isinstance(timeout, str | bytes | bool):
            raise TypeError
        if type(timeout).__name__ == "timedelta64":  # NumPy's, which is not imported here
            timeout = timeout.astype("timedelta64[us]").item()
        is_duration = isinstance(timeout, timedelta)
        seconds = timeout.total_seconds() if is_duration else float(timeout)
    except (TypeError, ValueError, AttributeError):
        raise TypeError(f"{name} is a number of seconds, not {timeout!r:.100}") from None
    if not (seconds > 0 if at_least is None else seconds >= at_least):
        bound = "above 0" if at_least is None else f"at least {at_least:g}"
        raise ValueError(f"{name} is in seconds and must be {bound}, not {timeout!r}")
    return seconds


def check_parts(operation: str, shape: tuple[int, ...], world_size: int) -> None:
    """ValueError unless there is one part for each rank."""
    if not shape or shape[0] != world_size:
        raise ValueError(
            f"{operation} takes one part per rank: the first dimension must be "
            f"{world_size}, the shape is {shape}"
        )
