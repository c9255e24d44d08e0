"""``potluck ban``: who is kept out although it holds the secret."""

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
        str, typer.Option(help="Why; shown to the node and in logs.", show_default=False)
    ] = "",
) -> None:
    """Refuse a node from now on, although it holds the cluster's secret.

    Takes effect at once for new connections of this machine's agent and workers; a running agent
    (`potluck up`) ends its link to the node and tells the other nodes. A ban is for good. A machine
    that holds the secret can make itself a new id: to be sure, run `potluck rotate` afterwards. To
    take the machine back, remove ~/.potluck/node_keypair there, and let it join again.
    """
    from potluck.cluster.trust.credentials import load_credentials
    from potluck.cluster.trust.store import TrustStore
    from potluck.settings import load_settings

    settings = load_settings()
    store = TrustStore(settings.home)
    found = store.find(node)
    if found == load_credentials(settings).node_id:
        raise ConfigurationError("this is the node you are on: it can't ban itself")
    is_new = store.ban(found, reason)
    typer.echo(f"Node {found[:12]} is banned{'' if is_new else ' already'} on this machine.")
