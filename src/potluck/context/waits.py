"""How long a rank has been blocked in calls."""

from __future__ import annotations


class Waits:
    """Adds up how long calls have blocked."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
