"""The cluster's part of ``potluck status``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.settings import Settings
    from potluck.wire.control import StatusReply
    from potluck.wire.local import NodesReply

_ANSWER_S = 3.0


async def ask_nodes(settings: Settings) -> NodesReply | None:
    """What this machine's agent knows of the cluster; None if none runs. PotluckError if it does
    not answer."""
    from potluck.cluster.local_link import ask_agent
    from potluck.wire.local import NodesReply, NodesRequest

    try:
        answer = await ask_agent(settings, NodesRequest(), timeout_s=_ANSWER_S)
    except ConfigurationError:
        return None
    assert isinstance(answer, NodesReply)
    return answer


async def ask_jobs(settings: Settings) -> tuple[StatusReply, ...]:
    """What this machine's agent knows of the cluster's jobs; none if none runs."""
    from potluck.cluster.local_link import ask_agent
    from potluck.wire.local import JobsReply, JobsRequest

    try:
        answer = await ask_agent(settings, JobsRequest(), timeout_s=_ANSWER_S)
    except ConfigurationError:
        return ()
    assert isinstance(answer, JobsReply)
    return answer.jobs


def show_jobs(jobs: Sequence[StatusReply]) -> None:
    """One line for each job: which, how far, and on which nodes."""
    from rich.console import Console
    from rich.table import Table

    if not jobs:
        return
    table = Table(title="jobs", title_justify="left")
    for title in ("job", "epoch", "step", "world", "nodes"):
        table.add_column(title, justify="left" if title in ("job", "nodes") else "right")
    for job in jobs:
        members = [worker for worker in job.workers if worker.rank >= 0]
        nodes = dict.fromkeys(worker.node or "this one" for worker in members)
        table.add_row(
            job.job, str(job.epoch), str(max(job.step, 0)), str(len(members)), ", ".join(nodes)
        )
    Console().print(table)


def show_nodes(cluster: NodesReply) -> None:
    """As a table, with the last events below it."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    state = f"paused: {cluster.paused}" if cluster.paused else f"epoch {cluster.epoch}"
    table = Table(
        title=f"cluster {cluster.namespace[:8]} · {state}",
        caption=f"{len(cluster.banned)} banned" if cluster.banned else None,
        title_justify="left",
        caption_justify="left",
    )
    for title in ("node", "name", "role", "link", "address", "latency", "python", "torch"):
        table.add_column(title, justify="right" if title == "latency" else "left")
    for each in cluster.nodes:
        latency = f"{each.latency_ms:.1f} ms" if each.latency_ms else "-"
        table.add_row(
            each.node[:8],
            each.name or "-",
            each.role or "-",
            each.link,
            each.host or "-",
            latency,
            each.python or "-",
            each.torch or "-",
        )
    console.print(table)
    for event in cluster.events[-5:]:
        console.print(f"  {event}", markup=False, highlight=False)
