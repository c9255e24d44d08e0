"""The command's side of ``potluck jobs``, ``wait`` and ``logs``: what the machines of the cluster
know of jobs, put together; logs, read by a cursor.

Of each source of a log the machine with the most lines is read (``read_log``); a job that runs is
followed on its starter, or else its leader, where all lines arrive (``Following``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from potluck._core.cluster.code_store.job_folders import key_of
from potluck._core.cluster.jobs.history import merged, one_job
from potluck._core.cluster.jobs.log import JobLog
from potluck._core.cluster.jobs.summary import Summary, decode_summary
from potluck._core.cluster.members import AgentLink, Machines
from potluck._core.wire import jobs, local
from potluck._core.wire.worker_link import JobState
from potluck.errors import ConfigurationError, LinkError

_POLL_S = 0.5
_PAUSE_S = 0.05
_WAIT_S = 10.0
LOG_ANSWER_S = 20.0
_ANSWER_S = 15.0
_LOST_S = 20.0
"""After the loss of a leader the others need some seconds to agree on the next one."""


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A job. ``state``: its phase (``wire.jobs.Phase``), or ``lost`` if no machine that is there
    runs it or knows its end. ``status`` is its present one; None if it has none."""

    info: jobs.JobInfo
    state: str
    status: JobState | None = None

    @property
    def is_over(self) -> bool:
        """Whether it does not run, and is not about to."""
        return self.state in ("ended", "lost")


async def all_jobs(machines: Machines, text: str = "") -> list[KnownJob]:
    """The jobs whose ids begin with ``text``, the newest first."""
    asked, alive = await asyncio.gather(
        machines.jobs(jobs.HistoryRequest(text)), _running(machines)
    )
    statuses = {each.job: each for each in alive.jobs}
    found = []
    for info in merged(asked):
        state: str = info.phase
        if state != "ended" and info.job not in alive.names:
            state = "lost"
        elif state != "ended" and info.job in statuses:
            state = "running"
        status = None if state == "ended" else statuses.get(info.job)
        found.append(KnownJob(info, state, status))
    return found


async def find_job(machines: Machines, text: str) -> KnownJob:
    """The job that ``text`` names; errors as for ``one_job``."""
    found = await all_jobs(machines, text)
    info = one_job(text, [each.info for each in found])
    return next(each for each in found if each.info is info)


async def _running(machines: Machines) -> local.JobsReply:
    if machines.agent is None:
        return local.JobsReply(())
    reply: local.JobsReply = await machines.agent.ask(local.JobsRequest(), local.JobsReply)
    return reply


async def wait_for(machines: Machines, job: KnownJob) -> KnownJob:
    """The job when it is over; LinkError if this machine's agent ends meanwhile."""
    info = job.info
    while not job.is_over:
        while info.job in (await _running(machines)).names:
            await asyncio.sleep(_POLL_S)
        job = await find_job(machines, info.job)
    return job


async def cancel(machines: Machines, job: KnownJob, *, kills: bool = False) -> None:
    """Have the leader end a job. ConfigurationError if it is over; LinkError with the reason if the
    leader refuses, or does not answer."""
    info = job.info
    if job.is_over or machines.agent is None:
        ended = f"ended with exit code {info.exit_code}" if job.state == "ended" else "is lost"
        raise ConfigurationError(f"job {info.job} {ended}: there is nothing to cancel")
    try:
        await machines.agent.ask_node(
            machines.leader, jobs.CancelJob(info.job, kills), jobs.Kept, timeout_s=_ANSWER_S
        )
    except LinkError as error:
        raise LinkError(
            f"job {info.job}, started on {info.machine}, is not cancelled: {error}"
        ) from error


async def summary_of(machines: Machines, job: KnownJob) -> Summary:
    """The summary of a job that has ended; LinkError if no machine that is there has it."""
    info = job.info
    for each in merged(await machines.jobs(jobs.HistoryRequest(info.job, info.starter))):
        if each.summary:
            return decode_summary(each.summary)
    raise LinkError(why_lost(job))


def why_lost(job: KnownJob) -> str:
    """What is known of a job that does not run and has no end here, in words."""
    info = job.info
    where = f" It ran on {', '.join(info.machines)}." if info.machines else ""
    return (
        f"no machine that is there runs job {info.job} or knows how it ended.{where} Either all "
        "machines that ran it went down with it, or those that know its end are away now: ask "
        "again when they are back"
    )


@dataclass(slots=True)
class Cursor:
    """How far a log was read: by source the time and the number of the last line; the others from
    ``since`` on (microseconds of Unix time; 0: from the beginning). ``is_partial``: what is before
    the first line of a source was not asked for."""

    since: int = 0
    is_partial: bool = False
    after: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def take(self, line: jobs.LogLine) -> int:
        """``line`` was read; how many lines before it were missed, because they are not kept any
        more."""
        before = self._numbers.get(line.source, line.number - 1 if self.is_partial else -1)
        self.after[line.source], self._numbers[line.source] = line.at, line.number
        return max(0, line.number - before - 1) if line.end != "\r" else 0

    def request(self, info: jobs.JobInfo, **options: Any) -> jobs.LogRequest:
        """For the next lines."""
        after = tuple(self.after.items())
        return jobs.LogRequest(info.job, info.starter, after, self.since, **options)


