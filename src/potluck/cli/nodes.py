"""The nodes, links and jobs of a cluster for ``potluck status``: requests to the agent, tables, and
the machine that a name or id means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.completion import complete_node, known_nodes
from potluck.cli.terminal import console_on, table_of
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from potluck._core.cluster.home.node_state import AgentRecord
    from potluck._core.settings import Settings
    from potluck._core.wire.local import NodeInfo, NodesReply, Reply, Request
    from potluck._core.wire.worker_link import JobState


NodeName = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="The machine's name, its id, or at least the first 8 digits of its id.",
        autocompletion=complete_node,
    ),
]


def when_others_learn(settings: Settings) -> str:
    """A sentence for a change of the list that was made on this machine."""
    from potluck._core.cluster.home.node_state import find_agent

    if find_agent(settings.home) is None:
        return "The other machines learn of it when `potluck up` runs here."
    return "Machines that are switched off learn of it when they come back."


def find_known(settings: Settings, text: str) -> str:
    """The id of the machine that ``text`` names: a name, an id, or the beginning of an id.
    ConfigurationError if that is none of the machines that are known here, or several."""
    from potluck._core.cluster.names import find_node

    return find_node(text, known_nodes(settings).items())


_ANSWER_S = 3.0


async def ask_nodes(settings: Settings) -> NodesReply | None:
    """The cluster as this machine's agent sees it; None if no agent runs. PotluckError if the agent
    does not answer within 3 s."""
    from potluck._core.wire.local import NodesReply, NodesRequest

    answer = await _ask(settings, NodesRequest())
    assert answer is None or isinstance(answer, NodesReply)
    return answer


async def ask_jobs(settings: Settings, agent: AgentRecord | None = None) -> tuple[JobState, ...]:
    """The jobs of ``agent``, or of this machine's agent; empty if no agent runs. PotluckError if
    the agent does not answer within 3 s."""
    from potluck._core.wire.local import JobsReply, JobsRequest

    answer = await _ask(settings, JobsRequest(), agent)
    assert answer is None or isinstance(answer, JobsReply)
    return () if answer is None else answer.jobs


async def _ask(
    settings: Settings, request: Request, agent: AgentRecord | None = None
) -> Reply | None:
    from potluck._core.cluster.links.local import ask_agent

    try:
        return await ask_agent(settings, request, timeout_s=_ANSWER_S, agent=agent)
    except ConfigurationError:
        return None


def show_jobs(jobs: Sequence[JobState]) -> None:
    """Print a table of jobs: epoch, step, number of ranks, and nodes of each."""
    if not jobs:
        return
    numbers = ("epoch", "step", "world")
    table = table_of("job", *numbers, "nodes", right=numbers, title="jobs")
    for job in jobs:
        members = [worker for worker in job.workers if worker.rank >= 0]
        nodes = dict.fromkeys(worker.node or "this one" for worker in members)
        table.add_row(
            job.job, str(job.epoch), str(max(job.step, 0)), str(len(members)), ", ".join(nodes)
        )
    console_on().print(table)


def show_nodes(cluster: NodesReply) -> None:
    """Print tables of the nodes and of the links between them, with the last events below."""
    console = console_on()
    state = f"paused: {cluster.paused}" if cluster.paused else f"epoch {cluster.epoch}"
    table = table_of(
        *("node", "role", "link", "address", "cores", "memory", "devices", "samples/s"),
        right=("cores", "memory", "samples/s"),
        title=f"cluster {cluster.namespace[:8]} · {state}",
        caption=_caption(cluster),
    )
    names = {each.node: label(each.node, cluster) for each in cluster.nodes}
    for each in cluster.nodes:
        rate = each.samples_per_s
        table.add_row(
            names[each.node],
            each.role or "-",
            each.link,
            each.host or "-",
            str(each.cores) if each.memory_bytes else "-",
            f"{each.memory_bytes / 2**30:.0f} GiB" if each.memory_bytes else "-",
            devices(each.accelerators) if each.memory_bytes else "-",
            f"{rate:,.0f}" if rate else "-",
        )
    console.print(table)
    _show_links(cluster, names, console)
    lines = [
        *_versions(cluster.nodes, names),
        *(
            f"{names[each.node]}: its potluck is too old for this machine's jobs. Enter there: "
            f"{each.upgrade}"
            for each in cluster.nodes
            if each.upgrade
        ),
        _sites(cluster.nodes, names),
        _engines(cluster.nodes, names),
        *(f"{names[each.node]}: {text}" for each in cluster.nodes if (text := _terms(each))),
        *cluster.events[-5:],
    ]
    for line in filter(None, lines):
        console.print(f"  {line}", highlight=False)


def _versions(nodes: Sequence[NodeInfo], names: dict[str, str]) -> Iterator[str]:
    """Which nodes have which versions, in words; nothing if all have the same."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for each in nodes:
        if each.potluck:
            versions = (each.python, each.torch, each.potluck)
            found.setdefault(versions, []).append(names[each.node])
    for (python, torch, potluck), on in sorted(found.items()) if len(found) > 1 else ():
        yield f"{', '.join(on)}: Python {python}, potluck {potluck}, torch {torch or 'none'}"


