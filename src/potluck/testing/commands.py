"""Real runs of the command line, for tests: started, read line by line, waited for, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

START_S = 60.0


def potluck_command() -> list[str]:
    """The command ``potluck`` of this interpreter's environment."""
    return [sys.executable, "-c", "from potluck.cli.main import app; app()"]


class Command:
    """A running command whose output can be waited for. Use it as a context manager: whatever is
    left of it at the end, its process group included, is killed."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._num_open = 2
        self.process = subprocess.Popen(
            list(arguments),
            cwd=cwd,
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read, args=(pipe,), name="command-output")
            for pipe in (self.process.stdout, self.process.stderr)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lines(self) -> list[str]:
        """All lines of stdout and stderr so far, in the order they came."""
        with self._changed:
            return list(self._lines)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, wanted: str | Callable[[str], bool], timeout_s: float = START_S) -> str:
        """The first line that contains ``wanted`` (or that it accepts); AssertionError if the
        output ends without one, or it does not come in time."""
        accepts = wanted if callable(wanted) else lambda line: wanted in line
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._changed:
            while True:
                for line in self._lines[seen:]:
                    if accepts(line):
                        return line
                seen = len(self._lines)
                left = deadline - time.monotonic()
                if not self._num_open or left <= 0:
                    raise AssertionError(f"no line {wanted!r} in:\n" + "\n".join(self._lines))
                self._changed.wait(left)

    def finish(self, timeout_s: float = START_S) -> int:
        """Wait for the end; the exit code. AssertionError if it does not end in time."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text}") from None
        for thread in self._threads:
            thread.join(timeout_s)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the command alone, as ``kill`` would."""
        self.process.send_signal(number)

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()


def run_command(*arguments: str, **options: str) -> Command:
    """``potluck run ARGUMENTS``, started; ``options`` are environment variables."""
    return Command([*potluck_command(), "run", *arguments], env=options)


def process_ends(pid: int, timeout_s: float = 10.0) -> bool:
    """Wait until no process ``pid`` runs any more (a zombie does not run)."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.01)
    return False
