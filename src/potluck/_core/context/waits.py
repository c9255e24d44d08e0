"""The time for which a rank was blocked in calls."""

from __future__ import annotations


class Waits:
    """The sum of the seconds for which calls have blocked."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
