"""``potluck nodes``: the list of admitted keys."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck._core.version import VERSION
from potluck.cli.terminal import console_on, date, print_json, table_of
from potluck.errors import PotluckError

if TYPE_CHECKING:
    from potluck._core.settings import Settings


def nodes(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List the machines of the cluster: who is in, in which role, who is banned, last seen when.

    `founder` and `admin` may admit and ban others, `member` may not; `revoked` is banned, `ended`
    is a member whose admission has ended. An open cluster has no list: whoever holds its secret is
    in. Where recovery codes can ban the machine that founded the cluster, that is an `admin`.

    With --json: {"version": 1, "open", "cluster" (null if open), "codes_needed" (recovery codes, 0:
    there are none), "nodes": [...]}; each node has
    node, name, role, since and until (Unix times; until 0: no end), reason, last_seen (Unix time,
    0: never), is_here (this machine has a link to it now, or is it), site (empty: not told),
    potluck (the release there, empty: not told), upgrade (what to enter there if that release is
    too old to run jobs of this machine; else empty).
    """
    from potluck._core.cluster.trust.credentials import load_admissions, load_node_credentials
    from potluck._core.settings import load_settings

    settings = load_settings()
    me = load_node_credentials(settings).node_id
    admissions = load_admissions(settings).load()
    rows = _rows(settings, me)
    codes_needed = 0 if admissions is None else admissions.founding.codes_needed
    if codes_needed:
        rows = [each for each in rows if each["role"] != "founder"]  # which is no machine
    if json:
        facts = {
            "version": 1,
            "open": admissions is None,
            "cluster": None if admissions is None else admissions.founding.cluster.hex(),
            "codes_needed": codes_needed,
            "nodes": rows,
        }
        print_json(facts)
        return
    if admissions is None:
        typer.echo(
            "This cluster is open: whoever holds its secret (from POTLUCK_PSK or "
            "POTLUCK_PASSPHRASE) is in. `potluck lock` closes it."
        )
    _show(rows, me)
    if codes_needed:
        typer.echo(f"{codes_needed} recovery codes ban any machine: potluck ban NODE --codes")
    elif warning := _of_only_admin(rows):
        typer.echo(warning)


def _rows(settings: Settings, me: str) -> list[dict[str, Any]]:
    from potluck._core.cluster.trust.admissions import now_of
    from potluck._core.cluster.trust.credentials import load_admissions
    from potluck._core.cluster.trust.known_nodes import KnownNodes
    from potluck.cli.nodes import ask_nodes

    try:
        cluster = asyncio.run(ask_nodes(settings))
    except PotluckError as error:
        typer.echo(f"potluck: {error}", err=True)
        cluster = None
    linked = {each.node: each for each in cluster.nodes if each.link != "none"} if cluster else {}
    known = {each.node: each for each in KnownNodes(settings.home).nodes()}
    roster = load_admissions(settings).roster
    entries, now = roster.entries, now_of(time.time(), roster)
    shown = list(entries) if entries else [me, *(node for node in known if node != me)]
    rows = []
    for node in shown:
        entry, met = entries.get(node), known.get(node)
        word = entry.word if entry is not None else None
        has_ended = entry is not None and entry.has_ended(now)
        rows.append(
            {
                "node": node,
                "name": (met.name if met else "")
                or (entry.name if entry else "")
                or (settings.machine_name if node == me else ""),
                "role": "ended" if has_ended else entry.role if entry is not None else "",
                "since": word.at if word else 0,
                "until": entry.expires if entry is not None else 0,
                "reason": word.reason if word else "",
                "last_seen": met.last if met else 0,
                "is_here": node == me or node in linked,
                "site": linked[node].site if node in linked else "",
                "potluck": linked[node].potluck
                if node in linked
                else VERSION
                if node == me
                else "",
                "upgrade": linked[node].upgrade if node in linked else "",
            }
        )
    return rows


def _of_only_admin(rows: list[dict[str, Any]]) -> str:
    """What is lost with the only machine that may admit and ban; empty if there are several, or
    nobody else is in."""
    admins = [row for row in rows if row["role"] in ("founder", "admin")]
    members = [row for row in rows if row["role"] == "member"]
    if len(admins) != 1 or not members:
        return ""
    name = admins[0]["name"] or admins[0]["node"][:12]
    return (
        f"Only {name} can admit and ban machines. If that machine is lost, no machine can be "
        "admitted or banned any more: make another one an admin there, with "
        "`potluck admit NODE --admin`."
    )


def _show(rows: list[dict[str, Any]], me: str) -> None:
    sites = ("site",) if any(row["site"] for row in rows) else ()
    columns = ("machine", *sites, "node", "role", "potluck", "since", "until", "last seen")
    table = table_of(*columns, whole=("machine", "site"))
    for row in rows:
        seen = "this machine" if row["node"] == me else "now" if row["is_here"] else None
        reason = f" ({row['reason']})" if row["reason"] else ""
        table.add_row(
            row["name"] or "-",
            *((row["site"] or "-",) if sites else ()),
            row["node"][:12],
            (row["role"] or "-") + reason,
            (row["potluck"] or "-") + (" (other)" if row["potluck"] not in ("", VERSION) else ""),
            date(row["since"]),
            date(row["until"]),
            seen or date(row["last_seen"]),
        )
    console_on().print(table)
    for row in filter(lambda row: row["upgrade"], rows):
        called = row["name"] or row["node"][:12]
        typer.echo(
            f"The potluck of {called} is too old to run jobs of this machine. Enter there: "
            f"{row['upgrade']}"
        )
