"""What the workers of a job have started ends with their agent, however that ends.

A worker dies with its agent (``shim.py``), and an agent that lives kills what a worker left behind.
For an agent that is killed itself (SIGKILL, out of memory) a small process watches: this file as a
script of its own, with a pipe from the agent as its input. Each line names a process group that
begins (``+``) or has ended (``-``). At the end of the input it kills the groups that are left.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path


class Orphans:
    """Reports process groups of workers to the watching process, which runs while there are any."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._watching: subprocess.Popen[bytes] | None = None

    def begins(self, group: int) -> None:
        """A worker was started, which leads the process group ``group``."""
        assert group > 1, "no group of a child of this process"
        if self._watching is None:
            self._watching = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what ends the agent's session does not end it
            )
        self._groups.add(group)
        self._report(f"+{group}\n")

    def ended(self, group: int) -> None:
        """The group was killed, and its number may soon be another's."""
        self._groups.discard(group)
        self._report(f"-{group}\n")
        if not self._groups and self._watching is not None:
            self._watching.communicate()  # it ends with its input
            self._watching = None

    def _report(self, line: str) -> None:
        if self._watching is not None:
            assert self._watching.stdin is not None
            with contextlib.suppress(OSError):  # somebody has killed it
                os.write(self._watching.stdin.fileno(), line.encode())


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            if sys.platform != "win32":  # which runs no workers
                os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
