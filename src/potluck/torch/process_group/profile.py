"""An operation as torch's profiler shows it: from the call to its end, on another thread."""

from __future__ import annotations

import threading

import torch
from torch.autograd.profiler import record_function


class ProfileRecord:
    """One asynchronous event named like ``potluck:all_reduce``.

    It shows no shapes: torch lets only C++ code record both those and an end on another thread.
    """

    def __init__(self, name: str) -> None:
        self.ended = threading.Event()
        self._end: torch.futures.Future[None] = torch.futures.Future()
        with record_function(name) as event:
            event._call_end_callbacks_on_future(self._end)

    def end(self) -> None:
        """Any thread may call it."""
        try:
            self._end.set_result(None)
        finally:
            self.ended.set()