def _sites(nodes: Sequence[NodeInfo], names: dict[str, str]) -> str:
    """Which nodes stand where, in words; empty if nobody said of any."""
    found: dict[str, list[str]] = {}
    for each in sorted(nodes, key=lambda each: (not each.site, each.site)):
        if each.memory_bytes:  # it has told of itself
            found.setdefault(each.site, []).append(names[each.node])
    if not any(found):
        return ""
    unnamed = "no site is set (`potluck up --site`), so each counts as one by itself"
    return "; ".join(f"{site or unnamed}: {', '.join(on)}" for site, on in found.items())


def _engines(nodes: Sequence[NodeInfo], names: dict[str, str]) -> str:
    """Which engine each node has, in words."""
    found: dict[str, list[str]] = {}
    for each in nodes:
        if each.engine:
            found.setdefault(each.engine, []).append(names[each.node])
    hint = "; `potluck doctor` there says why it is not native" if "python" in found else ""
    parts = [f"{engine} on {', '.join(found[engine])}" for engine in sorted(found)]
    return f"engine: {'; '.join(parts)}{hint}" if parts else ""


def _terms(node: NodeInfo) -> str:
    """What the owner of ``node`` does not give to all members; empty if there is nothing."""
    runs_for = "" if node.runs_for in ("", "all") else f"runs jobs of: {node.runs_for}"
    limits = f"jobs get {node.limits}" if node.limits else ""
    paused = "paused by its owner" if node.paused else ""
    return "; ".join(filter(None, (paused, limits, runs_for)))


def _caption(cluster: NodesReply) -> str | None:
    if cluster.is_open:
        return "open: whoever holds the secret is in; `potluck lock` closes it"
    return f"{len(cluster.banned)} banned" if cluster.banned else None


def _show_links(cluster: NodesReply, names: dict[str, str], console: Console) -> None:
    """Print a table of links, with a row for both directions between two nodes."""
    links = {(each.source, each.target): each for each in cluster.links}
    pairs = [(a, b) for a, b in links if a < b or (b, a) not in links]
    if not pairs:
        return
    numbers = ("latency", "there", "back")
    table = table_of("between", *numbers, "interfaces", right=numbers, title="links")
    for a, b in sorted(pairs, key=lambda pair: (names[pair[0]], names[pair[1]])):
        there, back = links[a, b], links.get((b, a))
        ends = [there.interface or "?", (back.interface if back else "") or "?"]
        table.add_row(
            f"{names[a]} \u2192 {names[b]}",
            milliseconds(there.latency_s, there.deviation_s),
            rate_of(there.bandwidth),
            rate_of(back.bandwidth if back else 0.0),
            ends[0] if ends[0] == ends[1] else " / ".join(ends),
        )
    console.print(table)
    for straggler in cluster.stragglers:
        console.print(f"  straggler: {straggler}", highlight=False)


def label(node: str, cluster: NodesReply) -> str:
    """The name of ``node``; the beginning of its id is added if the name is empty or not unique."""
    names = {each.node: each.name for each in cluster.nodes}
    name = names.get(node, "")
    is_taken = sum(other == name for other in names.values()) > 1
    return f"{name} {node[:8]}".strip() if is_taken or not name else name


def devices(accelerators: tuple[str, ...]) -> str:
    """The text of a node's accelerators: ``cpu``, ``NVIDIA H100``, ``2 x NVIDIA H100``."""
    counts = {name: accelerators.count(name) for name in accelerators}
    texts = [name if number == 1 else f"{number} x {name}" for name, number in counts.items()]
    return ", ".join(texts) or "cpu"


def milliseconds(seconds: float, deviation_s: float = 0.0) -> str:
    """The text of a latency: ``0.3 ms``, or ``50 ± 12.0 ms`` if the deviation is above 0.1 ms;
    ``-`` if it was not measured."""
    if not seconds:
        return "-"
    value = f"{1000 * seconds:.1f}" if seconds < 0.01 else f"{1000 * seconds:.0f}"
    spread = f" \u00b1 {1000 * deviation_s:.1f}" if deviation_s > 1e-4 else ""
    return f"{value}{spread} ms"


def rate_of(bytes_per_s: float) -> str:
    """The text of a bandwidth: ``940 Mbit/s``, ``2.3 Gbit/s``; ``-`` if it was not measured."""
    if not bytes_per_s:
        return "-"
    bits = 8 * bytes_per_s
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            value = bits / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{bits:.0f} bit/s"
