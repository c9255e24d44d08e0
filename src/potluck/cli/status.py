"""``potluck status``: the cluster, its jobs and those of this machine, and how they are doing."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.nodes import ask_jobs, ask_nodes, show_jobs, show_nodes
from potluck.errors import PotluckError

if TYPE_CHECKING:
    from potluck.cluster.home.runfile import RunRecord
    from potluck.settings import Settings
    from potluck.transport.credentials import Credentials
    from potluck.wire.control import StatusReply
    from potluck.wire.local import NodesReply

SCHEMA_VERSION = 1
_ANSWER_S = 3.0


def status(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show the cluster as this machine's agent sees it, its jobs, and the jobs of this machine.

    With --json: {"version": 1, "cluster": {...}, "jobs": [...]}. The cluster (null unless `potluck
    up` runs here) has node, pid, port, namespace, epoch (0: no view), paused (why, or empty),
    nodes, banned, events; each node has node, name, role (leader, member or empty), link (self,
    new, up, suspect, cut, silent, dead, none), host, latency_ms, python, torch, potluck, cores,
    memory_bytes (0: not told yet), accelerators, samples_per_s (of the job here, all workers;
    null: none). Its links are one entry per direction: source, target, latency_s (one way),
    deviation_s, bandwidth (bytes per second; 0: not measured), interface, address (of the
    source). Its stragglers are sentences, one for each node or link that is far behind the best
    link. Each job has job, node, pid, script, started (Unix time), epoch, step, loss, events,
    wire (sealed or plain), samples (null unless the script reports them) with committed, total
    and per_s (null: not known yet), and workers with worker, rank (-1: not in the group now),
    phase, pid, restarts, device, step, samples_per_s, node (its name, empty for a job of this
    machine alone). In a job of the cluster `node` leads it. Fields may be added, none will change.
    """
    from potluck.settings import load_settings

    try:
        settings = load_settings()
        cluster, jobs, silent = asyncio.run(_ask_all(settings))
    except PotluckError as error:
        typer.echo(f"potluck: {error}", err=True)
        raise typer.Exit(2) from None
    for reason in silent:
        typer.echo(f"potluck: {reason}", err=True)
    if json:
        import msgspec

        text = msgspec.json.encode({"version": SCHEMA_VERSION, "cluster": cluster, "jobs": jobs})
        typer.echo(msgspec.json.format(text, indent=2).decode())
        return
    if cluster is not None:
        show_nodes(cluster)
        show_jobs(jobs)
    if jobs:
        _show(jobs)
    elif cluster is None:
        typer.echo("No job runs here. Start one with: potluck run --workers 4 train.py")


async def _ask_all(
    settings: Settings,
) -> tuple[NodesReply | None, list[StatusReply], list[str]]:
    jobs, silent = await _ask(settings)
    try:
        return await ask_nodes(settings), [*await ask_jobs(settings), *jobs], silent
    except PotluckError as error:
        return None, jobs, [*silent, str(error)]


async def _ask(settings: Settings) -> tuple[list[StatusReply], list[str]]:
    """What each running agent of this home answers, and who did not."""
    from potluck.cluster.home.runfile import running_agents
    from potluck.cluster.trust.credentials import load_credentials

    records = running_agents(settings.home)
    if not records:
        return [], []
    credentials = load_credentials(settings)
    answers = await asyncio.gather(
        *(_ask_one(record, credentials) for record in records), return_exceptions=True
    )
    jobs, silent = [], []
    for record, answer in zip(records, answers, strict=True):
        if isinstance(answer, PotluckError | TimeoutError | OSError):
            why = str(answer) or "it did not answer in time"
            silent.append(f"the agent of {record.job} (process {record.pid}): {why}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            jobs.append(answer)
    return jobs, silent


async def _ask_one(record: RunRecord, credentials: Credentials) -> StatusReply:
    from potluck.cluster.links.control import ControlLink
    from potluck.errors import ProtocolError
    from potluck.transport import aio
    from potluck.wire import control
    from potluck.wire.messages import Hello

    hello = Hello(kind="control", namespace=credentials.namespace, job=record.job)
    async with asyncio.timeout(_ANSWER_S):
        reader, writer, _ = await aio.connect(record.host, record.port, hello, credentials)
        link = ControlLink(reader, writer, received=control.FROM_AGENT, sent=control.TO_AGENT)
        try:
            link.send(control.StatusRequest())
            answer = await link.receive()
        finally:
            await link.close()
    if not isinstance(answer, control.StatusReply):
        raise ProtocolError(f"it answered with {type(answer).__name__}")
    return answer


def _show(jobs: list[StatusReply]) -> None:
    from rich.console import Console
    from rich.table import Table

    from potluck.cli.job_display import duration, how_far, number
    from potluck.wire.messages import PLAIN

    console = Console(markup=False)
    for job in jobs:
        loss = "-" if job.loss is None or math.isnan(job.loss) else f"{job.loss:.4f}"
        table = Table(
            title=f"{Path(job.script).name} · {job.job} · {_where(job)} · "
            f"{duration(time.time() - job.started)}",
            caption=f"group {job.epoch} · step {max(job.step, 0)} · loss {loss}"
            + (" · links not encrypted (plain)" if job.wire == PLAIN else "")
            + ("" if job.samples is None else f"\n{how_far(job.samples)}"),
            title_justify="left",
            caption_justify="left",
        )
        for title in ("worker", "rank", "state", "device", "samples/s", "step", "restarts"):
            table.add_column(title, justify="left" if title in ("state", "device") else "right")
        for worker in job.workers:
            table.add_row(
                f"{worker.worker} {worker.node}".strip(),
                str(worker.rank) if worker.rank >= 0 else "-",
                worker.phase,
                worker.device or "-",
                number(worker.samples_per_s),
                str(worker.step) if worker.step >= 0 else "-",
                str(worker.restarts),
            )
        console.print(table)
        for event in job.events[-5:]:
            console.print(f"  {event}", highlight=False)


def _where(job: StatusReply) -> str:
    return f"process {job.pid}" if job.pid else f"led by node {job.node[:8]}"
