"""A process that has imported torch and forks others in milliseconds: most of the processor time of
tests that start processes was ``import torch``, a second for each.

pytest starts some for each of its processes (``Zygote``) and sets the variable ``ZYGOTE``;
``forked.Popen`` asks it for processes. ``become`` makes a forked process what the request
describes, ``run`` runs what Python was to run.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from support import forked, quiet_imports, terminal
from support.quiet_imports import ZYGOTE

assert sys.platform == "linux", "it forks, into namespaces"

LIBRARIES = {
    "scripts": (
        *("numpy", "ml_dtypes", "msgspec", "psutil", "torch", "torch.distributed"),
        "torch._dynamo",  # torch imports it, for another second, when the first optimizer is made
        *("potluck.torch.trainer", "potluck.torch.pipeline", "potluck.training.trainer"),
        *("potluck._core.backends.agent", "potluck._core.backends.environment"),
        *("potluck._core.backends.ring", "potluck.parameter_server", "potluck.estimators"),
        *("encodings.idna", "importlib.readers", "multiprocessing.popen_fork"),
        *("sklearn.cluster", "sklearn.datasets", "sklearn.ensemble", "sklearn.linear_model"),
        *("sklearn.datasets.data", "sklearn.datasets.descr"),
    ),
    "front_ends": ("accelerate", "lightning", "transformers.trainer"),
    "commands": (
        *("pydantic.type_adapter", "pydantic.main", "pydantic.types", "zeroconf.asyncio"),
        *("potluck.cli.main", "potluck.cli.dry_run", "potluck.cli.launched"),
        *("potluck._core.cluster.node_agent", "potluck._core.cluster.run"),
        *("potluck._core.cluster.discovery.configured", "encodings.idna", "email.parser"),
        *("concurrent.futures.thread", "typer._adapters", "rich.live", "rich.table", "rich.ansi"),
    ),
}
"""What each kind of zygote has imported, of what is installed. Commands and agents of potluck run
without torch. Few tests need ``LATER``."""

LATER = "front_ends"
LIBRARIES[LATER] = (*LIBRARIES["scripts"], *LIBRARIES[LATER])

_PROGRAM = ["-m", "support.zygote"]

_NAME_BYTES = 4096
"""How much of a command line /proc shows of a forked process."""

_LARGE = 2 << 20
_MADV_COLLAPSE = 25
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 1 << 12, 1 << 14, 1 << 19, 2


class Zygote:
    """A zygote of a kind of ``LIBRARIES``, started; ``path`` is its socket. With ``is_later`` it
    imports when it is first asked. Forked, where there is a zygote already."""

    def __init__(self, path: Path, kind: str, *, is_later: bool = False) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        variables = {k: v for k, v in os.environ.items() if not k.startswith("POTLUCK_")}
        variables.pop(ZYGOTE, None)
        if kind == LATER:
            variables["HF_HUB_OFFLINE"] = "1"
        known = forked.library_variables(variables, kind)
        path.with_suffix(".json").write_text(json.dumps(known))
        self._ready, tell = os.pipe()
        when = "later" if is_later else "now"
        self._popen = subprocess.Popen(
            [sys.executable, *_PROGRAM, kind, when, " " * _NAME_BYTES],
            cwd=Path(__file__).parents[1],
            env=variables,
            stdin=self._listener.fileno(),
            stdout=tell,
        )
        self._listener.close()
        os.close(tell)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_until_ready(self) -> None:
        """It has imported all: else an agent would wait for that while it starts a worker."""
        os.read(self._ready, 1)
        os.close(self._ready)

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self.path.unlink(missing_ok=True)


# ---------------------------------------------------------------- the process


@dataclass
class Forked:
    """A forked process, and the connection of the process that asked for it."""

    connection: socket.socket
    ends_with_parent: bool
    has_ended: bool = False
    is_asked_for: bool = True


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request and report its end; returns in each forked process, with its
    request and descriptors."""
    woken, wake = socket.socketpair()
    for each in (woken, wake):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    workers: dict[int, Forked] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == woken.fileno():
                while _drained(woken):
                    pass
                _report_ends(workers)
                break
            elif descriptor == listener.fileno():
                connection, _ = listener.accept()
                connection.settimeout(30)
                try:
                    request, descriptors = _request_on(connection)
                except OSError:  # who asked is gone
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.setsid()  # the group may be killed as soon as its number is known
                    connection.sendall(os.getpid().to_bytes(8, "big"))
                    others = [each.connection for each in workers.values()]
                    for each in (listener, woken, wake, connection, *others):
                        each.detach()  # the descriptors are closed below
                    return request, descriptors
                for number in descriptors:
                    os.close(number)
                workers[pid] = Forked(connection, request["ends_with_parent"])
                poll.register(connection, select.POLLIN)
                break  # what was polled may name a descriptor that is another one by now
            else:  # who asked has read the exit code, or is gone
                poll.unregister(descriptor)
                for pid, worker in list(workers.items()):
                    if worker.connection.fileno() == descriptor:
                        worker.is_asked_for = False
                        if worker.has_ended:
                            _reap(workers, pid)
                        elif worker.ends_with_parent:
                            os.kill(pid, signal.SIGKILL)


