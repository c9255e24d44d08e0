"""The command's side of ``potluck attach --rank``: what a rank of a job writes is shown, what is
typed goes to its debugger (``jobs/process.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from potluck._core.background import stop
from potluck._core.cluster.links.local import running_agent
from potluck._core.cluster.members import reached
from potluck._core.cluster.past_jobs import Cursor, attach, find_job
from potluck._core.settings import Settings
from potluck._core.wire import jobs
from potluck.errors import ConfigurationError, LinkError

_ANSWER_S = 10.0
_RENEW_S = 2.0
_LAST_LINES = 30


async def debug(
    settings: Settings,
    text: str,
    rank: int,
    show: Callable[[jobs.LogLine, int], None],
    typed: Callable[[], Awaitable[bytes]],
) -> None:
    """Debug ``rank`` of the job that ``text`` names until what is ``typed`` ends, or the rank does.
    Whatever ends this, the script goes on then. ``show(line, missed)`` gets what the rank writes,
    and how many lines before it are not kept any more.

    ConfigurationError if the rank does not run, or is not to be debugged here; LinkError if its
    machine does not answer for 10 s."""
    async with reached(settings, running_agent(settings)) as machines:
        job, agent = await find_job(machines, text), machines.agent
        assert agent is not None
        request = jobs.DebugRequest(job.info.job, rank, secrets.token_hex(8))

        async def ask(node: str, **what: Any) -> bool:
            asked = msgspec.structs.replace(request, **what)
            return (await agent.ask_node(node, asked, jobs.JobRuns, timeout_s=_ANSWER_S)).runs

        async def place() -> str:
            why = "it runs on no machine that is there"
            for machine in machines.all:
                try:
                    if await ask(machine.node):
                        return machine.node
                except LinkError as error:
                    why = f"{machine.name}: {error}"
            raise ConfigurationError(f"rank {rank} of job {job.info.job} is not debugged: {why}")

        async def type_all() -> None:
            while (text := await typed()) and await ask(node, typed=text):
                pass

        async def hold() -> None:
            while await ask(node):
                await asyncio.sleep(_RENEW_S)

        def show_own(line: jobs.LogLine) -> None:
            missed = cursor.take(line)
            if line.label.partition(" ")[0] in ("", str(rank)):
                show(line, missed)

        node, cursor = await place(), Cursor(is_partial=True)
        following = attach(machines, job, cursor, show_own, num_last=_LAST_LINES)
        tasks = [asyncio.create_task(each) for each in (following, type_all(), hold())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            await stop(*tasks)
            with contextlib.suppress(LinkError):
                await ask(node, leaves=True)
