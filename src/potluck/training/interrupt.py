"""Ctrl-C between two steps, so that all ranks can write a checkpoint before they end."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupt:
    """Within its ``with`` block the first SIGINT sets ``is_asked``; a second one raises
    KeyboardInterrupt, as ever. Where the script has a handler of its own, or on another thread than
    the main one, the block changes nothing. ``is_agreed``: all ranks are to end after this step."""

    def __init__(self) -> None:
        self.is_asked = False
        self.is_agreed = False
        self._is_set = False

    @property
    def is_due(self) -> bool:
        """Whether this rank begins no further step of a round."""
        return self.is_asked or self.is_agreed

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._asked)
            self._is_set = True

    def __exit__(self, *_: object) -> None:
        if self._is_set and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_set = False

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            signal.default_int_handler(number, frame)
        self.is_asked = True
