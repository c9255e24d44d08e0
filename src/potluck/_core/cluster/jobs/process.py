"""Worker processes: started, watched, signalled, their output read line by line, ended, and
nothing of them left behind.

``launcher_of`` chooses the command, the directory and the environment."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from signal import SIGINT

import msgspec
import psutil

from potluck._core.background import start_thread
from potluck._core.cluster.code_store.job_folders import JobFolder
from potluck._core.cluster.environments.making import Environment
from potluck._core.cluster.jobs.environment import accepted, all_but_secrets, passed_on
from potluck._core.cluster.jobs.orphans import Orphans
from potluck._core.cluster.jobs.shim import GIVEN
from potluck._core.cluster.sharing.confinement import Confinement
from potluck._core.cluster.sharing.sandbox import Sandbox
from potluck._core.settings import Settings
from potluck._core.system import SIGKILL, has_terminal, need_posix, wait_for_exit
from potluck._core.wire.jobs import DebugRequest, End, JobSpec
from potluck._core.wire.worker_link import EOT, TYPED
from potluck.errors import ConfigurationError, LinkError

_DEBUGGED = "potluck._core.backends.debugged"
_STOP = "potluck._core.backends.debugger.stop"
_SHIM = Path(__file__).with_name("shim.py")
_LAST_WORDS_S = 1.0
LEASE_S = 15.0
"""How long the debugger of a worker may be silent."""

MAX_LINE = 64 * 1024
_READ = 64 * 1024
_MAX_PIPE = 1 << 20
"""The most bytes that Linux lets a pipe hold, by /proc/sys/fs/pipe-max-size."""
_PAUSE_S = 0.05
_MAX_TYPED = 64 * 1024
"""Bytes typed at a debugger that wait for a full pipe."""
_OPEN_S = 0.25
"""How often a line that is not ended yet is shown."""

Sink = Callable[[str, str, End], None]
"""``sink(stream, line, end)``; ``stream`` is ``stdout`` or ``stderr``."""


def _shim(limits: Mapping[str, object], sandbox: Sequence[str] | None) -> list[str]:
    """What to put before a command that runs under ``limits``, in ``sandbox`` if there is one."""
    orders = msgspec.json.encode(dict(limits) | {"sandbox": sandbox}).decode()
    return [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), orders]


def build_prefix(
    home: Path, confinement: Confinement, folder: Path, readable: Sequence[Path]
) -> list[str]:
    """What to put before a command that builds a package in ``folder``, and can read the
    ``readable`` files: the sandbox, and the limits of workers. Without such limits each process has
    half of the machine's memory. No network. ConfigurationError as for ``Sandbox``."""
    memory = confinement.limits.memory_bytes or psutil.virtual_memory().total // 2
    sandbox = Sandbox(home, (), ()).command([folder], folder, folder, memory, readable)
    return _shim({"data": memory, **confinement.orders(1)}, sandbox)


