"""In-process links that dawdle: ranks drift apart, and races show that a quiet machine hides. They
are those of the Python loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from potluck._core.transport.inproc import InprocLink

SHARE = 0.02
"""Of all calls, how many wait."""
LONGEST_S = 0.01


def dawdle(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """From now on any call of a link may wait a little. The same seed draws the same waits; which
    call gets which is up to the threads."""
    draw = random.Random(seed)

    def slow(method: Callable[..., int]) -> Callable[..., int]:
        def call(link: InprocLink, *arguments: Any) -> int:
            if draw.random() < SHARE:
                time.sleep(draw.random() * LONGEST_S)
            return method(link, *arguments)

        return call

    for name in ("send", "recv_into"):
        monkeypatch.setattr(InprocLink, name, slow(getattr(InprocLink, name)))
