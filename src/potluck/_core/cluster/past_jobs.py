"""The command's side of ``potluck jobs``, ``wait`` and their siblings: what the machines of the
cluster know of jobs, put together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from potluck._core.cluster.jobs.history import merged, one_job
from potluck._core.cluster.jobs.summary import Summary
from potluck._core.cluster.members import Machines
from potluck._core.wire import jobs, local
from potluck._core.wire.format import decoded
from potluck._core.wire.worker_link import JobState
from potluck.errors import LinkError

_POLL_S = 0.5
_summaries = msgspec.json.Decoder(Summary)


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


async def summary_of(machines: Machines, job: KnownJob) -> Summary:
    """The summary of a job that has ended; LinkError if no machine that is there has it."""
    info = job.info
    for each in merged(await machines.jobs(jobs.HistoryRequest(info.job, info.starter))):
        if each.summary:
            return decoded(_summaries, each.summary, "the summary of a job")
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