def _drained(woken: socket.socket) -> bytes:
    try:
        return woken.recv(4096)
    except BlockingIOError:
        return b""


def _request_on(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    return json.loads(forked.exactly(connection, int.from_bytes(length, "big"))), list(descriptors)


def _report_ends(workers: dict[int, Forked]) -> None:
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    for pid, worker in list(workers.items()):
        if worker.has_ended or (ended := os.waitid(os.P_PID, pid, flags)) is None:
            continue
        worker.has_ended = True
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with contextlib.suppress(OSError):  # who asked is gone
            worker.connection.sendall(code.to_bytes(8, "big", signed=True))
        if not worker.is_asked_for:
            _reap(workers, pid)


def _reap(workers: dict[int, Forked], pid: int) -> None:
    """Wait for a process whose exit code was read: its starter could open it by its number until
    then."""
    os.waitpid(pid, 0)
    workers.pop(pid).connection.close()


# ---------------------------------------------------------------- in a forked process


def end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Make this process what the request describes."""
    end_with_parent()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    if request["takes_terminal"]:
        terminal.take_terminal()
    enter(request["parent"], request["namespaces"], request["host"])
    if request["before"]:
        subprocess.run(request["before"], check=True)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.sched_setaffinity(0, request["processors"])
    for signal_number in request["ignored"]:
        signal.signal(signal_number, signal.SIG_IGN)
    open_streams(is_unbuffered=bool(os.environ.get("PYTHONUNBUFFERED")))
    show([sys.executable, *request["command"]])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        num_threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        sys.modules["torch"].set_num_threads(num_threads)
    quiet_imports.follow_environment()


def enter(parent: int, namespaces: Mapping[str, str], host: str) -> None:
    """Join the namespaces of the process ``parent``, then the host of that name, if there is one,
    as ``ip netns exec`` does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            sys.exit(f"zygote: {what}: {os.strerror(ctypes.get_errno())}")

    def join(path: str) -> None:
        namespace = os.open(path, os.O_RDONLY)
        check(libc.setns(namespace, 0), f"setns {path}")
        os.close(namespace)

    for name, theirs in namespaces.items():
        if theirs != os.readlink(f"/proc/self/ns/{name}"):
            join(f"/proc/{parent}/ns/{name}")
    if host:
        join(f"/run/netns/{host}")
        check(libc.unshare(_CLONE_NEWNS), "unshare")
        check(libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None), "mount /")
        libc.umount2(b"/sys", _MNT_DETACH)
        check(libc.mount(host.encode(), b"/sys", b"sysfs", 0, None), "mount /sys")
        for own in Path("/etc/netns", host).glob("*"):
            place = f"/etc/{own.name}"
            check(libc.mount(bytes(own), place.encode(), None, _MS_BIND, None), f"bind {place}")


def show(command: Sequence[str]) -> None:
    """Have /proc show this command line, with zeros behind it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))


def open_streams(*, is_unbuffered: bool) -> None:
    """``sys.stdin``, ``stdout`` and ``stderr`` as Python opens them at its start."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = io.FileIO(number, "rb" if name == "stdin" else "wb", closefd=False)
        is_raw = is_unbuffered and name != "stdin"
        below: Any = raw
        if not is_raw:
            below = io.BufferedReader(raw) if name == "stdin" else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            below,
            encoding=_ENCODINGS[name][0],
            errors=_ENCODINGS[name][1],
            line_buffering=name == "stderr" or raw.isatty(),
            write_through=is_raw,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


_ENCODINGS = {
    name: (stream.encoding, stream.errors)
    for name in ("stdin", "stdout", "stderr")
    if (stream := getattr(sys, name)) is not None
}


