"""What came of each test of somebody else's suite."""

from __future__ import annotations

import sys
import time
import unittest
from typing import Any


class Recorder(unittest.TestResult):
    """Keeps one line for each test, under its whole name: its outcome, its seconds, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, dict[str, Any]] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "pass", "")

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        self._note(test, "fail", str(error[1]))

    addError = addFailure

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skip", reason)

    def addExpectedFailure(self, test: unittest.TestCase, error: Any) -> None:
        self._note(test, "pass", "")

    def _note(self, test: unittest.TestCase, outcome: str, reason: str) -> None:
        name = test.id()
        seconds = round(time.monotonic() - self._started, 2)
        self.outcomes[name] = {"outcome": outcome, "seconds": seconds, "reason": reason}
        if outcome != "skip":
            print(f"{outcome:4} {seconds:6.2f} s  {name}", file=sys.stderr, flush=True)
