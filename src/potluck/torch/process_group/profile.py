"""An operation as torch's profiler shows it: from the call to its end, on another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Record:
    """One event named like ``potluck:all_reduce``, with the shapes of its tensors."""

    def __init__(self, name: str, tensors: Iterable[Tensor]) -> None:
        self.ended = threading.Event()
        self._event: Any = torch._C._profiler._RecordFunctionFast(name, list(tensors))
        self._event.__enter__()

    def end(self) -> None:
        """Any thread may call it; torch marks an event that ends elsewhere as asynchronous."""
        try:
            self._event.__exit__(None, None, None)
        finally:
            self.ended.set()
