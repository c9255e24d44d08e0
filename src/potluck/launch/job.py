"""A job from its options to its summary: agent, processes, ordered faults, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from potluck.cluster.agent import Agent
from potluck.cluster.credentials import load_credentials
from potluck.cluster.job import Job
from potluck.cluster.roster import Policy
from potluck.errors import ConfigurationError
from potluck.launch.chaos import ChaosPlan, check_ranks
from potluck.launch.process import WorkerProcess
from potluck.launch.summary import Summary, summarize
from potluck.settings import Settings

MAX_WORKERS = 256
_LAST_WORDS = 30


class Watcher(Protocol):
    """Who looks on. All calls come from the event loop and must not block."""

    def begin(self, agent: Agent) -> None:
        """The job is about to start; ``agent`` answers questions from now on."""

    def line(self, worker: str, stream: str, text: str) -> None:
        """A worker wrote a line to ``stdout`` or ``stderr``."""

    def note(self, text: str) -> None:
        """Something happened."""

    def end(self) -> None:
        """The job is over. Called once, whatever happened."""

    @property
    def is_behind(self) -> bool:
        """Whether more lines have come than it can take: workers' output waits meanwhile."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run, and how."""

    script: Path
    arguments: tuple[str, ...] = ()
    num_workers: int = 1
    max_restarts: int = 3
    chaos: ChaosPlan = field(default_factory=lambda: ChaosPlan([]))

    def check(self) -> None:
        """ConfigurationError, with what to do, if this can't be run."""
        if not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigurationError(
                f"--workers {self.num_workers}: a number from 1 to {MAX_WORKERS} is needed"
            )
        if self.max_restarts < 0:
            raise ConfigurationError(f"--max-restarts {self.max_restarts}: 0 or more is needed")
        if not self.script.is_file():
            what = "is a directory" if self.script.is_dir() else "does not exist"
            raise ConfigurationError(
                f"the script {str(self.script)!r} {what} (seen from {Path.cwd()})"
            )
        check_ranks(self.chaos, self.num_workers)


def run_job(options: Options, settings: Settings, watcher: Watcher) -> Summary:
    """Run the job to its end. Must be called on the main thread; takes over SIGINT, SIGTERM and
    SIGHUP meanwhile. ConfigurationError or IdentityError if it can't begin."""
    options.check()
    return asyncio.run(_run(options, settings, watcher))


async def _run(options: Options, settings: Settings, watcher: Watcher) -> Summary:
    credentials = load_credentials(settings)
    launcher = _Launcher(options, settings, watcher)
    job = Job(
        id=f"{options.script.stem[:64]}-{secrets.token_hex(4)}",
        script=str(options.script),
        workers=tuple(str(index) for index in range(options.num_workers)),
        policy=Policy(max_restarts=options.max_restarts),
        wire=settings.wire,
    )
    agent = Agent(
        job,
        home=settings.home,
        credentials=credentials,
        launcher=launcher,
        chaos=options.chaos,
        on_note=watcher.note,
    )
    watcher.begin(agent)
    try:
        with _signals(agent.interrupt):
            await agent.run()
    finally:
        watcher.end()
    return summarize(
        job=job.id,
        script=job.script,
        state=agent.lead.state,
        journal=agent.lead.journal,
        exit_codes=agent.lead.exit_codes,
        unfired=[str(fault) for fault in options.chaos.waiting],
        last_words=launcher.last_words,
        python=sys.executable,
        now=time.monotonic(),
    )


class _Launcher:
    """Starts workers as processes of this machine."""

    def __init__(self, options: Options, settings: Settings, watcher: Watcher) -> None:
        self.last_words: dict[str, deque[str]] = {}
        self._command = [sys.executable, str(options.script), *options.arguments]
        self._watcher = watcher
        self._environment = _worker_environment(options.num_workers, settings)

    def start(
        self, worker: str, attempt: int, environment: dict[str, str], on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        words = self.last_words[worker] = deque(maxlen=_LAST_WORDS)

        def sink(stream: str, text: str) -> None:
            if stream == "stderr":
                words.append(text)
            self._watcher.line(worker, stream, text)

        return WorkerProcess(
            self._command,
            self._environment | environment,
            sink=sink,
            is_behind=lambda: self._watcher.is_behind,
            on_exit=on_exit,
        )


def _worker_environment(num_workers: int, settings: Settings) -> dict[str, str]:
    """What every worker gets: this environment, and what launchers agree on."""
    environment = dict(os.environ)
    environment["POTLUCK_HOME"] = str(settings.home.absolute())
    environment["POTLUCK_PEER_TIMEOUT_S"] = repr(settings.peer_timeout_s)
    environment["MASTER_ADDR"] = "127.0.0.1"
    environment["MASTER_PORT"] = str(_free_port())
    chosen = {name: value for name, value in environment.items() if value}
    environment["PYTHONUNBUFFERED"] = chosen.get("PYTHONUNBUFFERED", "1")
    share = max(1, _num_cores() // num_workers)
    environment["OMP_NUM_THREADS"] = chosen.get("OMP_NUM_THREADS", str(share))
    return environment


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_port() -> int:
    """A port for scripts that use torch.distributed by themselves; potluck does not use it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def _signals(interrupt: Callable[[int], None]) -> Iterator[None]:
    """Have signals that ask for the end passed to ``interrupt``."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
