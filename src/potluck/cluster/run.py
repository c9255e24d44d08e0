"""A job from its options to its summary."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from potluck.cluster.home.node_state import AgentRecord
from potluck.cluster.job_client import JobClient, Watcher, run_alone, run_by_agent
from potluck.cluster.jobs.chaos import ChaosPlan, check_ranks
from potluck.cluster.jobs.summary import Summary
from potluck.errors import ConfigurationError
from potluck.settings import Settings
from potluck.system import SIGHUP
from potluck.wire.local import RunRequest

MAX_WORKERS = 256


@dataclass(frozen=True, slots=True)
class Options:
    """What to run, and how. ``num_workers`` are those of one node, ``max_nodes`` 0 means all, and
    ``min_nodes`` are to be there within ``wait_s``. The rest as in ``roster.JobPolicy``."""

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

    def request(self, settings: Settings, *, is_local: bool) -> RunRequest:
        """What an agent is asked for. A local job runs the script where it is; else the folder that
        it is in travels to the nodes."""
        script = self.script.absolute()
        return RunRequest(
            folder="" if is_local else str(script.parent),
            script=str(self.script) if is_local else script.name,
            arguments=self.arguments,
            directory=str(Path.cwd()),
            per_node=self.num_workers,
            max_nodes=self.max_nodes,
            max_restarts=self.max_restarts,
            peer_timeout_s=settings.peer_timeout_s,
            chaos="; ".join(str(fault) for fault in self.chaos.waiting),
            wire=settings.wire,
            restarts_worlds=self.restarts_worlds,
            wait_s=self.wait_s,
            min_workers=self.min_workers,
            min_nodes=self.min_nodes,
        )


def run_job(
    options: Options, settings: Settings, watcher: Watcher, agent: AgentRecord | None
) -> Summary:
    """Run the job to its end: by this machine's ``agent`` on its cluster; without one here, by a
    private agent in this process.

    Must be called on the main thread; takes over SIGINT, SIGTERM and SIGHUP meanwhile.
    ConfigurationError or IdentityError if the job can't begin; LinkError if ``agent`` is lost.
    """
    options.check()
    if agent is None:
        check_ranks(options.chaos, options.num_workers)
    return asyncio.run(_run(options, settings, watcher, agent))


async def _run(
    options: Options, settings: Settings, watcher: Watcher, agent: AgentRecord | None
) -> Summary:
    request = options.request(settings, is_local=agent is None)
    known = () if agent is not None else tuple(map(str, range(options.num_workers)))
    client = JobClient(str(options.script), known, watcher)
    watcher.begin(client)
    try:
        with signals(client.interrupt):
            if agent is None:
                return await run_alone(settings, request, client)
            return await run_by_agent(agent, settings, request, client)
    finally:
        watcher.end()


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
