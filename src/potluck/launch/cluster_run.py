"""``potluck run`` where this machine is part of a cluster: its agent is asked to run the job."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from potluck.cluster.links.local import call_agent, read_reply
from potluck.errors import ConfigurationError, LinkError
from potluck.launch.job import Options, Watcher, signals
from potluck.launch.summary import Summary
from potluck.settings import Settings
from potluck.transport import aio
from potluck.wire import control, jobs, local


class ClusterRun:
    """A job of the cluster, as the command that started it sees it (``Watched``)."""

    def __init__(self, script: str) -> None:
        self.summary: Summary | None = None
        self._status = control.StatusReply("", "", 0, script, 0.0, 0, -1, None, (), ())
        self._writer: asyncio.StreamWriter | None = None
        self._num_interrupts = 0
        self._main: asyncio.Task[object] | None = None

    @property
    def workers(self) -> tuple[str, ...]:
        """What stands in front of their lines."""
        return tuple(f"{each.worker} {each.node}" for each in self._status.workers)

    def status(self) -> control.StatusReply:
        """The job as the leader told of it last."""
        return self._status

    def interrupt(self, number: int) -> None:
        """End the job everywhere; when that is asked for the third time, leave."""
        self._num_interrupts += 1
        if self._writer is not None:
            self._writer.write(local.REQUEST.encode(local.InterruptRequest(number)))
        if self._num_interrupts >= 3 and self._main is not None:
            self._main.cancel()

    async def run(self, settings: Settings, request: local.RunRequest, watcher: Watcher) -> None:
        """Until the job is over. LinkError if the agent goes away meanwhile; ConfigurationError,
        with the reason, if the cluster does not take the job."""
        self._main = asyncio.current_task()
        reader, self._writer = await call_agent(settings)
        try:
            self._writer.write(local.REQUEST.encode(request))
            while self.summary is None:
                self._take(await read_reply(reader), watcher)
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
            await aio.end(self._writer)

    def _take(self, reply: local.Reply, watcher: Watcher) -> None:
        match reply:
            case jobs.JobNote(_, text):
                watcher.note(text)
            case jobs.Shown(_, worker, stream, text):
                watcher.line(worker, stream, text)
            case jobs.JobStatus(status):
                self._status = status
            case jobs.JobEnded(_, _, summary):
                self.summary = msgspec.json.decode(summary, type=Summary)
            case local.Outcome(_, text):
                raise ConfigurationError(text)
            case _:
                pass


def run_on_cluster(options: Options, settings: Settings, watcher: Watcher) -> Summary:
    """Run the job on this machine's cluster, to its end; see ``run_job``."""
    options.check()
    return asyncio.run(_run(options, settings, watcher))


async def _run(options: Options, settings: Settings, watcher: Watcher) -> Summary:
    script = options.script.absolute()
    request = local.RunRequest(
        folder=str(script.parent),
        script=script.name,
        arguments=options.arguments,
        directory=str(Path.cwd()),
        per_node=options.num_workers,
        max_nodes=options.max_nodes,
        max_restarts=options.max_restarts,
        peer_timeout_s=settings.peer_timeout_s,
        chaos="; ".join(str(fault) for fault in options.chaos.waiting),
        wire=settings.wire,
        restarts_worlds=options.restarts_worlds,
        wait_s=options.wait_s,
        min_workers=options.min_workers,
        min_nodes=options.min_nodes,
    )
    run = ClusterRun(str(options.script))
    watcher.begin(run)
    try:
        with signals(run.interrupt):
            await run.run(settings, request, watcher)
    finally:
        watcher.end()
    assert run.summary is not None
    return run.summary
