"""``Complaint``: a line about what goes wrong again and again, once."""

from __future__ import annotations

from collections.abc import Callable


class Complaint:
    """Passes a text on to ``say`` unless it is the text of the last call; ``over`` forgets that."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = ""

    def __call__(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._say(text)

    def over(self) -> None:
        """It goes well again: the next text is said, whatever it is."""
        self._last = ""
