"""``breakpoint()`` in a worker of a cluster, which has no terminal: pdb, whose output is the
worker's own, and which reads what is typed at ``potluck attach --rank``.

The agent names this module in PYTHONBREAKPOINT, and gives the worker a pipe for lines that are
typed (``cluster/jobs/process.py``). EOT (Ctrl-D) is the end of a terminal's input: the script goes
on. The worker's link tells the agent of an open prompt (``agent_link.py``), and the other ranks
wait.
"""

from __future__ import annotations

import os
import pdb
import selectors
import sys
import threading
from pathlib import Path
from typing import IO, Any, cast

from potluck._core.engine import patience
from potluck._core.waiting import to_stderr
from potluck._core.wire.worker_link import EOT, TYPED

_READ = 4096

_here = threading.local()


def stop() -> None:
    """Stop at the caller's line, and wait there for what is typed."""
    frame = sys._getframe(1)
    if (before := getattr(_here, "prompt", None)) is not None:
        before.end()  # the script went on to a breakpoint that was set there
    where = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    try:
        fd, inode, pid = map(int, os.environ.get(TYPED, "").split(":"))
        if os.fstat(fd).st_ino != inode or os.getpid() != pid:
            raise ValueError
    except (OSError, ValueError):
        to_stderr(f"breakpoint() at {where} is passed over: no agent started this process")
        return
    with selectors.DefaultSelector() as ready:
        ready.register(fd, selectors.EVENT_READ)
        while ready.select(0) and os.read(fd, _READ):
            pass  # typed before, at no prompt
    to_stderr(
        f"at a breakpoint ({where}), and the other ranks wait. On the machine that started the "
        f"job, or on this one: potluck attach {os.environ.get('POTLUCK_JOB')} --rank N, which is "
        "the number in front of this line"
    )
    _here.prompt = _Prompt(fd, where)
    _here.prompt.set_trace(frame)


class _Typed:
    """The lines that come through the pipe ``fd``, up to EOT: none behind it, nor what has no line
    end before it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._read = b""
        self._is_over = False

    def readline(self) -> str:
        """The next line; empty at the end, and from then on."""
        while b"\n" not in self._read and not self._is_over:
            text, eot, _ = (read := os.read(self._fd, _READ)).partition(EOT)
            self._read += text
            self._is_over = bool(eot) or not read
        line, newline, self._read = self._read.partition(b"\n")
        return f"{line.decode(errors='replace')}\n" if newline else ""

    def end(self) -> None:
        """Read nothing more."""
        self._read, self._is_over = b"", True


class _Prompt(pdb.Pdb):
    """It ends when the script goes on with no breakpoint that was set here, or is ended."""

    def __init__(self, fd: int, where: str) -> None:
        self._where = where
        self._pid = os.getpid()
        self._typed = _Typed(fd)
        stdin = cast(IO[str], self._typed)
        super().__init__(stdin=stdin, stdout=sys.__stdout__, nosigint=True, readrc=False)
        self.prompt = f"{self.prompt.strip()}\n"  # what has no end is not shown at once

    def handle_command_def(self, line: str) -> bool:
        """In the list of ``commands``, which the end of what is typed ends, too."""
        return line == "EOF" or super().handle_command_def(line)

    def do_EOF(self, arg: str) -> Any:
        self.clear_all_breaks()
        return self.do_continue(arg)

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self.end()

    def set_quit(self) -> None:
        super().set_quit()
        self.end()

    def _cmdloop(self) -> None:
        """In place of pdb's, which keeps a KeyboardInterrupt from the script. Only as long as this
        reads do the other ranks wait: the script may never come to a breakpoint that was set."""
        if os.getpid() != self._pid:  # forked, with the breakpoints, and nobody waits for it
            self.do_EOF("")
            return
        patience.prompts.append(self._where)
        try:
            self.cmdloop()
        except BaseException:
            self.end()
            raise
        finally:
            patience.prompts.remove(self._where)

    def end(self) -> None:
        """Read nothing more. Idempotent."""
        self._typed.end()
