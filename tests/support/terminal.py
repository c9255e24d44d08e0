"""``Terminal``: a command on a terminal of its own, as a person would see and type it."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path

from support.quiet_imports import STACKS

assert sys.platform != "win32"  # which has no such terminals

DEADLINE_S = 200.0


def take_terminal() -> None:
    """As ``preexec_fn`` of a process with a session of its own: the terminal at its stdin becomes
    that of the session. ``forked.Popen`` knows it by name."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command on a terminal of its own, 100 columns wide. All that it draws is kept."""

    def __init__(self, *command: str) -> None:
        self.drawn = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._master, slave = pty.openpty()
        self._stacks = tempfile.NamedTemporaryFile("r", prefix="stacks-")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ
            | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40", STACKS: self._stacks.name},
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)

    @property
    def text(self) -> str:
        """What was drawn, without its colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.drawn)

    def read_until(self, wanted: Callable[[str], bool]) -> None:
        """Until ``wanted`` accepts what was drawn, or the command ends."""
        deadline = time.monotonic() + DEADLINE_S
        while not wanted(self.drawn):
            assert time.monotonic() < deadline, (
                f"{DEADLINE_S:g} s have passed; drawn so far:\n{self.drawn[-3000:]}"
            )
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:  # Linux: nobody holds the other side any more
                return
            if not data:
                return
            self.drawn += self._decode(data)

    def type(self, text: str) -> None:
        """A person types ``text``."""
        os.write(self._master, text.encode())

    def finish(self) -> int:
        self.read_until(lambda drawn: False)
        return self.wait()

    def wait(self) -> int:
        """The exit code; AssertionError with the stacks of its threads if it does not end."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            self.process.send_signal(signal.SIGUSR2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
            raise AssertionError(f"it does not end:\n{status}\n{self._stacks.read()}") from None

    def hang_up(self) -> None:
        """The terminal is closed: the kernel sends SIGHUP to its session."""
        os.close(self._master)
        self._master = -1

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self._master >= 0:
            os.close(self._master)
        self._stacks.close()
