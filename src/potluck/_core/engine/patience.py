"""A hold on deadlines: no operation of this process is overdue before a moment.

While a worker of a job sits at a breakpoint, the other ranks wait for it longer than their timeouts
allow. Their agents renew the hold every few seconds. The twin of native/core/patience.hpp.
"""

from __future__ import annotations

from collections.abc import Callable

from potluck._core import native

prompts: list[str] = []
"""Where this process sits at prompts of a debugger now: places in its script."""
has_client: Callable[[], bool] = bool
"""Whether a client of debugpy is connected, by which the script may be stopped at any moment."""

_until = 0.0


def place() -> str:
    """Where a debugger holds this process, or may; empty if none does."""
    return prompts[-1] if prompts else "under debugpy" * has_client()


def hold(until: float) -> None:
    """Let no operation be overdue before ``until``, in seconds of ``time.monotonic()``."""
    global _until
    _until = max(_until, until)
    if native.available:
        native.core.hold_deadlines(_until)


def held_until() -> float:
    """Until when no operation is overdue; 0 if none was ever held."""
    return _until
