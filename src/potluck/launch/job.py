"""A job from its options to its summary: agent, processes, ordered faults, signals."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from potluck.cluster.groups.roster import Policy
from potluck.cluster.jobs.job import Job
from potluck.cluster.jobs.standalone import Agent
from potluck.cluster.trust.credentials import load_credentials
from potluck.errors import ConfigurationError
from potluck.launch.chaos import ChaosPlan, check_ranks
from potluck.launch.runtime import ProcessLauncher, worker_environment
from potluck.launch.summary import Summary, summarize
from potluck.settings import Settings
from potluck.system import SIGHUP
from potluck.wire.control import StatusReply

MAX_WORKERS = 256
_LAST_WORDS = 30


class Watched(Protocol):
    """A job that runs, to whoever looks on."""

    @property
    def workers(self) -> tuple[str, ...]:
        """What stands in front of their lines."""

    def status(self) -> StatusReply:
        """As it is now."""

    def interrupt(self, number: int) -> None:
        """End it: by ``number`` first, by SIGKILL the second time."""


class Watcher(Protocol):
    """Who looks on. All calls come from the event loop and must not block."""

    def begin(self, job: Watched) -> None:
        """The job is about to start; ``job`` answers questions from now on."""

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
    """What to run, and how. ``num_workers`` are those of one node, ``max_nodes`` 0 means all, and
    ``min_nodes`` are to be there within ``wait_s``. The rest as in ``roster.Policy``."""

    script: Path
    arguments: tuple[str, ...] = ()
    num_workers: int = 1
    max_nodes: int = 0
    max_restarts: int = 3
    restarts_worlds: bool = True
    wait_s: float = 60.0
    min_workers: int = 1
    min_nodes: int = 1
    chaos: ChaosPlan = field(default_factory=lambda: ChaosPlan([]))

    def check(self) -> None:
        """ConfigurationError, with what to do, if this can't be run."""
        if not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigurationError(
                f"--workers {self.num_workers}: a number from 1 to {MAX_WORKERS} is needed"
            )
        if self.max_restarts < 0:
            raise ConfigurationError(f"--max-restarts {self.max_restarts}: 0 or more is needed")
        if self.min_workers < 1:
            raise ConfigurationError(f"--min-workers {self.min_workers}: 1 or more is needed")
        if not 0 <= self.wait_s < float("inf"):
            raise ConfigurationError(f"--wait {self.wait_s:g}: seconds, 0 or more, are needed")
        if self.max_nodes and self.min_nodes > self.max_nodes:
            raise ConfigurationError(
                f"--min-nodes {self.min_nodes} is more than --nodes {self.max_nodes}"
            )
        try:
            here = Path.cwd()
        except FileNotFoundError:
            raise ConfigurationError(
                "the directory that this was called in has been removed; change to another one"
            ) from None
        if not self.script.is_file():
            what = "is no file" if self.script.exists() else "does not exist"
            what = "is a directory" if self.script.is_dir() else what
            raise ConfigurationError(f"the script {str(self.script)!r} {what} (seen from {here})")


def run_job(options: Options, settings: Settings, watcher: Watcher) -> Summary:
    """Run the job to its end. Must be called on the main thread; takes over SIGINT, SIGTERM and
    SIGHUP meanwhile. ConfigurationError or IdentityError if it can't begin."""
    options.check()
    check_ranks(options.chaos, options.num_workers)
    return asyncio.run(_run(options, settings, watcher))


async def _run(options: Options, settings: Settings, watcher: Watcher) -> Summary:
    credentials = load_credentials(settings)
    launcher = ProcessLauncher(
        [sys.executable, str(options.script), *options.arguments],
        worker_environment(settings, options.num_workers),
        sink=watcher.line,
        is_behind=lambda: watcher.is_behind,
    )
    job = Job(
        id=f"{options.script.stem[:64]}-{secrets.token_hex(4)}",
        script=str(options.script),
        workers=tuple(str(index) for index in range(options.num_workers)),
        policy=Policy(
            max_restarts=options.max_restarts,
            restarts_worlds=options.restarts_worlds,
            wait_s=options.wait_s,
            min_workers=options.min_workers,
        ),
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
        with signals(agent.interrupt):
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


@contextlib.contextmanager
def signals(interrupt: Callable[[int], None]) -> Iterator[None]:
    """Have signals that ask for the end passed to ``interrupt``."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
