"""``potluck ban``: exclude a node although it holds the cluster's secret."""

from __future__ import annotations

from typing import Annotated

import typer

from potluck.errors import ConfigurationError

_Node = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="The node's id, or at least its first 8 digits if it is known here.",
        show_default=False,
    ),
]


def ban(
    node: _Node,
    reason: Annotated[
        str, typer.Option(help="Reason, shown to the node and in logs.", show_default=False)
    ] = "",
) -> None:
    """Refuse a node from now on, although it holds the cluster's secret.

    The ban takes effect at once for new connections of this machine's agent and workers. A running
    agent (`potluck up`) ends its link to the node and tells the other nodes. A ban can't be lifted.
    A machine that holds the secret can make itself a new id: run `potluck rotate` afterwards, so
    that it loses the secret. To readmit the machine, remove ~/.potluck/node_keypair there, and
    run `potluck pair` and `potluck join` again.
    """
    from potluck.cluster.trust.credentials import load_credentials
    from potluck.cluster.trust.store import TrustStore
    from potluck.settings import load_settings

    settings = load_settings()
    store = TrustStore(settings.home)
    found = store.find(node)
    if found == load_credentials(settings).node_id:
        raise ConfigurationError(f"node {found[:12]} is this machine; run the command on another")
    is_new = store.ban(found, reason)
    typer.echo(f"Node {found[:12]} is banned{'' if is_new else ' already'} on this machine.")
