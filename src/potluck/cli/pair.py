"""``potluck pair``: show a code with which another machine is admitted to the cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck._core.cluster.trust.admission_file import AdmissionFile
    from potluck._core.cluster.trust.pairing import Code
    from potluck._core.settings import Settings
    from potluck._core.wire.admissions import Verdict
    from potluck._core.wire.pairing import Handover, Newcomer


MAY: dict[Verdict, str] = {
    "member": "A member sees all machines, and runs programs on those whose owners let it.",
    "admin": "An admin runs programs on machines whose owners let it, admits and bans others.",
}
"""What a machine in this role may do."""


def pair(
    minutes: Annotated[
        float, typer.Option(min=0.01, max=60, help="Minutes for which the code is valid.")
    ] = 5,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="TCP port to wait on; 0: any free port."),
    ] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Admit without asking, for scripts.")] = False,
    admin: Annotated[
        bool,
        typer.Option("--admin", help="The machine may admit and ban others, as this one may."),
    ] = False,
    days: Annotated[
        float,
        typer.Option(min=0, help="Days after which the admission ends; 0: never."),
    ] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="As lines of JSON, for programs; the code is in them.")
    ] = False,
) -> None:
    """Show a code, and admit the machine that uses it to the cluster.

    On the other machine run `potluck join` while this command waits, and type the code there. Both
    screens then show the same three words; when the person at each of them has said yes, the key of
    the other machine is on the cluster's list, and the machine has the cluster's secret.

    The code is good for one machine and one attempt: it becomes void after a wrong guess, and after
    --minutes. Eavesdroppers and machines in the middle learn nothing from the exchange (SPAKE2).
    Creates a cluster, with this machine as its founder, if there is none. A member may start
    programs on every machine whose owner lets it: you are asked at once whether on this one.

    With --json, one object per line: {"event": "waiting", "code", "port", "addresses"}, then
    {"event": "words", "words", "name", "node"} (answer with a line `y` on stdin, unless --yes),
    then {"event": "joined", "node", "name"}.
    """
    from potluck._core.cluster.trust.credentials import load_admissions
    from potluck._core.cluster.trust.pairing import new_code
    from potluck._core.settings import load_settings
    from potluck._core.transport.credentials import node_id_of_bytes
    from potluck.cli.owner_commands import ask_about_scripts

    if admin and days:
        raise ConfigurationError("the admission of an admin can't end: leave --days or --admin out")
    settings, code = load_settings(), new_code()
    verdict: Verdict = "admin" if admin else "member"
    try:
        newcomer = asyncio.run(_wait(settings, code, minutes, port, yes, verdict, days, json))
    except KeyboardInterrupt:
        typer.echo("potluck: interrupted; the code is void", err=True)
        raise typer.Exit(130) from None
    node = node_id_of_bytes(newcomer.key)
    if json:
        _line({"event": "joined", "node": node, "name": newcomer.name})
    else:
        entry = load_admissions(settings).entry(node)
        role = verdict if entry is None else entry.role
        typer.echo(f"{newcomer.name or 'A machine'} is in, as {role}: node {node[:12]}.")
        if not yes:
            ask_about_scripts(settings, node, newcomer.name or f"node {node[:12]}")


async def _wait(
    settings: Settings,
    code: Code,
    minutes: float,
    port: int,
    yes: bool,
    verdict: Verdict,
    days: float,
    json: bool,
) -> Newcomer:
    from potluck._core.cluster.discovery.configured import all_finders
    from potluck._core.cluster.discovery.interfaces import bound_interfaces
    from potluck._core.cluster.trust import operator
    from potluck._core.cluster.trust.credentials import (
        load_admissions,
        load_node_credentials,
        load_or_create_identity,
    )
    from potluck._core.cluster.trust.known_nodes import KnownNodes
    from potluck._core.cluster.trust.pairing_host import hand_over
    from potluck._core.cluster.trust.secret import load_secret
    from potluck._core.transport.credentials import node_id_of_bytes
    from potluck._core.wire.pairing import Handover
    from potluck.cli.asking import Asker

    me = load_node_credentials(settings).node_id
    key = load_or_create_identity(settings.home)
    admissions = load_admissions(settings)
    _check(admissions, me)
    asker = Asker()

    def show(bound: int) -> None:
        addresses = [
            f"[{each}]:{bound}" if ":" in each else f"{each}:{bound}"
            for interface in bound_interfaces(settings.bind)
            for each in (*interface.ipv4, *interface.ipv6)
            if not each.startswith("fe80:")
        ]
        if json:
            _line(
                {
                    "event": "waiting",
                    "code": code.spoken(),
                    "port": bound,
                    "addresses": addresses,
                }
            )
            return
        typer.echo(f"On the other machine, within {minutes:g} minutes, run `potluck join` and type")
        typer.echo(f"\n    {code.spoken()}\n")
        if addresses:
            typer.echo(f"If it does not find this machine: potluck join --address {addresses[0]}")
        typer.echo("Waiting (Ctrl-C ends it) ...")

    async def confirm(words: str, name: str, node: str) -> bool:
        known, question = admissions.entry(node), f"Admit it as {verdict}?"
        if json:
            _line({"event": "words", "words": words, "name": name, "node": node})
        else:
            typer.echo(f"{name or 'A machine'} (node {node[:12]}) has the code.")
            typer.echo(f"Its screen must show the same words:\n\n    {words}\n")
            typer.echo(MAY[verdict])
            if known is not None and known.role == "revoked":
                typer.echo("It was banned from this cluster; a yes takes the ban back.")
            elif known is not None and known.role != "member":
                question = f"It is {known.role} already. Let it come again?"
        if not (yes or await asker.says_yes("" if json else question)):
            return False
        if not json:
            typer.echo("Waiting for the yes on its screen ...")
        return True

    async def admit(newcomer: Newcomer) -> Handover:
        def admitted() -> Handover:
            node = node_id_of_bytes(newcomer.key)
            if not admissions.roster.is_admin(node):  # which comes again, and stays an admin
                operator.admit(
                    admissions, key, newcomer.key, name=newcomer.name, verdict=verdict, days=days
                )
            KnownNodes(settings.home).meet(node, newcomer.name, newcomer.key)
            found = admissions.load()
            assert found is not None, "the list that was written is gone"
            psk = load_secret(settings)
            return Handover(psk, me, settings.machine_name[:64], found.founding, found.records)

        return await asyncio.to_thread(admitted)

    finders = all_finders(settings)
    return await hand_over(
        code,
        admit,
        finders,
        confirm,
        host=settings.bind,
        port=port,
        expires_s=60 * minutes,
        on_waiting=show,
    )


def _check(admissions: AdmissionFile, me: str) -> None:
    """ConfigurationError if this machine can't admit others. Checked before a code is shown."""
    if admissions.load() is None:
        raise ConfigurationError(
            "this cluster is open: its secret comes from POTLUCK_PSK or POTLUCK_PASSPHRASE, and "
            "whoever holds it is in. Set the variable on the other machine; or close the cluster "
            "first: potluck lock"
        )
    if not admissions.roster.is_admin(me):
        raise ConfigurationError(
            "this machine is no admin of the cluster, so it can't admit others. Run `potluck pair` "
            f"on an admin (`potluck nodes` shows them), or there: potluck admit {me[:12]} --admin"
        )


def _line(facts: dict[str, object]) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(facts).decode())
