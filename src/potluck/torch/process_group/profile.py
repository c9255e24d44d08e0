"""Events for torch's profiler, from the call of an operation to its end on another thread."""

from __future__ import annotations

import threading

import torch
from torch.autograd.profiler import record_function


class ProfileRecord:
    """An asynchronous event of the profiler, with a name like ``potluck:all_reduce``.

    Without shapes: torch lets only C++ code record shapes for an event that ends on another thread.
    """

    def __init__(self, name: str) -> None:
        self.ended = threading.Event()
        self._end: torch.futures.Future[None] = torch.futures.Future()
        with record_function(name) as event:
            event._call_end_callbacks_on_future(self._end)

    def end(self) -> None:
        """End the event, on any thread."""
        try:
            self._end.set_result(None)
        finally:
            self.ended.set()