async def read_log(
    machines: Machines, info: jobs.JobInfo, cursor: Cursor, rank: int | None = None
) -> AsyncIterator[jobs.LogLine]:
    """The lines that are kept of a job, by time; those of one ``rank`` if it is given.
    ConfigurationError if no machine that is there has any, or none of that rank; LinkError if one
    is lost meanwhile."""
    readers = [
        _read_part(machines, node, info, cursor, tuple(sources))
        for node, sources in (await places_of(machines, info, rank)).items()
    ]
    heads = [(await anext(reader, None), reader) for reader in readers]
    while ready := [(line.at, place) for place, (line, _) in enumerate(heads) if line is not None]:
        _, place = min(ready)
        line, reader = heads[place]
        assert line is not None
        yield line
        heads[place] = await anext(reader, None), reader


async def places_of(
    machines: Machines, info: jobs.JobInfo, rank: int | None = None
) -> dict[str, list[str]]:
    """By node: the sources that are read there; errors as for ``read_log``."""
    best: dict[str, tuple[int, str, str]] = {}
    asked = await machines.histories(jobs.HistoryRequest(info.job, info.starter))
    for machine, found in asked:
        for source, count, label in (of for each in found for of in each.sources):
            if count > best.get(source, (0, ""))[0]:
                best[source] = count, machine.node, label
    if not best:
        here = {machine.name for machine in machines.all}
        away = ", ".join(name for name in info.machines if name not in here)
        hint = f"; away: {away}" if away else ""
        raise ConfigurationError(
            f"no machine that is there has lines of job {info.job}{hint}. They are on those that "
            f"ran it ({', '.join(info.machines)})"
        )
    ranks = {source: label.split(" ")[0] for source, (_, _, label) in best.items() if label}
    places: dict[str, list[str]] = {}
    for source, (_, node, _) in best.items():
        if rank is None or ranks.get(source) == str(rank):
            places.setdefault(node, []).append(source)
    if not places:
        known = ", ".join(sorted(set(ranks.values()), key=lambda each: (len(each), each)))
        raise ConfigurationError(f"job {info.job} has lines of no rank {rank}; of ranks: {known}")
    return places


async def _read_part(
    machines: Machines, node: str, info: jobs.JobInfo, cursor: Cursor, sources: tuple[str, ...]
) -> AsyncIterator[jobs.LogLine]:
    """The lines of these sources, which are read on one node."""
    agent, own = machines.agent, Cursor(cursor.since, after=dict(cursor.after))
    ask = partial(_read_here, machines) if agent is None else asking(agent, node)
    has_more = True
    while has_more:
        answer = await ask(own.request(info, sources=sources))
        for line in sorted(answer.lines, key=lambda each: each.at):
            own.after[line.source] = line.at
            yield line
        has_more = answer.has_more and bool(answer.lines)


async def _read_here(machines: Machines, request: jobs.LogRequest) -> jobs.LogLines:
    log = JobLog(machines.history.root, lambda text: None)
    lines, has_more = await log.read(
        key_of(request.job, request.starter),
        dict(request.after),
        since=request.since,
        sources=request.sources,
    )
    return jobs.LogLines(tuple(lines), has_more, True)


AskLog = Callable[[jobs.LogRequest], Awaitable[jobs.LogLines]]
"""Asks one node; LinkError if it does not answer."""


def asking(agent: AgentLink, node: str) -> AskLog:
    """Asks ``node`` by way of ``agent``."""
    return lambda request: agent.ask_node(node, request, jobs.LogLines, timeout_s=LOG_ANSWER_S)


async def follow(
    ask: AskLog,
    info: jobs.JobInfo,
    cursor: Cursor,
    show: Callable[[jobs.LogLine], None],
    *,
    is_behind: Callable[[], bool] = lambda: False,
    is_over: Callable[[], bool] = lambda: False,
    sources: tuple[str, ...] = (),
    num_last: int = 0,
) -> None:
    """Show the log of a job that runs, as the node that ``ask`` asks has it, until the job is over
    there, or ``is_over()``: the ``num_last`` lines so far, and those that come. While
    ``is_behind()``, no more are asked for."""
    while True:
        while is_behind():
            await asyncio.sleep(_PAUSE_S)
        wait_s = 0.0 if num_last or is_over() else _WAIT_S
        request = cursor.request(info, wait_s=wait_s, sources=sources, num_last=num_last)
        answer = await ask(request)
        for line in answer.lines:
            show(line)
        if num_last:
            cursor.after |= dict(answer.newest)
            num_last = 0
        elif not answer.lines and not answer.has_more and (answer.is_over or is_over()):
            return


async def attach(
    machines: Machines,
    job: KnownJob,
    cursor: Cursor,
    show: Callable[[jobs.LogLine], None],
    *,
    is_behind: Callable[[], bool] = lambda: False,
    num_last: int = 0,
    rank: int | None = None,
) -> None:
    """``follow`` a job that runs to its end, on its starter or else the machine that leads it; on
    the next of these if one is lost. LinkError if there is none for 20 s, ConfigurationError if
    there is no such ``rank``."""
    agent, info = machines.agent, job.info
    assert agent is not None
    sources: tuple[str, ...] = ()
    if rank is not None:
        places = await places_of(machines, info, rank)
        sources = tuple(source for each in places.values() for source in each)
    lost_at: float | None = None
    while True:
        nodes = [info.starter, *([job.status.node] if job.status else [])]
        for node in dict.fromkeys(nodes):
            before = dict(cursor.after)
            try:
                await follow(
                    asking(agent, node),
                    info,
                    cursor,
                    show,
                    is_behind=is_behind,
                    num_last=0 if cursor.after else num_last,
                    sources=sources,
                )
                return
            except LinkError:
                lost_at = lost_at if cursor.after == before else None
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > _LOST_S:
                    raise
        await asyncio.sleep(_POLL_S)
        job = await find_job(machines, info.job)
        if job.is_over:
            return
