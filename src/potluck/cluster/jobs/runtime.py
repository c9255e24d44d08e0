"""Starting workers: which command, in which directory, with which environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from potluck.cluster.jobs.process import WorkerProcess
from potluck.settings import Settings
from potluck.system import usable_cpus
from potluck.wire.jobs import JobSpec


class ProcessLauncher:
    """Starts workers as processes of this machine; ``sink(worker, stream, line)`` gets their
    output. While ``is_behind()``, their pipes are not read."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        sink: Callable[[str, str, str], None],
        is_behind: Callable[[], bool],
        directory: Path | None = None,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._sink = sink
        self._is_behind = is_behind
        self._directory = directory

    def start(
        self, worker: str, attempt: int, environment: dict[str, str], on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        """Start ``worker`` with these variables added; ConfigurationError if that can't be."""
        return WorkerProcess(
            self._command,
            self._environment | environment,
            sink=lambda stream, text: self._sink(worker, stream, text),
            is_behind=self._is_behind,
            on_exit=on_exit,
            directory=self._directory,
        )


def launcher_of(
    settings: Settings,
    spec: JobSpec,
    folder: Path | None,
    *,
    is_starter: bool,
    sink: Callable[[str, str, str], None],
    is_behind: Callable[[], bool],
) -> ProcessLauncher:
    """Starts the workers of ``spec`` on one node, from ``folder``.

    They run in that folder; on the machine where ``potluck run`` was called they run in that
    directory, so that what they write is found there. A local job, which has no ``folder``, runs as
    if the script had been started by hand there.
    """
    script, directory = spec.script, Path(spec.directory)
    if folder is not None:
        script = str(folder / spec.script)
        if not (is_starter and directory.is_dir()):
            directory = folder / spec.below
    environment = worker_environment(settings, spec.per_node)
    environment["POTLUCK_PEER_TIMEOUT_S"] = repr(spec.peer_timeout_s)
    return ProcessLauncher(
        [sys.executable, script, *spec.arguments],
        environment,
        sink=sink,
        is_behind=is_behind,
        directory=directory,
    )


def worker_environment(settings: Settings, num_workers: int) -> dict[str, str]:
    """What each of ``num_workers`` workers here gets: this environment, and what launchers agree
    on."""
    environment = dict(os.environ)
    environment["POTLUCK_HOME"] = str(settings.home.absolute())
    environment["POTLUCK_PEER_TIMEOUT_S"] = repr(settings.peer_timeout_s)
    environment["MASTER_ADDR"] = "127.0.0.1"
    environment["MASTER_PORT"] = str(free_port("127.0.0.1"))
    chosen = {name: value for name, value in environment.items() if value}
    environment["PYTHONUNBUFFERED"] = chosen.get("PYTHONUNBUFFERED", "1")
    share = max(1, len(usable_cpus()) // num_workers)
    environment["OMP_NUM_THREADS"] = chosen.get("OMP_NUM_THREADS", str(share))
    return environment


def free_port(host: str) -> int:
    """A port for scripts that use torch.distributed by themselves; potluck does not use it."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port
