"""``potluck init``: create this machine's key and the cluster's secret."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.files import print_json
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck.settings import Settings


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
    people who run the machines. Only before another machine is in; repeated, it makes new codes.

    With --json: {"version": 1, "node", "namespace", "home", "made"}. ``namespace`` is the public
    name of the cluster, ``made`` whether the secret is new. The secret is never shown. With
    --recovery-codes also "recovery_codes" and "codes_needed".
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
    codes, needed = _make_codes(settings, recovery_codes) if recovery_codes else ([], 0)
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
    if not is_given:
        typer.echo("To bring another machine in, run here: potluck pair")


def _make_codes(settings: Settings, count: int) -> tuple[list[str], int]:
    """Found this home's cluster anew, with ``count`` codes; the codes, and how many are needed.
    ConfigurationError if another machine is in."""
    from potluck.cluster.trust.credentials import load_admissions
    from potluck.cluster.trust.identity import load_or_create_identity
    from potluck.cluster.trust.recovery import found_with_codes
    from potluck.cluster.trust.secret import is_secret_given

    if is_secret_given(settings):
        raise ConfigurationError(
            "an open cluster (POTLUCK_PSK, POTLUCK_PASSPHRASE) has no recovery codes: unset the "
            "variable"
        )
    file = load_admissions(settings)
    me = load_or_create_identity(settings.home).public_key().public_bytes_raw()
    admissions = file.load()
    assert admissions is not None, "the list was made and is not there"
    others = {each.key for each in admissions.roster.entries.values()} - {me}
    if others - ({admissions.founding.key} if admissions.founding.codes_needed else set()):
        raise ConfigurationError(
            "this machine's cluster has other machines already, and recovery codes are made "
            "when a cluster is founded. To found a new one with codes: remove ~/.potluck here, run "
            "`potluck init --recovery-codes 3`, and pair the others anew"
        )
    founding, record, codes = found_with_codes(me, settings.machine_name, count)
    file.take_over(founding, [record])
    return codes, founding.codes_needed
