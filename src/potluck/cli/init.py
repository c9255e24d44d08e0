"""``potluck init``: create this machine's key and the cluster's secret."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.nodes import when_others_learn
from potluck.cli.terminal import print_json

if TYPE_CHECKING:
    from potluck._core.cluster.trust.admissions import Admissions
    from potluck._core.settings import Settings
    from potluck._core.wire.admissions import Recovery


def init(
    recovery_codes: Annotated[
        int,
        typer.Option(
            min=0,
            max=9,
            help="Make so many recovery codes, for people to keep.",
            show_default=False,
        ),
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Found a cluster: this machine's key, a secret, and a list, unless they exist.

    All are files in ~/.potluck that only you can read. This machine is the founder: the first
    entry, and an admin, of the list of admitted keys. To add a machine, run `potluck pair` here and
    `potluck join` there. Existing files stay as they are, so the command may be repeated.

    With --recovery-codes N the cluster can do without this machine: more than half of the N codes
    (2 of 3) ban even this one, if it is stolen or lost, and make another an admin: `potluck ban
    NODE --codes`. They are shown once and are in no file. Write each down, and give them to the
    people who run the machines. Best before another machine is in; the founder of a cluster with
    other machines makes them too, once, for good.

    With --json: {"version": 1, "node", "namespace", "home", "made"}. ``namespace`` is the public
    name of the cluster, ``made`` whether the secret is new. The secret is never shown. With
    --recovery-codes also "recovery_codes" and "codes_needed".
    """
    from potluck._core.cluster.trust.credentials import load_node_credentials
    from potluck._core.cluster.trust.secret import SECRET_FILE
    from potluck._core.settings import load_settings

    settings = load_settings()
    given = "POTLUCK_PSK" if settings.psk is not None else "POTLUCK_PASSPHRASE"
    is_given = settings.psk is not None or settings.passphrase is not None
    path = settings.home / SECRET_FILE
    existed = path.exists()
    credentials = load_node_credentials(settings)
    made = not is_given and not existed

    def show(codes: Sequence[str], needed: int) -> None:
        if json:
            facts: dict[str, object] = {
                "version": 1,
                "node": credentials.node_id,
                "namespace": credentials.namespace,
                "home": str(settings.home),
                "made": made,
            }
            if codes:
                facts |= {"recovery_codes": codes, "codes_needed": needed}
            print_json(facts)
            return
        if is_given:
            typer.echo(f"The cluster's secret comes from {given}.")
        else:
            typer.echo(f"The cluster's secret {'was made' if made else 'is there already'}: {path}")
        typer.echo(f"This machine is node {credentials.node_id[:12]} of it.")
        if codes:
            typer.echo(
                f"The recovery codes, of which {needed} are needed. They are never shown again:\n"
            )
            for code in codes:
                typer.echo(f"    {code}")
            typer.echo("")

    if recovery_codes:
        others = _make_codes(settings, recovery_codes, show)
    else:
        others = False
        show((), 0)
    if json:
        return
    if others:
        typer.echo(
            "They hold on each machine that has heard of them. " + when_others_learn(settings)
        )
    elif not is_given:
        typer.echo("To bring another machine in, run here: potluck pair")


def _make_codes(settings: Settings, count: int, show: Callable[[Sequence[str], int], None]) -> bool:
    """Make ``count`` recovery codes for this home's cluster, and ``show`` them before they count,
    so that none count that nobody has seen. Whether other machines are in the cluster."""
    from potluck._core.cluster.trust.admissions import make_codes, new_founding
    from potluck._core.cluster.trust.credentials import load_admissions, load_or_create_identity

    file, me = load_admissions(settings), load_or_create_identity(settings.home)
    admissions, others = file.load(), set[bytes]()
    if admissions is not None:
        own = {admissions.founding.root, me.public_key().public_bytes_raw()}
        others = {each.key for each in admissions.roster.entries.values()} - own
        if not others and admissions.founding.codes_needed:  # which are no use to anybody yet
            file.take_over(new_founding(me), ())

    def make(admissions: Admissions) -> Recovery:
        recovery, codes = make_codes(admissions, me, count)
        show(codes, recovery.codes_needed)
        return recovery

    file.set_recovery(make)
    return bool(others)
