"""The caller's side of calls that wait on the server (``waits.py``), and of their errors.

A method that waits replies after a second at most: ``{"waits_for": TEXT}`` if there is nothing yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from potluck._core.waiting import Reminder
from potluck.errors import HandlerError, ServiceTimeout

SLICE_S = 1.0
"""A call that waits is made again so often, to see whether the group has changed."""

_MISTAKES: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


def raise_local(error: HandlerError, kinds: Mapping[str, type[Exception]] = _MISTAKES) -> NoReturn:
    """Raise a mistake of the script as if it had been found here, and ``error`` itself for all
    else. ``kinds``: the types of mistakes, by name."""
    kind = kinds.get(error.type)
    if kind is None:
        raise error
    raise kind(error.text) from error


def await_reply(
    ask: Callable[[float], Any],
    what: str,
    timeout_s: float | None,
    between: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The reply of ``ask(wait_s)`` that has no ``waits_for``; ``between()`` is called before each.

    ServiceTimeout, which says what was waited for, after ``timeout_s`` seconds if that is given.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waits_for = "the server"
    reminder = Reminder(lambda: f"{what}: waiting for {waits_for}", deadline)
    while True:
        between()
        left = SLICE_S if deadline is None else deadline - time.monotonic()
        reply: dict[str, Any] = ask(min(SLICE_S, max(0.0, left)))
        if "waits_for" not in reply:
            return reply
        waits_for = str(reply["waits_for"])
        if left <= 0:
            raise ServiceTimeout(
                f"{what} did not come within {timeout_s:g} s: it waits for {waits_for}"
            )
        reminder.tick()
