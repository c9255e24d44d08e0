"""``potluck init``: create this machine's key and the cluster's secret."""

from __future__ import annotations

from typing import Annotated

import typer

from potluck.cli.files import print_json


def init(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Found a cluster: this machine's key, a secret, and a list, unless they exist.

    All are files in ~/.potluck that only you can read. This machine is the founder: the first
    entry, and an admin, of the list of admitted keys. To add a machine, run `potluck pair` here and
    `potluck join` there. Existing files stay as they are, so the command may be repeated.

    With --json: {"version": 1, "node", "namespace", "home", "made"}. ``namespace`` is the public
    name of the cluster, ``made`` whether the secret is new. The secret is never shown.
    """
    from potluck.cluster.trust.credentials import load_node_credentials
    from potluck.cluster.trust.secret import SECRET_FILE
    from potluck.settings import load_settings

    settings = load_settings()
    given = "POTLUCK_PSK" if settings.psk is not None else "POTLUCK_PASSPHRASE"
    is_given = settings.psk is not None or settings.passphrase is not None
    path = settings.home / SECRET_FILE
    existed = path.exists()
    credentials = load_node_credentials(settings)
    made = not is_given and not existed
    if json:
        facts = {
            "version": 1,
            "node": credentials.node_id,
            "namespace": credentials.namespace,
            "home": str(settings.home),
            "made": made,
        }
        print_json(facts)
        return
    if is_given:
        typer.echo(f"The cluster's secret comes from {given}.")
    else:
        typer.echo(f"The cluster's secret {'was made' if made else 'is there already'}: {path}")
    typer.echo(f"This machine is node {credentials.node_id[:12]} of it.")
    if not is_given:
        typer.echo("To bring another machine in, run here: potluck pair")
