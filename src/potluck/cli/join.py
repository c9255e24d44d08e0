"""``potluck join``: enter the cluster of the machine that shows a pairing code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.pair import MAY
from potluck.cli.terminal import print_json
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck._core.settings import Settings
    from potluck._core.wire.pairing import Handover
    from potluck.cli.asking import Asker


def join(
    code: Annotated[str, typer.Argument(hidden=True)] = "",
    address: Annotated[
        str,
        typer.Option(
            help="HOST:PORT that `potluck pair` shows, for networks without multicast.",
        ),
    ] = "",
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Leave the cluster that this machine belongs to."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Join without asking, for scripts.")] = False,
    wait: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds to search for the other machine.")
    ] = 60,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Add this machine to a cluster, with the code that a machine of the cluster shows.

    Run `potluck pair` on that machine first, then `potluck join` here, and type the code when asked
    (scripts: as a line on stdin; as an argument other users of this machine would see it). Both
    screens then show the same three words; say yes on both if they do. The secret and the list of
    admitted keys are stored in ~/.potluck, where only you can read them.

    If this machine already belongs to a cluster with other machines, --replace is needed; its
    former secret is removed.

    With --json: {"version": 1, "node", "name", "namespace"}: id and name of the machine that
    admitted this one, and the cluster's public name.
    """
    from potluck._core.cluster.home.node_state import find_agent
    from potluck._core.cluster.trust.admission_file import AdmissionFile
    from potluck._core.cluster.trust.known_nodes import KnownNodes
    from potluck._core.cluster.trust.secret import replace_secret
    from potluck._core.settings import load_settings
    from potluck._core.transport.credentials import namespace_of
    from potluck.cli.asking import Asker
    from potluck.cli.owner_commands import ask_about_scripts

    if code:
        raise ConfigurationError(
            "the code is no argument: other users of this machine see those. Run `potluck join` "
            "and type it when asked; in a script: echo CODE | potluck join --yes"
        )
    try:
        settings = load_settings()
        _check(settings, replace)
        given = asyncio.run(_ask(settings, Asker(), address, wait, yes))
        AdmissionFile(settings.home).take_over(given.founding, given.records)
        replace_secret(settings.home, given.psk)
        KnownNodes(settings.home).meet(given.node, given.name)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if json:
        facts = {
            "version": 1,
            "node": given.node,
            "name": given.name,
            "namespace": namespace_of(given.psk),
        }
        print_json(facts)
        return
    called = given.name or f"node {given.node[:12]}"
    typer.echo(f"This machine is in the cluster of {called} now.")
    if not yes:
        ask_about_scripts(settings, given.node, called)
    if find_agent(settings.home) is not None:
        typer.echo("The agent that runs here goes over to it by itself (`potluck status`).")
    else:
        typer.echo("To take part, run: potluck up")


def _check(settings: Settings, replace: bool) -> None:
    """ConfigurationError if this machine can't store a new secret. Checked first, since an attempt
    to join spends the code."""
    from potluck._core.cluster.trust.secret import SECRET_FILE, is_secret_given

    if is_secret_given(settings):
        raise ConfigurationError(
            "POTLUCK_PSK or POTLUCK_PASSPHRASE gives this machine its secret, so it can't take "
            "over another; unset the variable first"
        )
    path = settings.home / SECRET_FILE
    if path.exists() and not replace and not _is_alone(settings):
        raise ConfigurationError(
            f"this machine already has a cluster secret ({path}). To leave that cluster and join "
            "the other: potluck join --replace"
        )


def _is_alone(settings: Settings) -> bool:
    """Whether this machine's cluster is one that it founded, without another machine: `potluck up`
    or `potluck nodes` made it, and nothing is lost with it."""
    from potluck._core.cluster.trust.credentials import load_admissions, load_or_create_identity
    from potluck._core.transport.credentials import node_id_of

    me = node_id_of(load_or_create_identity(settings.home).public_key())
    return load_admissions(settings).roster.entries.keys() == {me}


async def _ask(
    settings: Settings, asker: Asker, address: str, wait_s: float, yes: bool
) -> Handover:
    from potluck._core.cluster.discovery.configured import all_finders, parse_peers
    from potluck._core.cluster.trust.credentials import load_or_create_identity
    from potluck._core.cluster.trust.pairing import parse_code
    from potluck._core.cluster.trust.pairing_joiner import Me, take_over

    place = None
    if address:
        places = parse_peers(address, 0) if ":" in address else ()
        if len(places) != 1 or not places[0][1]:
            raise ConfigurationError(
                f"--address {address!r}: write HOST:PORT as `potluck pair` shows it"
            )
        place = places[0]
    text = await asker.line("The code that `potluck pair` shows on the other machine: ")
    if not text:
        raise ConfigurationError(
            "no code came on stdin; run `potluck pair` on a machine of the cluster, and type its "
            "code here"
        )
    code = parse_code(text)
    me = Me(load_or_create_identity(settings.home), settings.machine_name)

    async def confirm(words: str, name: str, node: str) -> bool:
        typer.echo(f"The other screen must show the same words:\n\n    {words}\n", err=True)
        typer.echo(MAY["member"], err=True)
        if not (yes or await asker.says_yes("Join?")):
            return False
        typer.echo("Waiting for the yes on the other machine ...", err=True)
        return True

    finders = [] if place is not None else all_finders(settings)
    typer.echo("Looking for the machine that shows it ...", err=True)

    def wrong(text: str) -> None:
        typer.echo(f"{text}. Looking whether another machine shows it ...", err=True)

    return await take_over(
        code, me, finders, confirm, address=place, timeout_s=wait_s, on_wrong=wrong
    )
