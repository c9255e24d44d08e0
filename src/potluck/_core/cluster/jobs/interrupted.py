"""Tracebacks of workers that were interrupted, as one line each. Pure.

Ctrl-C ends every worker by KeyboardInterrupt, wherever it is: the traceback, of 20 lines and more
for each worker, says nothing that the user does not know.
"""

from __future__ import annotations

import re

_BEGIN = "Traceback (most recent call last):"
_PLACE = re.compile(r'\s*File "(?:.*/)?([^"/]+)", line (\d+)')
_ENDS = re.compile(r"KeyboardInterrupt\b|potluck\.errors\.(PeerLost|RemoteError|AgentLost)\b")
_MOST = 1000


class InterruptedTraceback:
    """Lines in, lines out, from the interrupt on."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def feed(self, line: str) -> list[str]:
        """The lines that are to be shown now. A traceback is held back until it ends."""
        if self._held:
            self._held.append(line)
            if (line.startswith(" ") or not line) and len(self._held) < _MOST:
                return []
            held, self._held = self._held, []
            return [_in_short(held)] if _ENDS.match(line) else held
        if line.rstrip() == _BEGIN:
            self._held.append(line)
            return []
        return [line]

    def finish(self) -> list[str]:
        """What is held back, at the end of the output."""
        held, self._held = self._held, []
        return held


def _in_short(lines: list[str]) -> str:
    """The error of a traceback, and where the script was."""
    place = next(filter(None, map(_PLACE.match, lines)), None)
    where = f" ({place[1]}, line {place[2]})" if place is not None else ""
    return f"{lines[-1].removeprefix('potluck.errors.')}{where}"
