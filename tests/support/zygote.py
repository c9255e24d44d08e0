"""A process that has imported torch and forks a worker in milliseconds: most of the processor time
of tests that start workers was ``import torch``, a second for each.

pytest starts one for each of its processes (``Zygote``), and sets the variable ``ZYGOTE``. In
agents that see it, ``quiet_imports.py`` puts ``popen`` in the place of ``subprocess.Popen`` in
``cluster/jobs/process.py``. A worker without limits, sandbox and terminal is then forked: with the
agent's namespaces, and its own session, directory, environment and output, and the script as
``__main__``. What differs from a worker that was executed: its parent is the zygote, and /proc
shows the zygote's command line and environment. Tests about that have the mark ``real_exec``.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.quiet_imports import ZYGOTE

assert sys.platform != "win32", "it forks"

LIBRARIES = ("numpy", "ml_dtypes", "msgspec", "torch", "torch.distributed")
_MAX_REQUEST = 4 << 20
_PR_SET_PDEATHSIG = 1
_NAMESPACES = ("mnt", "net", "uts", "ipc")
_READ_AT_START = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED"})
"""What Python reads at its start and a forked worker gets all the same."""

_READ_BY_LIBRARIES = ("LD_", "ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "NPY_", "MALLOC_")
"""Variables that libraries read while they are loaded."""


def library_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in sorted(environment.items()) if k.startswith(_READ_BY_LIBRARIES)}


class Zygote:
    """The process, started; ``path`` is its socket. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        Path(f"{path}.json").write_text(json.dumps(library_variables(os.environ)))
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "support.zygote", str(self._listener.fileno())],
            cwd=Path(__file__).parents[1],
            env={k: v for k, v in os.environ.items() if not k.startswith("POTLUCK_")},
            stdin=subprocess.DEVNULL,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,
        )
        self._listener.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self.path.unlink(missing_ok=True)


# ---------------------------------------------------------------- in an agent


class Forked:
    """What a ``subprocess.Popen`` of a worker is to an agent, for a worker of the zygote."""

    def __init__(self, zygote: str, request: dict[str, Any]) -> None:
        out, err = os.pipe(), os.pipe()
        self.stdout, self.stderr = io.FileIO(out[0]), io.FileIO(err[0])
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(zygote)
            text = json.dumps(request).encode()
            socket.send_fds(self._socket, [len(text).to_bytes(4, "big")], [out[1], err[1]])
            self._socket.sendall(text)
            self.pid = int.from_bytes(_exactly(self._socket, 8), "big")
        finally:
            os.close(out[1])
            os.close(err[1])

    def wait(self) -> int:
        """The exit code, negative for a signal, as Popen's."""
        status = int.from_bytes(_exactly(self._socket, 8), "big")
        self._socket.close()
        return os.waitstatus_to_exitcode(status)


def popen(command: Sequence[str], **options: Any) -> Any:
    """In the place of ``subprocess.Popen`` where an agent starts a worker."""
    zygote = os.environ.get(ZYGOTE, "")
    *_, orders = shim = command[:6]
    script, given = command[6:], dict(options["env"])
    sent = json.loads(given.get("POTLUCK_GIVEN", "{}"))
    limits = [value for value in json.loads(orders).values() if value]
    changed = {
        name
        for name, value in [*given.items(), *sent.items()]
        if name.startswith("PYTHON") and os.environ.get(name) != value
    }
    if (
        not zygote
        or limits
        or options["stdin"] is None
        or shim[:3] != [sys.executable, "-I", "-S"]
        or script[0] != sys.executable
        or changed - _READ_AT_START
        or library_variables(given | sent) != json.loads(Path(f"{zygote}.json").read_text())
    ):
        return subprocess.Popen(command, **options)
    given.pop("POTLUCK_GIVEN", None)
    namespaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES}
    return Forked(
        zygote,
        {
            "agent": os.getpid(),
            "namespaces": namespaces,
            "command": list(script[1:]),
            "environment": given | sent,
            "directory": str(options["cwd"] or os.getcwd()),
        },
    )


