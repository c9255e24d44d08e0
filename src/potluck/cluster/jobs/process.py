"""Real worker processes: started, watched, signalled, ended, and nothing of them left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from potluck.background import start_thread
from potluck.cluster.jobs.output import PipeReader
from potluck.errors import ConfigurationError
from potluck.system import SIGKILL, need_posix, wait_for_exit

_SHIM = Path(__file__).with_name("shim.py")
_LAST_WORDS_S = 1.0

Sink = Callable[[str, str], None]
"""``sink(stream, line)``; ``stream`` is ``stdout`` or ``stderr``."""


class WorkerProcess:
    """One worker, in a session (and so a process group) of its own.

    Must be made on the main thread of the agent: the worker dies with the thread that started it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        sink: Sink,
        is_behind: Callable[[], bool],
        on_exit: Callable[[int], None],
        directory: Path | None = None,
    ) -> None:
        """``on_exit(code)`` is called in the event loop, the moment the process has ended. As long
        as ``is_behind()``, its output is not read: it waits like any program with a full pipe."""
        assert threading.current_thread() is threading.main_thread()
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._is_behind = is_behind
        shim = [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid())]
        try:
            self._popen = subprocess.Popen(
                [*shim, *command],
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            hint = ""
            if error.errno in (errno.EMFILE, errno.ENFILE):
                hint = "; start fewer workers here, or allow more open files: ulimit -n 4096"
            raise ConfigurationError(f"can't start {command[0]}: {error}{hint}") from error
        self.pid = self._popen.pid
        self._readers = []
        for stream, pipe in (("stdout", self._popen.stdout), ("stderr", self._popen.stderr)):
            assert pipe is not None

            def take(line: str, stream: str = stream) -> None:
                sink(stream, line)

            self._readers.append(PipeReader(pipe.fileno(), self._loop, take, is_behind))
        self._exited = asyncio.Event()
        self._is_reaped = False
        self._watch()

    def signal(self, number: int) -> None:
        """Send ``number`` to the worker and all processes it started."""
        need_posix("a worker process")
        if not self._is_reaped:  # until then its number belongs to nobody else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def release(self) -> None:
        """After the exit: read its last words, give the pipes back."""
        await self._exited.wait()
        for reader in self._readers:
            while not reader.ended.is_set():
                try:
                    async with asyncio.timeout(_LAST_WORDS_S):
                        await reader.ended.wait()
                except TimeoutError:
                    if not self._is_behind():
                        break  # somebody it started, in a session of its own, keeps the pipe open
        for reader in self._readers:
            reader.close()
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()

    # The exit.

    def _watch(self) -> None:
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(self.pid)
                self._loop.add_reader(descriptor, self._reap, descriptor)
                return
        start_thread(self._wait, name=f"potluck-wait-{self.pid}", on_broken=self._not_watched)

    def _wait(self) -> None:
        """Where the system has no descriptor for a process: a thread that waits."""
        wait_for_exit(self.pid)
        self._loop.call_soon_threadsafe(self._reap, -1)

    def _not_watched(self, error: BaseException) -> None:
        """Nobody would see its end: it ends now. The loop may have been closed, with the job."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.signal, SIGKILL)
            self._loop.call_soon_threadsafe(self._reap, -1)

    def _reap(self, descriptor: int) -> None:
        if descriptor >= 0:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self.signal(SIGKILL)  # what it started ends with it
        self._is_reaped = True
        code = self._popen.wait()
        self._exited.set()
        self._on_exit(code)
