"""What the shell offers after Tab for machines and jobs (``potluck --install-completion``).

A shell waits meanwhile, so the agent has 0.2 s to answer, and there are no errors. Names come from
other machines, and a shell runs what a name like ``$(...)`` says: only plain ones are offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck._core.settings import Settings

_ASK_S = 0.2
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def known_nodes(settings: Settings) -> dict[str, str]:
    """The machines that are known here, from files: the name of each, by its id."""
    from potluck._core.cluster.trust.credentials import load_admissions, load_or_create_identity
    from potluck._core.cluster.trust.known_nodes import KnownNodes
    from potluck._core.transport.credentials import node_id_of

    named = {node: each.name for node, each in load_admissions(settings).roster.entries.items()}
    for each in KnownNodes(settings.home).nodes():
        named[each.node] = each.name or named.get(each.node, "")
    named[node_id_of(load_or_create_identity(settings.home).public_key())] = settings.machine_name
    return named


def complete_node(incomplete: str) -> list[str]:
    """The machines of the cluster whose name, or id, begins so: those of the list and those met
    before, from files, and those that this machine's agent sees now."""
    found: list[str] = []
    with contextlib.suppress(Exception):
        from potluck._core.settings import load_settings

        settings = load_settings()
        named = known_nodes(settings)
        with contextlib.suppress(Exception):
            named |= asyncio.run(_seen(settings))
        for node, name in named.items():
            alone = list(named.values()).count(name) == 1
            found.append(name if alone and _PLAIN.fullmatch(name) else node[:12])
    return _beginning(incomplete, found)


def complete_job(incomplete: str) -> list[str]:
    """The jobs of which this machine's agent knows, whose ids begin so."""
    found: list[str] = []
    with contextlib.suppress(Exception):
        from potluck._core.settings import load_settings

        found = asyncio.run(_jobs(load_settings()))
    return _beginning(incomplete, found)


def _beginning(incomplete: str, found: Iterable[str]) -> list[str]:
    begun = {each for each in found if each.startswith(incomplete)}
    return sorted(filter(_PLAIN.fullmatch, begun))


async def _seen(settings: Settings) -> dict[str, str]:
    from potluck._core.cluster.links.local import ask_agent
    from potluck._core.wire.local import NodesReply, NodesRequest

    reply = await ask_agent(settings, NodesRequest(), timeout_s=_ASK_S)
    nodes = reply.nodes if isinstance(reply, NodesReply) else ()
    return {each.node: each.name for each in nodes}


async def _jobs(settings: Settings) -> list[str]:
    from potluck._core.cluster.links.local import ask_agent
    from potluck._core.wire.local import JobsReply, JobsRequest

    reply = await ask_agent(settings, JobsRequest(), timeout_s=_ASK_S)
    if not isinstance(reply, JobsReply):
        return []
    return [*(each.job for each in reply.jobs), *reply.names]
