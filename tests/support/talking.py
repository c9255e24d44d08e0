"""A process that says JSON objects line by line, and waits for a line where its test decides."""

from __future__ import annotations

import json
import subprocess
from typing import Any


class TalkingProcess:
    """Wraps a process that was started with its stdin and stdout as text pipes."""

    def __init__(self, process: subprocess.Popen[str], *, timeout_s: float) -> None:
        """``timeout_s``: how long the end of a process that says no more may take."""
        self.process = process
        self._timeout_s = timeout_s

    def hears(self) -> dict[str, Any]:
        """The next object; AssertionError, with the code and stderr, if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            errors = self.process.communicate(timeout=self._timeout_s)[1]
            raise AssertionError(f"it ended with {self.process.returncode}: {errors or ''}")
        said: dict[str, Any] = json.loads(line)
        return said

    def go(self) -> None:
        """Let the process go on that waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill the process, if it runs, and close its pipes."""
        self.process.kill()
        self.process.communicate(timeout=self._timeout_s)
