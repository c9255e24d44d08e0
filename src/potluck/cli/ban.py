"""``potluck ban`` and ``potluck unban``: who is kept out although it holds the secret."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from potluck.errors import ConfigurationError, PotluckError

if TYPE_CHECKING:
    from potluck.cluster.trust import TrustStore
    from potluck.settings import Settings

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

    Takes effect at once for new connections of this machine's agent and workers. Whoever holds the
    secret can make itself a new id: to be sure, change the secret afterwards with `potluck rotate`.
    """
    from potluck.cluster.credentials import load_credentials

    try:
        store, settings = _store()
        found = store.find(node)
        if found == load_credentials(settings).node_id:
            raise ConfigurationError("this is the node you are on: it can't ban itself")
        is_new = store.ban(found, reason)
    except PotluckError as error:
        typer.echo(f"potluck: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"Node {found[:12]} is banned{'' if is_new else ' already'} on this machine.")


def unban(node: _Node) -> None:
    """Let a banned node in again."""
    try:
        store, _ = _store()
        found = store.find(node)
        was_banned = store.unban(found)
    except PotluckError as error:
        typer.echo(f"potluck: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"Node {found[:12]} {'may come in again' if was_banned else 'was not banned'}.")


def _store() -> tuple[TrustStore, Settings]:
    from potluck.cluster.trust import TrustStore
    from potluck.settings import load_settings

    settings = load_settings()
    return TrustStore(settings.home), settings
