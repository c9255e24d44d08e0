"""``potluck join``: receive the cluster's secret from the machine that shows a pairing code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.files import print_json
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck.settings import Settings
    from potluck.wire.pairing import Handover


def join(
    code: Annotated[
        str,
        typer.Argument(
            metavar="CODE",
            help="The code that `potluck pair` shows on a machine of the cluster: 274-831-927.",
            show_default=False,
        ),
    ],
    address: Annotated[
        str,
        typer.Option(
            help="HOST:PORT that `potluck pair` shows, for networks without multicast.",
            show_default=False,
        ),
    ] = "",
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Leave the cluster that this machine belongs to."),
    ] = False,
    wait: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds to search for the other machine.")
    ] = 60,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Add this machine to a cluster, with the code that a machine of the cluster shows.

    Run `potluck pair` on that machine first, then `potluck join` here. The secret of the cluster is
    stored in ~/.potluck, where only you can read it. If this machine already has a secret,
    --replace is needed; the old secret is then kept in a file beside the new one.

    With --json: {"version": 1, "node", "name", "namespace", "kept"}: id and name of the machine
    that gave the secret, the cluster's public name, and the file that holds the old secret (or
    null).
    """
    from potluck.cluster.home.node_state import find_agent
    from potluck.cluster.trust.keyring import replace_secret
    from potluck.cluster.trust.store import TrustStore
    from potluck.settings import load_settings
    from potluck.transport.credentials import namespace_of

    try:
        settings = load_settings()
        _check(settings, replace)
        given = asyncio.run(_ask(settings, code, address, wait))
        kept = replace_secret(settings.home, given.psk)
        TrustStore(settings.home).meet(given.node, given.name)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if json:
        facts = {
            "version": 1,
            "node": given.node,
            "name": given.name,
            "namespace": namespace_of(given.psk),
            "kept": str(kept) if kept else None,
        }
        print_json(facts)
        return
    typer.echo(f"This machine is in the cluster of {given.name or 'node ' + given.node[:12]} now.")
    if kept is not None:
        typer.echo(f"The secret of its former cluster is in {kept}.")
    if find_agent(settings.home) is not None:
        typer.echo("Its agent still serves the former cluster: end `potluck up`, start it again.")
    else:
        typer.echo("To take part, run: potluck up")


def _check(settings: Settings, replace: bool) -> None:
    """ConfigurationError if this machine can't store a new secret. Checked first, since an attempt
    to join spends the code."""
    from potluck.cluster.trust.secret import SECRET_FILE

    if settings.psk is not None or settings.passphrase is not None:
        raise ConfigurationError(
            "POTLUCK_PSK or POTLUCK_PASSPHRASE gives this machine its secret, so it can't take "
            "over another; unset the variable first"
        )
    path = settings.home / SECRET_FILE
    if path.exists() and not replace:
        raise ConfigurationError(
            f"this machine already has a cluster secret ({path}). To leave that cluster and join "
            "the other: potluck join --replace CODE"
        )


async def _ask(settings: Settings, text: str, address: str, wait_s: float) -> Handover:
    from potluck.cluster.discovery.configured import all_finders
    from potluck.cluster.discovery.static import parse_peers
    from potluck.cluster.trust.identity import load_or_create_identity
    from potluck.cluster.trust.pairing import parse_code
    from potluck.cluster.trust.pairing_link import take_over
    from potluck.transport.credentials import node_id_of
    from potluck.wire.pairing import Newcomer

    code = parse_code(text)
    node = node_id_of(load_or_create_identity(settings.home).public_key())
    me = Newcomer(node, settings.machine_name)
    if address:
        places = parse_peers(address, 0) if ":" in address else ()
        if len(places) != 1 or not places[0][1]:
            raise ConfigurationError(
                f"--address {address!r}: write HOST:PORT as `potluck pair` shows it"
            )
        return await take_over(code, me, [], address=places[0])
    return await take_over(code, me, all_finders(settings), timeout_s=wait_s)
