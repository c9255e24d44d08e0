"""A command's side of its job: what the job's agent tells the command, and what it shows of that.

The agent is that of this machine (``potluck up``), or a private one in the same process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from potluck.cluster.home.node_state import AgentRecord
from potluck.cluster.jobs.summary import Summary
from potluck.cluster.links.local import call_agent, read_reply
from potluck.cluster.node_agent import NodeAgent
from potluck.errors import ConfigurationError, LinkError
from potluck.settings import Settings
from potluck.transport import aio
from potluck.wire import jobs, local
from potluck.wire.control import StatusReply


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


class JobClient:
    """The command that waits for a job (``dispatcher.Client``), which ``watcher`` looks at."""

    def __init__(self, script: str, workers: tuple[str, ...], watcher: Watcher) -> None:
        """``workers`` are those that are known before the agent tells of any."""
        self.workers = workers
        self.summary: asyncio.Future[Summary] = asyncio.get_running_loop().create_future()
        self._status = StatusReply("", "", 0, script, time.time(), 0, -1, None, (), ())
        self._watcher = watcher
        self._order: Callable[[int], None] | None = None
        self._early: list[int] = []

    @property
    def is_behind(self) -> bool:
        return self._watcher.is_behind

    def status(self) -> StatusReply:
        """The job as the agent told of it last."""
        return self._status

    def interrupt(self, number: int) -> None:
        """End the job: by ``number`` first, by SIGKILL the second time."""
        if self._order is None:
            self._early.append(number)
        else:
            self._order(number)

    def interrupts_by(self, order: Callable[[int], None]) -> None:
        """The agent has the job: ``order(number)`` interrupts it."""
        self._order = order
        for number in self._early:
            order(number)

    def send(self, message: local.Reply) -> None:
        """The agent tells this."""
        match message:
            case jobs.JobNote(_, text):
                self._watcher.note(text)
            case jobs.Shown(_, worker, stream, text):
                self._watcher.line(worker, stream, text)
            case jobs.JobStatus(status):
                self._status = status
                self.workers = tuple(
                    f"{each.worker} {each.node}".strip() for each in status.workers
                )
            case jobs.JobEnded(_, _, summary):
                self.summary.set_result(msgspec.json.decode(summary, type=Summary))
            case local.CommandResult(_, text):
                self.summary.set_exception(ConfigurationError(text))
            case _:
                pass


async def run_by_agent(
    agent: AgentRecord, settings: Settings, request: local.RunRequest, client: JobClient
) -> Summary:
    """Have ``agent`` run the job on its cluster.

    LinkError if it goes away meanwhile; ConfigurationError if the cluster does not take the job.
    """
    main, num_interrupts = asyncio.current_task(), 0
    assert main is not None

    def interrupt(number: int) -> None:
        """The third time, leave."""
        nonlocal num_interrupts
        num_interrupts += 1
        writer.write(local.REQUEST.encode(local.InterruptRequest(number)))
        if num_interrupts >= 3:
            main.cancel()

    reader, writer = await call_agent(settings, agent)
    try:
        writer.write(local.REQUEST.encode(request))
        client.interrupts_by(interrupt)
        while not client.summary.done():
            client.send(await read_reply(reader))
        return client.summary.result()
    except (OSError, asyncio.IncompleteReadError) as error:
        raise LinkError(
            "this machine's agent has ended; if others are left, they go on with the job: see "
            "`potluck status` there"
        ) from error
    except asyncio.CancelledError:
        raise LinkError(
            "left without waiting for the end; `potluck status` shows what still runs"
        ) from None
    finally:
        await aio.end(writer)


async def run_alone(settings: Settings, request: local.RunRequest, client: JobClient) -> Summary:
    """Run the job on this machine alone, by a private agent that lives as long as the job."""
    agent = NodeAgent(settings, on_note=lambda text: None, is_private=True)
    running = asyncio.create_task(agent.run())
    ready = asyncio.create_task(agent.ready.wait())
    try:
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await agent.jobs.submit(request, client)
            client.interrupts_by(partial(agent.jobs.interrupt, client))
            ends: set[asyncio.Future[Any]] = {running, client.summary}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # why the agent broke
        return client.summary.result()
    finally:
        for task in (ready, running):
            task.cancel()
        await asyncio.gather(ready, running, return_exceptions=True)
