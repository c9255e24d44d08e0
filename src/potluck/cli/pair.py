"""``potluck pair``: show a code with which another machine receives the cluster's secret."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from potluck.cluster.trust.pairing import Code
    from potluck.settings import Settings
    from potluck.wire.pairing import Newcomer


def pair(
    minutes: Annotated[
        float, typer.Option(min=0.01, max=60, help="Minutes for which the code is valid.")
    ] = 5,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="TCP port to wait on; 0: any free port."),
    ] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="As lines of JSON, for programs; the code is in them.")
    ] = False,
) -> None:
    """Show a code, and give the cluster's secret to the machine that uses it.

    On the other machine run `potluck join` with the code while this command waits. The code is good
    for one machine and one attempt: it becomes void after a wrong guess, and after --minutes.
    Eavesdroppers and machines in the middle learn nothing from the exchange (SPAKE2). Creates the
    cluster's secret if there is none.

    With --json, one object per line: {"event": "waiting", "code", "port", "addresses"}, then
    {"event": "joined", "node", "name"}.
    """
    from potluck.cluster.trust.pairing import new_code
    from potluck.settings import load_settings

    code = new_code()
    try:
        newcomer = asyncio.run(_wait(load_settings(), code, minutes, port, json))
    except KeyboardInterrupt:
        typer.echo("potluck: interrupted; the code is void", err=True)
        raise typer.Exit(130) from None
    if json:
        _line({"event": "joined", "node": newcomer.node, "name": newcomer.name})
    else:
        typer.echo(f"{newcomer.name or 'A machine'} is in: node {newcomer.node[:12]}.")


async def _wait(settings: Settings, code: Code, minutes: float, port: int, json: bool) -> Newcomer:
    from potluck.cluster.discovery.configured import all_finders
    from potluck.cluster.discovery.interfaces import bound_interfaces
    from potluck.cluster.trust.credentials import load_credentials
    from potluck.cluster.trust.pairing_link import hand_over
    from potluck.cluster.trust.secret import load_secret
    from potluck.cluster.trust.store import TrustStore
    from potluck.wire.pairing import Handover

    node = load_credentials(settings).node_id
    secret = Handover(load_secret(settings), node, settings.machine_name)

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
        typer.echo(f"On the other machine, within {minutes:g} minutes:\n")
        typer.echo(f"    potluck join {code.spoken()}\n")
        if addresses:
            typer.echo(f"If it does not find this machine, add: --address {addresses[0]}")
        typer.echo("Waiting (Ctrl-C ends it) ...")

    finders = all_finders(settings)
    newcomer = await hand_over(
        code,
        secret,
        finders,
        host=settings.bind,
        port=port,
        expires_s=60 * minutes,
        on_waiting=show,
    )
    if len(newcomer.node) == 64:
        TrustStore(settings.home).meet(newcomer.node, newcomer.name)
    return newcomer


def _line(facts: dict[str, object]) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(facts).decode())