class WorkerProcess:
    """One worker, in a session (and so a process group) of its own.

    Must be made on the main thread of the agent: the worker dies with the thread that started it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        limits: Mapping[str, object],
        sandbox: Sequence[str] | None = None,
        sink: Sink,
        is_behind: Callable[[], bool],
        on_exit: Callable[[int], None],
        orphans: Orphans,
        directory: Path | None = None,
        has_terminal: bool = False,
    ) -> None:
        """``limits`` are for ``shim.py``, ``sandbox`` is a command to run the worker in. If it
        ``has_terminal``, it reads what is typed at the agent's, and its prompts are shown.
        ``on_exit(code)`` is called in the event loop, the moment
        the process has ended. As long as ``is_behind()``, its output is not read: it waits like any
        program with a full pipe."""
        assert threading.current_thread() is threading.main_thread()
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._on_exit = on_exit
        self._is_behind = is_behind
        self._interrupted: InterruptedTraceback | None = None
        self.is_sandboxed = sandbox is not None
        shim = _shim(limits, sandbox)
        typed = self._typed = -1
        self._waiting = b""
        try:
            typed, self._typed = os.pipe()
            if sys.platform != "win32":
                os.set_blocking(self._typed, False)
            pipe_name = f"{typed}:{os.fstat(typed).st_ino}"
            self._popen = subprocess.Popen(
                [*shim, *command],
                env=dict(environment) | {TYPED: pipe_name},
                cwd=directory,
                stdin=None if has_terminal else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(typed,),
            )
        except OSError as error:
            if self._typed >= 0:
                os.close(self._typed)
            hint = ""
            if error.errno in (errno.EMFILE, errno.ENFILE):
                hint = "; start fewer workers here, or allow more open files: ulimit -n 4096"
            raise ConfigurationError(f"can't start {command[0]}: {error}{hint}") from error
        finally:
            if typed >= 0:
                os.close(typed)
        self.pid = self._popen.pid
        self._orphans = orphans
        orphans.begins(self.pid)
        self._readers = []
        for stream, pipe in (("stdout", self._popen.stdout), ("stderr", self._popen.stderr)):
            assert pipe is not None

            reader = PipeReader(
                pipe.fileno(),
                self._loop,
                partial(self._line, stream),
                is_behind,
                shows_prompts=has_terminal,
            )
            self._readers.append(reader)
        self._exited = asyncio.Event()
        self._is_reaped = False
        self._watch()

    def signal(self, number: int) -> None:
        """Send ``number`` to the worker and all processes it started."""
        need_posix("a worker process")
        if number == SIGINT and self._interrupted is None:
            self._interrupted = InterruptedTraceback()
        if not self._is_reaped:  # from then on its process id may be another process's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def type(self, text: bytes) -> None:
        """Give ``text`` to the prompt of the worker's debugger (``backends/debugger.py``). What a
        full pipe does not take waits; LinkError if that is too much."""
        if self.has_ended or not text:
            return
        if len(self._waiting) > _MAX_TYPED and text != EOT:
            raise LinkError("the rank reads nothing of what is typed; it is at no prompt now")
        if not self._waiting:
            self._loop.add_writer(self._typed, self._write)
        self._waiting += text

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                self._waiting = self._waiting[os.write(self._typed, self._waiting) :]
            except BrokenPipeError:
                self._waiting = b""  # the script has closed it, or ends
        if not self._waiting:
            self._loop.remove_writer(self._typed)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._is_reaped

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
            reader.read_rest()
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()
        if self._interrupted is not None:
            for line in self._interrupted.finish():
                self._sink("stderr", line, "\n")

    def _line(self, stream: str, text: str, end: End) -> None:
        if self._interrupted is None or stream != "stderr" or end != "\n":
            self._sink(stream, text, end)
            return
        for line in self._interrupted.feed(text):
            self._sink(stream, line, end)

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
        self._loop.remove_writer(self._typed)
        os.close(self._typed)
        self._orphans.ended(self.pid)
        code = self._popen.wait()
        if self.is_sandboxed and code > 128:
            code = 128 - code  # bubblewrap's word for a script that was killed by a signal
        self._exited.set()
        self._on_exit(code)


class LineSplitter:
    """Bytes in, lines out. As on a terminal a line shows what was written after its last carriage
    return, so all states of a progress bar are one line. ``MAX_LINE`` ends a line as well. Bytes
    that are not UTF-8 become U+FFFD. ``is_progress``: a carriage return was written since the last
    line end."""

    def __init__(self) -> None:
        self.is_progress = False
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are whole now, without their ends."""
        # Bars below each other: to a bar further down and back up.
        data = (self._rest + data).replace(_UP + b"\n", b"\r")
        *lines, last = data.split(b"\n")
        self._rest = _newest(last) + (b"\r" if last.endswith(b"\r") else b"")
        whole = [piece for line in lines for piece in _pieces(_shown(line))]
        while len(self._rest) > MAX_LINE:
            whole += _pieces(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        self.is_progress = bool(self._rest) and (b"\r" in last or (self.is_progress and not lines))
        return whole

    @property
    def open(self) -> str:
        """The line that is not ended yet, as it is shown now."""
        return _shown(self._rest).decode(errors="replace")

    def finish(self) -> list[str]:
        """What is left after the last line end."""
        rest, self._rest = _shown(self._rest), b""
        return _pieces(rest) if rest.strip() else []


_UP = b"\x1b[A"
"""The cursor goes a line up."""


def _newest(line: bytes) -> bytes:
    """What was written to ``line`` after its last carriage return."""
    return next(filter(None, reversed(line.split(b"\r"))), b"")


def _shown(line: bytes) -> bytes:
    """What a terminal shows of ``line`` in the end."""
    return _newest(line).removesuffix(_UP)


def _pieces(line: bytes) -> list[str]:
    """A line cut to the permitted length."""
    starts = range(0, max(len(line), 1), MAX_LINE)
    return [line[start : start + MAX_LINE].decode(errors="replace") for start in starts]


@dataclass(eq=False, repr=False)
class PipeReader:
    """Reads one pipe of a worker into ``sink(line, end)``, line by line, from the event loop.

    While ``is_behind()``, nothing is read. With ``shows_prompts`` a line that is not ended
    goes to the sink after a moment.
    """

    descriptor: int
    loop: asyncio.AbstractEventLoop
    sink: Callable[[str, End], None]
    is_behind: Callable[[], bool]
    _: KW_ONLY
    shows_prompts: bool = False

    def __post_init__(self) -> None:
        self._pause: asyncio.TimerHandle | None = None
        self._open: asyncio.TimerHandle | None = None
        self._splitter = LineSplitter()
        self.ended = asyncio.Event()
        need_posix("reading the output of workers")
        os.set_blocking(self.descriptor, False)
        self._resume()

    def _resume(self) -> None:
        self._pause = None
        self.loop.add_reader(self.descriptor, self._read)

    def _read(self) -> None:
        if self.is_behind():
            self.loop.remove_reader(self.descriptor)
            self._pause = self.loop.call_later(_PAUSE_S, self._resume)
            return
        if not self._take():
            return
        if self._open is None and (self._splitter.is_progress or self.shows_prompts):
            self._open = self.loop.call_later(_OPEN_S, self._show_open)

    def _take(self) -> bool:
        """Take from the pipe what one read gives; False if it is empty, or has ended."""
        try:
            data = os.read(self.descriptor, _READ)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        for line in self._splitter.feed(data):
            self.sink(line, "\n")
        return True

    def read_rest(self) -> None:
        """Read what the pipe holds now, though it may have been paused, and stop reading."""
        for _ in range(_MAX_PIPE // _READ):  # another process may write as fast as this one reads
            if self.ended.is_set() or not self._take():
                break
        self.close()

    def _show_open(self) -> None:
        self._open = None
        if not (text := self._splitter.open):
            return
        if self._splitter.is_progress:
            self.sink(text, "\r")
        else:
            self._splitter = LineSplitter()  # the line goes on behind what is typed
            self.sink(text, "")

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if not self.ended.is_set():
            self.loop.remove_reader(self.descriptor)
            for timer in (self._pause, self._open):
                if timer is not None:
                    timer.cancel()
            for line in self._splitter.finish():
                self.sink(line, "\n")
            self.ended.set()


Launch = Callable[[str, dict[str, str], Callable[[int], None]], WorkerProcess]
"""``launch(worker, variables, on_exit)``; ConfigurationError if the worker can't be started."""


def launcher_of(
    settings: Settings,
    confinement: Confinement,
    spec: JobSpec,
    folder: JobFolder,
    worker_home: Path,
    *,
    made: Environment | None,
    me: str,
    is_own: bool = False,
    sink: Callable[[str, str, str, End], None],
    is_behind: Callable[[], bool],
    readable: Sequence[Path] = (),
) -> Launch:
    """A function that starts a worker of ``spec`` on this node, ``me``, from ``folder``, with the
    credentials in ``worker_home``.
    ``sink(worker, stream, line, end)`` gets the worker's output. Without an environment ``made``
    for the job, workers run with the packages of this agent. In a sandbox they can read the folders
    ``readable``.

    Workers run in the job's copy of the code; on the machine where ``potluck run`` was called they
    run in that directory, so that what they write is found there. A local job, which has no copy,
    runs as if the script had been started by hand there; if it has one worker, that has the
    terminal, too. Where jobs and machines are one person's (``is_own``), workers run in the
    directory of the same name, if this machine has it, and get the agent's environment.
    """
    script, directory = spec.script, Path(spec.directory)
    code, output = folder.code.resolve(), folder.output.resolve()  # a sandbox lacks links to them
    if not spec.is_local:
        script = str(code / spec.script)
        if not ((spec.starter == me or is_own) and directory.is_dir()):
            directory = code / spec.below
    if spec.is_local or is_own:
        inherited = all_but_secrets(os.environ)
    else:
        inherited = passed_on(os.environ, settings.pass_env)
    if made is not None:
        inherited = made.variables(inherited)
    inherited |= confinement.variables()
    sandbox = confinement.sandbox_of(spec, me)
    shell: list[str] | None = None
    if sandbox is not None:
        inherited |= sandbox.variables(worker_home)
        memory = confinement.memory_of(spec.per_node)
        seen = [*readable, *(() if made is None else (made.base, made.path))]
        shell = sandbox.command([code, output], directory, worker_home, memory, seen)
    fixed = confinement.variables()
    sent = {name: text for name, text in accepted(spec.environment).items() if name not in fixed}
    given = {name: value for name, value in (inherited | sent).items() if value}
    modules: dict[str, str] = {}
    if spec.importable:
        paths = [str(code / each) for each in spec.importable]
        modules["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [given.get("PYTHONPATH")])])
        sent.pop("PYTHONPATH", None)  # it is in there
    # -P: without it the working directory is searched first, which on the starter's machine is not
    # the job's copy of the code. It is among the importable folders.
    interpreter = sys.executable if made is None else str(made.python)
    run = ["-m", spec.module] if spec.module else [script]
    python = [interpreter, *(["-P"] if spec.module else []), *run]
    # A local job's agent is the command itself.
    is_alone = spec.is_local and spec.per_node + spec.extra_workers == 1
    environment = inherited | {
        GIVEN: msgspec.json.encode(sent).decode(),
        "POTLUCK_WORKER_HOME": str(worker_home.absolute()),
        "POTLUCK_OUTPUT": str(output),
        **modules,
        **(
            {}
            if spec.is_local or is_own
            else {"PYTHONBREAKPOINT": given.get("PYTHONBREAKPOINT", _STOP)}
        ),
        "POTLUCK_SITE": settings.site,
        "POTLUCK_PEER_TIMEOUT_S": repr(spec.peer_timeout_s),
        "PYTHONUNBUFFERED": given.get("PYTHONUNBUFFERED", "1"),
        "OMP_NUM_THREADS": given.get(
            "OMP_NUM_THREADS", str(max(1, confinement.processors() // spec.per_node))
        ),
    }

    orphans = Orphans()

    def launch(
        worker: str, variables: dict[str, str], on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        command = python
        if variables.get("RANK") == str(spec.debug_rank):
            if sandbox is not None and not sandbox.has_network:
                raise ConfigurationError(
                    f"--debug-rank {spec.debug_rank}: no debugger reaches a rank in this machine's "
                    "sandbox, which has no network; name another machine by --on"
                )
            command = [interpreter, "-P", "-Xfrozen_modules=off", "-m", _DEBUGGED, *run]
        return WorkerProcess(
            [*command, *spec.arguments],
            environment | variables,
            limits=confinement.orders(spec.per_node),
            sandbox=shell,
            sink=partial(sink, worker),
            is_behind=is_behind,
            on_exit=on_exit,
            orphans=orphans,
            directory=directory,
            has_terminal=is_alone and has_terminal(),
        )

    return launch


_BEGIN = "Traceback (most recent call last):"
_PLACE = re.compile(r'\s*File "(?:.*/)?([^"/]+)", line (\d+)')
_ENDS = re.compile(r"KeyboardInterrupt\b|potluck\.errors\.(PeerLost|RemoteError|AgentLost)\b")
_MOST = 1000


class InterruptedTraceback:
    """Lines in, lines out, from the interrupt on."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def feed(self, line: str) -> list[str]:
        """The lines to show now. A traceback is kept back until it ends."""
        if self._kept:
            self._kept.append(line)
            if (line.startswith(" ") or not line) and len(self._kept) < _MOST:
                return []
            kept, self._kept = self._kept, []
            return [_in_short(kept)] if _ENDS.match(line) else kept
        if line.rstrip() == _BEGIN:
            self._kept.append(line)
            return []
        return [line]

    def finish(self) -> list[str]:
        """The lines kept back, at the end of the output."""
        kept, self._kept = self._kept, []
        return kept


def _in_short(lines: list[str]) -> str:
    """The error of a traceback, and where the script was."""
    place = next(filter(None, map(_PLACE.match, lines)), None)
    where = f" ({place[1]}, line {place[2]})" if place is not None else ""
    return f"{lines[-1].removeprefix('potluck.errors.')}{where}"


class Debuggers:
    """The commands (``potluck attach --rank``) that debug workers of this node, each by a session.
    Runs in the event loop.

    A worker has one at a time, which asks to stay so every few seconds. If that leaves, or is
    silent for ``LEASE_S``, the script goes on from its breakpoint. A session keeps the process that
    it began with: ranks may change.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[WorkerProcess, str, asyncio.TimerHandle]] = {}

    def process_of(self, session: str) -> WorkerProcess | None:
        """The process that ``session`` debugs; None for a new one."""
        return self._sessions[session][0] if session in self._sessions else None

    def asked(self, process: WorkerProcess, machine: str, request: DebugRequest) -> bool:
        """A command on ``machine`` asks for ``process``. Whether that runs. LinkError if another
        command debugs it, or if it reads nothing."""
        for session, (theirs, other, lease) in self._sessions.items():
            if session == request.session:
                lease.cancel()
            elif theirs is process:
                raise LinkError(
                    f"a command on {other} debugs this rank; when that command ends, it is free"
                )
        if request.leaves:
            self._let_go(request.session)
            return not process.has_ended
        loop = asyncio.get_running_loop()
        lease = loop.call_later(LEASE_S, self._let_go, request.session)
        self._sessions[request.session] = process, machine, lease
        process.type(request.typed)
        return not process.has_ended

    def _let_go(self, session: str) -> None:
        if session in self._sessions:
            self._sessions.pop(session)[0].type(EOT)

    def close(self) -> None:
        """Forget them."""
        for _, _, lease in self._sessions.values():
            lease.cancel()
