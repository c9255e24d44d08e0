"""``potluck services``: the services of programs on the machines of the cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.terminal import console_on, print_json, say, table_of

if TYPE_CHECKING:
    from potluck._core.wire.local import ServicesReply

_ANSWER_S = 5.0


def services(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List the services that programs offer on the machines of the cluster, outside of jobs.

    With --json: {"version": 1, "services": [...], "silent": [...], "left_out"}; each service has
    name, node, machine (the node's name), host, port, methods. The nodes in silent did not answer
    within two seconds; left_out (a number) more services do not fit into one answer.
    """
    from potluck._core.cluster.links.local import ask_agent
    from potluck._core.settings import load_settings
    from potluck._core.wire.local import ServicesReply, ServicesRequest
    from potluck.errors import LinkError

    reply = asyncio.run(ask_agent(load_settings(), ServicesRequest(), timeout_s=_ANSWER_S))
    assert isinstance(reply, ServicesReply)
    if reply.refusal:
        raise LinkError(reply.refusal)
    rows = [
        {
            "name": each.service.name,
            "node": each.node,
            "machine": each.machine,
            "host": each.host,
            "port": each.service.port,
            "methods": list(each.service.methods),
        }
        for each in reply.services
    ]
    if json:
        found = {"services": rows, "silent": list(reply.silent), "left_out": reply.num_left_out}
        print_json({"version": 1, **found})
        return
    _show(reply)


def _show(reply: ServicesReply) -> None:
    if reply.services:
        table = table_of("service", "machine", "node", "address", "methods")
        for each in reply.services:
            service = each.service
            table.add_row(
                service.name,
                each.machine or "-",
                each.node[:12],
                f"{each.host} port {service.port}",
                ", ".join(service.methods),
            )
        console_on().print(table)
    else:
        typer.echo("No program serves anything. See potluck.NodeServices.")
    for node in reply.silent:
        say(f"potluck: node {node[:12]} did not answer", err=True)
    if reply.num_left_out:
        say(f"potluck: {reply.num_left_out} more services do not fit", err=True)