def run(command: list[str]) -> None:
    """``python COMMAND``, as the interpreter runs it, in a new module ``__main__``."""
    sys.orig_argv[:] = [sys.executable, *command]
    is_safe = False
    while command[0] in ("-P", "-u", "-W"):
        option, *command = command
        if option == "-P":
            is_safe = True
        elif option == "-u":
            open_streams(is_unbuffered=True)
        else:
            sys.warnoptions.append(command[0])
            warnings._processoptions([command[0]])  # type: ignore[attr-defined]
            command = command[1:]
    del sys.path[0]  # the folder of this package's tests: the working directory of the zygote
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = paths + [path for path in sys.path if path not in _OWN_PATHS]
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    kind = command[0]
    if kind == "-m":
        sys.argv = ["-m", *command[2:]]  # the first becomes the module's file
        if not is_safe:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        return
    if kind == "-c":
        sys.argv = ["-c", *command[2:]]
        if not is_safe:
            sys.path.insert(0, "")
        text, name = command[1].encode(), "<string>"
    else:
        sys.argv = command
        if not is_safe:
            sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        name = main.__dict__["__file__"] = kind
        main.__dict__["__cached__"] = None
        main.__loader__ = SourceFileLoader("__main__", kind)
        text = Path(kind).read_bytes()
    exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


_OWN_PATHS = {path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}


_is_interrupted = False
_exit_code = 0
_is_first = True
"""False at ranks above 0 and in commands of potluck that start no agent and no worker."""


class End:
    """Ends the process with ``code`` when it is destroyed."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.streams = sys.stdout, sys.stderr
        # Python clears the modules that still live. What is frozen, it would not collect.
        self.modules = list(sys.modules.values())

    def __del__(self, end: Callable[[int], NoReturn] = os._exit) -> None:
        for stream in self.streams:  # a destructor may have written something
            try:  # noqa: SIM105  (contextlib is gone)
                stream.flush()
            except (OSError, ValueError):
                pass
        end(self.code)


def end() -> None:
    """The last thing before Python takes all modules apart, when threads and functions for the exit
    are through. Ends a process after a KeyboardInterrupt as Python does.

    Taking apart what the zygote has imported costs 0.3 s, mostly for copies of its pages. So only
    the modules of potluck and of the script are taken apart, at ``_is_first``. Then the process
    ends: the interpreter itself, with all its strings, would take as long.
    """
    if _is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGINT)
    has_flushed = False
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Python itself tries again
        sys.stdout.flush()
        sys.stderr.flush()
        has_flushed = True
        if not _is_first:
            os._exit(_exit_code)
    kept = {name: sys.modules.pop(name) for name in _others if name in sys.modules}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # so that they outlive the interpreter
    if has_flushed:
        # Python clears the names in sys when all other modules are gone, those with a _ first.
        vars(sys)["_end"] = End(_exit_code)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # the last registered is called first


_others: list[str] = []
"""The modules that the zygote has imported, other than potluck's."""


def main() -> None:
    os.setsid()  # Ctrl-C is for pytest
    end_with_parent()
    atexit.register(end)  # the first, and so the last to be called
    kind, when = sys.argv[1:3]
    listener = socket.socket(fileno=os.dup(0))
    if when == "later":
        tell_ready()
        select.select([listener], [], [])
    gc.disable()
    for name in LIBRARIES[kind]:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    own = {"builtins", "sys", "__main__", "potluck", "support"}
    _others.extend(name for name in sys.modules if name.partition(".")[0] not in own)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's would take all its operators apart, 10,000 pages
    gc.freeze()
    gc.enable()
    if kind != LATER:
        collapse_pages()
    tell_ready()
    become_and_run(*serve(listener))


def collapse_pages() -> None:
    """Make the pages of this process large, where the kernel can: to fork a process that does
    nothing then takes 19 ms of processor time, with its end, and 31 else."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions, _, _, inode, *_ = line.split()
        start, end = (int(number, 16) for number in place.split("-"))
        start, end = -(-start // _LARGE) * _LARGE, end // _LARGE * _LARGE
        if permissions == "rw-p" and inode == "0" and start < end:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def tell_ready() -> None:
    """Whoever reads what this process writes to stdout finds its end."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)


def is_short_command(command: Sequence[str]) -> bool:
    """Whether this is a command of potluck that starts nothing, as `potluck status`."""
    return forked.kind_of(command) == "commands" and not {"run", "up", "bench"} & set(command[1:4])


def become_and_run(request: dict[str, Any], descriptors: list[int]) -> None:
    global _is_interrupted, _exit_code, _is_first
    become(request, descriptors)
    if request["command"][:2] == _PROGRAM:
        tell_ready()
        become_and_run(*serve(socket.socket(fileno=os.dup(0))))
        return
    _is_first = os.environ.get("RANK", "0") == "0" and not is_short_command(request["command"])
    try:
        run(request["command"])
    except SystemExit as error:
        is_number = error.code is None or isinstance(error.code, int)
        _exit_code = int(error.code or 0) & 0xFF if is_number else 1
        raise
    except BaseException as error:
        # As Python itself shows it: without the frames of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _is_interrupted = isinstance(error, KeyboardInterrupt)
        _exit_code = 1
        sys.exit(1)


_OWN_FILES = {__file__}


if __name__ == "__main__":
    main()
