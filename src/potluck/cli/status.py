"""``potluck status``: the nodes of the cluster, and the jobs of the cluster and of this machine."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import structs

from potluck.cli.nodes import ask_jobs, ask_nodes, show_jobs, show_nodes
from potluck.cli.terminal import console_on, print_json, say, table_of
from potluck.errors import PotluckError

if TYPE_CHECKING:
    from potluck._core.settings import Settings
    from potluck._core.wire.local import NodesReply
    from potluck._core.wire.worker_link import JobState

SCHEMA_VERSION = 1


def status(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show the cluster as this machine's agent sees it, its jobs, and the jobs of this machine.

    With --json: {"version": 1, "cluster": {...}, "jobs": [...]}. The cluster (null unless `potluck
    up` runs here) has node, pid, port, namespace, epoch (0: no view), paused (why, or empty),
    nodes, banned, events; each node has node, name, role (leader, member or empty), link (self,
    new, up, suspect, cut, silent, dead, none), host, latency_ms, python, torch, potluck, cores,
    memory_bytes (0: not told yet), accelerators, samples_per_s (of the job here, all workers;
    null: none), limits (what its owner gives to jobs, in words; empty: all), runs_for (whose jobs
    it runs, in words; empty: not told yet), paused (by its owner), engine (native or python).
    Its links are one entry per direction: source, target, latency_s (one way), deviation_s,
    bandwidth (bytes per second; 0: not measured), interface, address (of the source). Its
    stragglers are sentences, one for each node or link that is far behind the best link. Each job
    has job, node, pid, script, started (Unix time), epoch, step, loss, events, samples (null unless
    the script reports them) with committed, total and per_s (null: not known yet), record (what the
    next leader needs for the summary), and workers with worker, rank (-1: not in the group now),
    phase, pid, restarts, device, step, samples_per_s, node (its name, empty for a job of this
    machine alone). In a job of the cluster `node` leads it. Fields may be added, none will change.
    """
    from potluck._core.settings import load_settings

    settings = load_settings()
    cluster, jobs, silent = asyncio.run(_ask_all(settings))
    for reason in silent:
        say(f"potluck: {reason}", err=True)
    if json:
        print_json({"version": SCHEMA_VERSION, "cluster": cluster, "jobs": jobs})
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
) -> tuple[NodesReply | None, list[JobState], list[str]]:
    """The cluster, all jobs (of the cluster and of private agents), and for each agent that did not
    answer a sentence."""
    from potluck._core.cluster.home.node_state import private_agents

    cluster: NodesReply | None = None
    jobs: list[JobState] = []
    silent: list[str] = []
    try:
        cluster = await ask_nodes(settings)
        jobs += await ask_jobs(settings)
    except PotluckError as error:
        silent.append(str(error))
    agents = private_agents(settings.home)
    answers = await asyncio.gather(
        *(ask_jobs(settings, agent) for agent in agents), return_exceptions=True
    )
    for agent, answer in zip(agents, answers, strict=True):
        if isinstance(answer, PotluckError):
            silent.append(f"process {agent.pid}, a `potluck run`: {answer}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            jobs += (structs.replace(job, pid=agent.pid) for job in answer)
    return cluster, jobs, silent


def _show(jobs: list[JobState]) -> None:
    from potluck.cli.job_display import TITLES, cells_of, duration, how_far

    console = console_on()
    for job in jobs:
        loss = "-" if job.loss is None or math.isnan(job.loss) else f"{job.loss:.4f}"
        table = table_of(
            *(*TITLES, "restarts"),
            right=("worker", "rank", "samples/s", "step", "restarts"),
            title=f"{Path(job.script).name} · {job.job} · {_where(job)} · "
            f"{duration(time.time() - job.started)}",
            caption=f"group {job.epoch} · step {max(job.step, 0)} · loss {loss}"
            + ("" if job.samples is None else f"\n{how_far(job.samples)}"),
        )
        for worker in job.workers:
            table.add_row(*cells_of(worker).values(), str(worker.restarts))
        console.print(table)
        for event in job.events[-5:]:
            console.print(f"  {event}", highlight=False)


def _where(job: JobState) -> str:
    return f"process {job.pid}" if job.pid else f"led by node {job.node[:8]}"
