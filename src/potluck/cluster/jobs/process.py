"""Real worker processes: started, watched, signalled, ended, and nothing of them left behind.

``launcher_of`` says how: which command, in which directory, with which environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from potluck.background import start_thread
from potluck.cluster.jobs.output import PipeReader
from potluck.errors import ConfigurationError
from potluck.settings import Settings
from potluck.system import SIGKILL, need_posix, usable_cpus, wait_for_exit
from potluck.wire.jobs import JobSpec

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
        if not self._is_reaped:  # from then on its process id may be another process's
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
                        break  # a process that it started, in another session, holds the pipe open
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
        """The thread that waits for the process broke: its end would not be noticed, so it is
        killed now. The loop may have been closed, with the job."""
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


Launch = Callable[[str, dict[str, str], Callable[[int], None]], WorkerProcess]
"""``launch(worker, variables, on_exit)``; ConfigurationError if the worker can't be started."""


def launcher_of(
    settings: Settings,
    spec: JobSpec,
    folder: Path | None,
    *,
    is_starter: bool,
    sink: Callable[[str, str, str], None],
    is_behind: Callable[[], bool],
) -> Launch:
    """Starts the workers of ``spec`` on one node, from ``folder``. ``sink(worker, stream, line)``
    gets their output.

    They run in that folder; on the machine where ``potluck run`` was called they run in that
    directory, so that what they write is found there. A local job, which has no ``folder``, runs as
    if the script had been started by hand there.
    """
    script, directory = spec.script, Path(spec.directory)
    if folder is not None:
        script = str(folder / spec.script)
        if not (is_starter and directory.is_dir()):
            directory = folder / spec.below
    given = {name: value for name, value in os.environ.items() if value}
    environment = os.environ | {
        "POTLUCK_HOME": str(settings.home.absolute()),
        "POTLUCK_PEER_TIMEOUT_S": repr(spec.peer_timeout_s),
        "PYTHONUNBUFFERED": given.get("PYTHONUNBUFFERED", "1"),
        "OMP_NUM_THREADS": given.get(
            "OMP_NUM_THREADS", str(max(1, len(usable_cpus()) // spec.per_node))
        ),
    }

    def launch(
        worker: str, variables: dict[str, str], on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        return WorkerProcess(
            [sys.executable, script, *spec.arguments],
            environment | variables,
            sink=partial(sink, worker),
            is_behind=is_behind,
            on_exit=on_exit,
            directory=directory,
        )

    return launch


def free_port() -> int:
    """A port for scripts that use torch.distributed by themselves; potluck does not use it."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port
