"""Lines for people about what lasts or repeats: reminders of a long wait, complaints.

A reminder is a line on stderr after 3 s and then every 10 s. A wait in slices calls
``Reminder.tick`` between them. A call that blocks in other code runs inside ``reminding``, which
calls ``tick`` on a thread. A ``Complaint`` is a line about a failure, once until it is over."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass

from potluck._core.background import start_thread
from potluck._core.printable import plain

FIRST_S = 3.0
EVERY_S = 10.0


def to_stderr(text: str) -> None:
    """Write one line to stderr, with ``potluck`` in front."""
    with contextlib.suppress(OSError, ValueError):  # stderr is closed, here or by its reader
        print(f"potluck: {plain(text)}", file=sys.stderr, flush=True)


@dataclass(eq=False, repr=False)
class Reminder:
    """The reminders of one wait.

    ``describe()`` returns the text of a line: the missing ranks and what to check. It is called
    when a line is due; an empty text writes no line, for example because another process of this
    machine writes it. ``deadline`` is in the time of ``clock``; None: the wait has no deadline.
    """

    describe: Callable[[], str]
    deadline: float | None = None
    _: KW_ONLY
    say: Callable[[str], None] = to_stderr
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._due = self._began + FIRST_S

    def patience(self) -> float:
        """The seconds until a line is due or the deadline passes; at least 0."""
        until = self._due if self.deadline is None else min(self._due, self.deadline)
        return max(0.0, until - self.clock())

    @property
    def is_overdue(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and self.clock() >= self.deadline

    def tick(self) -> None:
        """Write a line if it is due."""
        now = self.clock()
        if now < self._due or self.is_overdue:
            return
        self._due = now + EVERY_S
        text = self.describe()
        if text:
            left = "" if self.deadline is None else f", {self.deadline - now:.0f} s left"
            self.say(f"{text} ({now - self._began:.0f} s so far{left})")


@contextlib.contextmanager
def reminding(reminder: Reminder) -> Iterator[None]:
    """Call ``tick`` of ``reminder`` on a thread while the body blocks.

    ``describe`` is called on that thread; if it raises, the error is logged and the lines end, not
    the wait.
    """
    over = threading.Event()

    def run() -> None:
        while not reminder.is_overdue and not over.wait(reminder.patience()):
            reminder.tick()

    thread = start_thread(run, name="potluck-reminder", on_broken=lambda _: None)
    try:
        yield
    finally:
        over.set()
        thread.join()


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
