"""What a thread changes on disk, by Python's audit events."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_watched: tuple[int, str, list[str]] | None = None
_has_hook = False


@contextlib.contextmanager
def changes_by_this_thread(folder: Path) -> Iterator[list[str]]:
    """What this thread changes below ``folder`` in the block: event and path. An open file that is
    written to is seen when it is opened."""
    global _watched, _has_hook
    assert _watched is None
    if not _has_hook:
        sys.addaudithook(_hook)  # for ever: there is no way to take a hook away
        _has_hook = True
    seen: list[str] = []
    _watched = (threading.get_ident(), str(folder), seen)
    try:
        yield seen
    finally:
        _watched = None


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _watched is None or (event != "open" and event not in _CHANGES):
        return
    thread, folder, seen = _watched
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    if threading.get_ident() == thread and str(arguments[0]).startswith(folder):
        seen.append(f"{event} {arguments[0]}")
