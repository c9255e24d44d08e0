"""Real runs of the command line, for tests: started, read line by line, waited for, ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from potluck._core.system import SIGKILL, need_posix

START_S = 150.0


def potluck_command() -> list[str]:
    """The command ``potluck`` of this interpreter's environment."""
    return [sys.executable, "-c", "from potluck.cli.main import app; app()"]


class Command:
    """A running command whose output can be waited for. Use it as a context manager: whatever is
    left of it at the end, its process group included, is killed, and what it wrote is printed when
    the test fails. With ``orders`` it reads lines (``order``); else its stdin is empty."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        orders: bool = False,
    ) -> None:
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._times: list[float] = []
        self._has_ended = False
        self.process = subprocess.Popen(
            list(arguments),
            cwd=cwd,
            env=os.environ | (env or {}),
            stdin=subprocess.PIPE if orders else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one pipe keeps the order in which lines were written
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._read, name="command-output")
        self._thread.start()

    @property
    def lines(self) -> list[str]:
        """All lines of stdout and stderr so far, in the order in which they were written."""
        with self._changed:
            return list(self._lines)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def mark(self) -> int:
        """How many lines came so far: ``since`` for what is looked for in later ones only."""
        with self._changed:
            return len(self._lines)

    def order(self, line: str) -> None:
        """Write a line to the command's stdin; it was started with ``orders``."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait_for(
        self, wanted: str | Callable[[str], bool], timeout_s: float = START_S, *, since: int = 0
    ) -> str:
        """The first line that contains ``wanted`` (or that it accepts); AssertionError if the
        output ends without one, or it does not come in time."""
        return self._find(wanted, timeout_s, since)[1]

    def when(
        self, wanted: str | Callable[[str], bool], timeout_s: float = START_S, *, since: int = 0
    ) -> float:
        """When the line that ``wait_for`` finds came, in seconds of ``time.monotonic``."""
        return self._find(wanted, timeout_s, since)[0]

    def lacks(
        self, unwanted: str | Callable[[str], bool], seconds: float, *, since: int = 0
    ) -> None:
        """For this long no such line comes, nor does the output end; AssertionError else."""
        deadline = time.monotonic() + seconds
        found = self._look(unwanted, since, deadline)
        if found is not None:
            raise AssertionError(f"{found[1]!r} came in:\n{self.text}")
        if self._has_ended:
            raise AssertionError(f"it ended:\n{self.text}")

    def _find(
        self, wanted: str | Callable[[str], bool], timeout_s: float, since: int
    ) -> tuple[float, str]:
        found = self._look(wanted, since, time.monotonic() + timeout_s)
        if found is None:
            raise AssertionError(f"no line {wanted!r} in:\n{self.text}")
        return found

    def _look(
        self, wanted: str | Callable[[str], bool], since: int, deadline: float
    ) -> tuple[float, str] | None:
        accepts = wanted if callable(wanted) else lambda line: wanted in line
        seen = since
        with self._changed:
            while True:
                for number in range(seen, len(self._lines)):
                    if accepts(self._lines[number]):
                        return self._times[number], self._lines[number]
                seen = max(seen, len(self._lines))
                left = deadline - time.monotonic()
                if self._has_ended or left <= 0:
                    return None
                self._changed.wait(left)

    def finish(self, timeout_s: float = START_S) -> int:
        """Wait for the end; the exit code. AssertionError if it does not end in time."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text}") from None
        self._thread.join(timeout_s)
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
            need_posix("testing commands")
            os.killpg(self.process.pid, SIGKILL)
            self.process.wait()
        self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if error is not None:
            print(self.text)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._times.append(time.monotonic())
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


def run_command(*arguments: str, **options: str) -> Command:
    """``potluck run ARGUMENTS``, started; ``options`` are environment variables."""
    return Command([*potluck_command(), "run", *arguments], env=options)


def process_ends(pid: int, timeout_s: float = 60.0) -> bool:
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


def comes_true(is_it: Callable[[], bool], timeout_s: float = 120.0) -> bool:
    """Wait until ``is_it()``; False after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not is_it():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