# ---------------------------------------------------------------- the process


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the zygote, or its agent, is gone")
        data += more
    return data


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a worker for each request, tell its end; returns in each worker, with its request and
    descriptors."""
    woken, wake = socket.socketpair()
    for each in (woken, wake):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    workers: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == woken.fileno():
                while _drained(woken):
                    pass
                _tell_ends(workers, poll)
                break
            elif descriptor == listener.fileno():
                connection, _ = listener.accept()
                connection.settimeout(30)
                try:
                    request, descriptors = _request_on(connection)
                except OSError:  # the agent is gone
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.setsid()  # the agent may kill the group as soon as it has the number
                    connection.sendall(os.getpid().to_bytes(8, "big"))
                    for each in (listener, woken, wake, connection, *workers.values()):
                        each.detach()  # the descriptors are closed below
                    return request, descriptors
                for number in descriptors:
                    os.close(number)
                workers[pid] = connection
                poll.register(connection, select.POLLIN)
                break  # what was polled may name a descriptor that is another one by now
            else:  # the agent is gone, and its workers go with it
                for pid, connection in workers.items():
                    if connection.fileno() == descriptor:
                        poll.unregister(connection)
                        os.kill(pid, signal.SIGKILL)


def _drained(woken: socket.socket) -> bytes:
    try:
        return woken.recv(4096)
    except BlockingIOError:
        return b""


def _request_on(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
    return json.loads(_exactly(connection, int.from_bytes(length, "big"))), list(descriptors)


def _tell_ends(workers: dict[int, socket.socket], poll: select.poll) -> None:
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection = workers.pop(pid)
        try:
            poll.unregister(connection)
            connection.sendall(status.to_bytes(8, "big"))
        except (KeyError, ConnectionError, OSError):
            pass  # the agent is gone
        connection.close()


# ---------------------------------------------------------------- in a forked worker


def end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Make this process what the request describes."""
    end_with_parent()
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = os.open("/dev/null", os.O_RDONLY)
    for number, descriptor in enumerate((nothing, *descriptors)):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    for name, theirs in request["namespaces"].items():
        if theirs != os.readlink(f"/proc/self/ns/{name}"):
            namespace = os.open(f"/proc/{request['agent']}/ns/{name}", os.O_RDONLY)
            if libc.setns(namespace, 0) != 0:
                sys.exit(f"zygote: setns {name}: errno {ctypes.get_errno()}")
            os.close(namespace)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(number, "wb", closefd=False)
        stream = io.TextIOWrapper(
            raw if is_unbuffered else io.BufferedWriter(raw),
            encoding="utf-8",
            errors=errors,
            line_buffering=name == "stderr",
            write_through=is_unbuffered,
        )
        setattr(sys, name, stream)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    import numpy
    import torch

    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(command: list[str]) -> None:
    """``python COMMAND``: a script, or ``[-P] -m module``, with arguments."""
    is_safe = command[0] == "-P"
    command = command[is_safe:]
    del sys.path[0]  # the folder of this package's tests: the working directory of the zygote
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = [path for path in sys.path if path not in _OWN_PATHS]
    sys.path[:] = paths + known
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    script = command[0]
    if not is_safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    runpy.run_path(script, run_name="__main__")


_OWN_PATHS = {path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}


def main() -> None:
    end_with_parent()
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    listener = socket.socket(fileno=int(sys.argv[1]))
    become_and_run(*serve(listener))


def become_and_run(request: dict[str, Any], descriptors: list[int]) -> None:
    become(request, descriptors)
    try:
        run(request["command"])
    except SystemExit:
        raise
    except BaseException as error:
        # As Python itself shows it: without the frames of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


_OWN_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


if __name__ == "__main__":
    main()
