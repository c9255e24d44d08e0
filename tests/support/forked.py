"""``Popen`` in the place of ``subprocess.Popen``: what runs Python is forked from the zygote.

pytest, and each process of a test that has the variable ``ZYGOTE`` (``quiet_imports.py``), start
programs by it. It forks commands that run this interpreter (``program_of``), with what an execution
would have given them: arguments, environment, directory, standard streams, session, ignored
signals, limits, terminal, and the namespaces of an agent or of ``ip netns exec``. All else is
executed.

What differs: the parent is the zygote, /proc shows the zygote's environment, all processes of a
zygote hash strings alike, and at its end a process takes apart less of what it has imported, or
nothing (``zygote.end``). Tests about that, and one for each way of starting workers, have the mark
``real_exec``.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.quiet_imports import STACKS, ZYGOTE

assert sys.platform == "linux", "it forks, into namespaces"

_Executed = subprocess.Popen
_CODE = _Executed._execute_child.__code__  # type: ignore[attr-defined]
_PARAMETERS = _CODE.co_varnames[1 : _CODE.co_argcount]
_IN_HOST = ["ip", "netns", "exec"]
_THEN = ' && exec "$@"'
_UNUSUAL = {
    "pass_fds": (),
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}
"""What no forked process is given, with the value that asks for nothing."""

_READ_AT_START = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", STACKS, ZYGOTE})
"""What is read when Python starts and a forked process gets all the same."""

_READ_BY_LIBRARIES = (
    *("LD_", "ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "NPY_", "TORCH_"),
    *("PYTORCH_", "CUDA_", "POTLUCK_BROKER", "POTLUCK_NATIVE", "LANG", "LC_"),
    *("SKLEARN_", "SCIPY_", "JOBLIB_MULTI"),
)
"""Variables that libraries, and potluck, read while they are loaded. Not those of malloc: they
change no result."""

_READ_BY_FRONT_ENDS = ("HF_", "TRANSFORMERS_", "ACCELERATE_")

LIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))
_POTLUCK = "from potluck.cli.main import app; app()"
_FRONT_END = re.compile(r"^ *(?:from|import) (?:accelerate|lightning|transformers)\b", re.M)
NAMESPACES = ("mnt", "net", "uts", "ipc")


def library_variables(environment: Mapping[str, str], kind: str) -> dict[str, str]:
    """Those of ``environment`` by which processes differ from the moment they have imported what a
    zygote of this kind has; not those of NCCL, which torchrun sets, nor one thread for BLAS, which
    the zygote has by OMP_NUM_THREADS."""
    read = _READ_BY_LIBRARIES + (_READ_BY_FRONT_ENDS if kind == "front_ends" else ())
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(read) and not name.startswith("TORCH_NCCL_")
        if (name, value) != ("OPENBLAS_NUM_THREADS", "1")
    }


def program_of(command: Sequence[str]) -> list[str] | None:
    """What Python is to run in ``command``: a script or ``-c TEXT`` or ``-m MODULE`` with its
    arguments, behind options that ``zygote.run`` knows; None if it is no such command."""
    if not command:
        return None
    first, *words = command
    if first != sys.executable:
        is_script = Path(first).parent == Path(sys.executable).parent and _is_python(first)
        return list(command) if is_script else None
    rest = list(words)
    while rest and rest[0] in ("-P", "-u", "-W"):
        rest = rest[2 if rest[0] == "-W" else 1 :]
    if not rest or (rest[0][:1] == "-" and rest[0] not in ("-c", "-m")):
        return None
    return words


def kind_of(program: Sequence[str]) -> str:
    """The kind of zygote (``zygote.LIBRARIES``) that forks this program."""
    if program[:2] == ["-m", "support.zygote"]:
        return program[2]
    if Path(program[0]).name == "potluck" or program[1:2] == [_POTLUCK]:
        return "commands"
    script = next((word for word in program if word not in ("-P", "-u")), "")
    if Path(script).is_file() and _FRONT_END.search(Path(script).read_text()):
        return "front_ends"
    return "scripts"


def _is_python(script: str) -> bool:
    """Whether the installed command ``script`` is Python of this interpreter."""
    with open(script, "rb") as file:
        return file.readline() == f"#!{sys.executable}\n".encode()


_is_pytest = False
"""Whether processes without a session of their own are forked, too: no signal that a test sends
goes to the process group of pytest."""


def install(*, is_pytest: bool = False) -> None:
    """Start programs of this process by ``Popen`` from now on."""
    global _is_pytest
    _is_pytest = is_pytest
    subprocess.Popen = Popen  # type: ignore[misc]


class Popen(_Executed[Any]):
    """As ``subprocess.Popen``. A forked worker of an agent ends with it, and so does a forked
    process that pytest starts without a session of its own."""

    _socket: socket.socket | None = None

    @property
    def is_forked(self) -> bool:
        return self._socket is not None

    def _execute_child(self, *arguments: Any) -> None:
        given = dict(zip(_PARAMETERS, arguments, strict=True))
        request = _request_of(given)
        if request is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        try:
            self._fork(request, [end if end >= 0 else own for own, end in enumerate(ends)])
        finally:
            self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

    def _fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"{os.environ[ZYGOTE]}/{request['kind']}")
            text = json.dumps(request).encode()
            socket.send_fds(connection, [len(text).to_bytes(4, "big")], streams)
            connection.sendall(text)
            self.pid = int.from_bytes(exactly(connection, 8), "big")
        except BaseException:
            connection.close()
            raise
        self._child_created = True
        self._socket = connection

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._socket is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and _has_data(self._socket, 0):
                self.returncode = int.from_bytes(exactly(self._socket, 8), "big", signed=True)
                self._socket.close()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._socket is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        while self._internal_poll() is None:
            if not _has_data(self._socket, timeout):
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode


def _has_data(connection: socket.socket, timeout: float | None) -> bool:
    """Whether there is something to read, or comes in time; True if it was closed meanwhile."""
    try:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
    except ValueError:  # another thread has read the status
        return True
    return bool(poll.poll(None if timeout is None else max(0.0, 1e3 * timeout)))


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the zygote, or its agent, is gone")
        data += more
    return data


def _request_of(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the zygote is asked for, by what ``Popen._execute_child`` was given; None for what is
    executed."""
    zygotes = os.environ.get(ZYGOTE, "")
    command = given["args"]
    if not zygotes or not isinstance(command, (list, tuple)):
        return None
    if any(given.get(name, usual) != usual for name, usual in _UNUSUAL.items()):
        return None
    takes_terminal = getattr(given["preexec_fn"], "__name__", "") == "take_terminal"
    if given["preexec_fn"] is not None and not takes_terminal:
        return None
    words = [os.fspath(word) for word in command]
    environment = dict(os.environ if given["env"] is None else given["env"])
    host, before, is_worker = "", list[str](), False
    if words[:3] == _IN_HOST:
        host, words = words[3], words[4:]
        if words[:2] == ["sh", "-c"] and words[2].endswith(_THEN):
            before, words = [*words[:2], words[2].removesuffix(_THEN), words[3]], words[4:]
    elif words[:3] == [sys.executable, "-I", "-S"] and Path(words[3]).name == "shim.py":
        if any(json.loads(words[5]).values()) or given["p2cread"] == -1:
            return None  # with limits, a sandbox, or the agent's terminal
        is_worker, words = True, words[6:]
        environment |= json.loads(environment.pop("POTLUCK_GIVEN", "{}"))
    program = program_of(words)
    if program is None or not (given["start_new_session"] or is_worker or _is_pytest):
        return None
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if name.startswith("PYTHON") and environment.get(name) != os.environ.get(name)
    }
    kind = kind_of(program)
    known = json.loads(Path(f"{zygotes}/{kind}.json").read_text())
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if any(Path(path, "sitecustomize.py").exists() for path in paths):
        return None
    if changed - _READ_AT_START or library_variables(environment, kind) != known:
        return None
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    if is_worker:
        ignored.discard(signal.SIGINT)  # as ``shim.become`` does
    return {
        "parent": os.getpid(),
        "ends_with_parent": is_worker or not given["start_new_session"],
        "takes_terminal": takes_terminal,
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES},
        "host": host,
        "before": before,
        "kind": kind,
        "command": program,
        "environment": environment,
        "directory": os.fspath(given["cwd"] or os.getcwd()),
        "ignored": sorted(ignored),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "umask": _umask(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": sorted(os.sched_getaffinity(0)),
    }


def _umask() -> int:
    """``os.umask`` would change it for a moment, for all threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Umask:")), 8)
