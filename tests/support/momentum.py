"""What a parameter server's parameters must be after some updates, when these have momentum."""

from __future__ import annotations


def value_of_version(version: int) -> float:
    """A parameter that begins at 0, after ``version`` updates by ``SGD(1.0, momentum=0.5)`` with
    gradients of -1: each update adds 1, and half of what the update before added."""
    value = step = 0.0
    for _ in range(version):
        step = 1.0 + step / 2
        value += step
    return value
