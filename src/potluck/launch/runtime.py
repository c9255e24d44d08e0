"""Starting workers: which command, in which directory, with which environment."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from potluck.cluster.jobs.lead import Lead
from potluck.launch.chaos import ChaosPlan, parse_chaos
from potluck.launch.process import WorkerProcess
from potluck.launch.summary import Summary, summarize
from potluck.settings import Settings
from potluck.system import usable_cpus
from potluck.wire.jobs import MAX_SUMMARY, JobSpec

LAST_WORDS = 30
"""Lines of a worker's stderr that are kept to explain its end."""


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
        self.last_words: dict[str, deque[str]] = {}
        self._command = list(command)
        self._environment = dict(environment)
        self._sink = sink
        self._is_behind = is_behind
        self._directory = directory

    def start(
        self, worker: str, attempt: int, environment: dict[str, str], on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        """See ``Launcher``."""
        words = self.last_words[worker] = deque(maxlen=LAST_WORDS)

        def sink(stream: str, text: str) -> None:
            if stream == "stderr":
                words.append(text)
            self._sink(worker, stream, text)

        return WorkerProcess(
            self._command,
            self._environment | environment,
            sink=sink,
            is_behind=self._is_behind,
            on_exit=on_exit,
            directory=self._directory,
        )


class ClusterRuntime:
    """What a node's agent needs to run workers of the cluster's jobs (``jobs.host.Runtime``)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def launcher(
        self,
        spec: JobSpec,
        folder: Path,
        *,
        is_starter: bool,
        sink: Callable[[str, str, str], None],
        is_behind: Callable[[], bool],
    ) -> ProcessLauncher:
        """Workers run in the job's own folder; on the machine where ``potluck run`` was called they
        run in that directory, so that what they write is found there."""
        directory = folder / spec.below
        if is_starter and Path(spec.directory).is_dir():
            directory = Path(spec.directory)
        environment = worker_environment(self._settings, spec.per_node)
        environment["POTLUCK_PEER_TIMEOUT_S"] = repr(spec.peer_timeout_s)
        return ProcessLauncher(
            [sys.executable, str(folder / spec.script), *spec.arguments],
            environment,
            sink=sink,
            is_behind=is_behind,
            directory=directory,
        )

    def free_port(self) -> int:
        """A port of this machine that nobody has."""
        return free_port("")

    def chaos(self, text: str) -> ChaosPlan:
        """See ``parse_chaos``."""
        return parse_chaos(text)

    def summary(
        self, spec: JobSpec, lead: Lead, last_words: Mapping[str, Sequence[str]]
    ) -> tuple[int, bytes]:
        """The exit code, and the ``Summary`` as JSON, with the newest events that fit."""
        made = summarize(
            job=spec.job,
            script=spec.script,
            state=lead.state,
            journal=lead.journal,
            exit_codes=lead.exit_codes,
            unfired=lead.unfired(),
            last_words=last_words,
            python=sys.executable,
            now=time.monotonic(),
        )
        return made.exit_code, encode_summary(made)


def encode_summary(summary: Summary) -> bytes:
    """As JSON, short enough for a message."""
    while len(data := msgspec.json.encode(summary)) > MAX_SUMMARY and summary.events:
        kept = summary.events[len(summary.events) // 2 + 1 :]
        summary = msgspec.structs.replace(summary, events=kept)
    return data


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
