"""The machine that a person means by a name, an id, or the beginning of an id; when the others
hear of a change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck._core.settings import Settings


def when_others_learn(settings: Settings) -> str:
    """A sentence for a change of the list that was made on this machine."""
    from potluck._core.cluster.home.node_state import find_agent

    if find_agent(settings.home) is None:
        return "The other machines learn of it when `potluck up` runs here."
    return "Machines that are switched off learn of it when they come back."


def find_known(settings: Settings, text: str) -> str:
    """The id of the machine that ``text`` names: a name, an id, or the beginning of an id.
    ConfigurationError if that is none of the machines that are known here, or several."""
    from potluck._core.cluster.trust.credentials import load_admissions
    from potluck._core.cluster.trust.identity import load_or_create_identity
    from potluck._core.cluster.trust.known_nodes import KnownNodes, find_node
    from potluck._core.transport.credentials import node_id_of

    named = {node: each.name for node, each in load_admissions(settings).roster.entries.items()}
    for each in KnownNodes(settings.home).nodes():
        named[each.node] = each.name or named.get(each.node, "")
    named[node_id_of(load_or_create_identity(settings.home).public_key())] = settings.machine_name
    return find_node(text, named.items())
