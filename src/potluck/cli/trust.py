"""``potluck ban``, ``unban``, ``admit``, ``lock``, ``rotate``: who is in the cluster."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.asking import confirm
from potluck.cli.nodes import NodeName, find_known, when_others_learn
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from potluck._core.cluster.trust.admission_file import AdmissionFile
    from potluck._core.settings import Settings
    from potluck._core.wire.admissions import Verdict

_STORED_S = 10.0

_Yes = Annotated[bool, typer.Option("--yes", help="Don't ask.")]


def ban(
    node: NodeName,
    reason: Annotated[str, typer.Option(help="Reason, shown to the node and in logs.")] = "",
    delete_code: Annotated[
        bool,
        typer.Option(
            "--delete-code", help="Delete the code packages that came from it, everywhere."
        ),
    ] = False,
    codes: Annotated[
        bool,
        typer.Option(
            "--codes",
            help="By the cluster's recovery codes, which are asked for; this machine then becomes "
            "an admin. For the machine that founded the cluster.",
        ),
    ] = False,
    yes: _Yes = False,
) -> None:
    """Take a machine out of the cluster, at once and for good.

    One signed record goes to all machines. Each cuts its links to the banned machine as soon as it
    has the record, the cluster goes on without it, and jobs that it started end. The cluster's
    secret is changed, and goes to admitted machines only; a machine that is switched off meanwhile
    gets it when it comes back. `potluck unban` takes the ban back.

    Machines that the banned one had admitted stay in, as members; those that it had banned stay
    out. Both are listed, so that you can change it. What owners had allowed it is forgotten.
    This machine must be an admin of the cluster (`potluck nodes`). In an open cluster the first ban
    closes it, as `potluck lock` does.

    With --codes any machine of a cluster that has recovery codes (`potluck init --recovery-codes`)
    bans any other, also the one that founded it, and becomes an admin in its place. Type the codes
    on a machine that you trust (in scripts: one a line on stdin, with --yes).
    """
    from potluck._core.cluster.home.node_state import find_agent
    from potluck._core.cluster.trust import operator
    from potluck._core.cluster.trust.secret import change_secret, is_secret_given
    from potluck.cli.owner_commands import forget

    settings, file, key = _load()
    found = find_known(settings, node)
    heir = None
    if codes:
        heir = (key.public_key().public_bytes_raw(), settings.machine_name)
        key = asyncio.run(_ask_for_codes(file))
    if not yes:
        new = "" if is_secret_given(settings) else ", and the cluster's secret changes"
        confirm(
            f"Ban {_called(settings, file, found)}? All machines cut it off, jobs that it started "
            f"end{new}."
        )
    if file.load() is None:
        _lock(settings, file, key, without=found)
        typer.echo(f"Node {found[:12]} is out: it is not on the list of admitted keys.")
    else:
        psk = None if is_secret_given(settings) else operator.new_secret()
        store = partial(change_secret, settings.home)
        done = operator.revoke(
            file, key, found, reason, psk=psk, store=store, delete_code=delete_code, heir=heir
        )
        typer.echo(f"{_called(settings, file, found)} is banned.")
        if find_agent(settings.home) is None:  # which does that by itself
            forget(settings, found)
        for each in done.kept:
            typer.echo(f"It had admitted {_called(settings, file, each)}, which stays: a member.")
        for each in done.still_out:
            typer.echo(f"It had banned {_called(settings, file, each)}, which stays banned.")
        if done.lost:
            typer.echo(f"{done.lost} more that it had admitted are out.")
        if heir is not None:
            typer.echo(
                "This machine is an admin now. To make others admins again: potluck admit NODE "
                "--admin; to take a ban back: potluck unban NODE."
            )
    if is_secret_given(settings):
        typer.echo(
            "The secret comes from a variable: change POTLUCK_PSK or POTLUCK_PASSPHRASE on all "
            "machines, so that the banned one can't even knock."
        )
    typer.echo(when_others_learn(settings))


def unban(node: NodeName, yes: _Yes = False) -> None:
    """Admit a banned machine again, as a member.

    It gets back no rights but that: what owners had allowed it is over, so they are asked again
    whether its scripts may run on their machines; where scripts of all members run, it is denied
    until `potluck allow`.

    The machine lacks the cluster's present secret, so it must be able to reach a machine of the
    cluster with an earlier one (at most seven changes ago); if it can't: `potluck pair`.
    """
    from potluck._core.cluster.trust import operator
    from potluck.cli.owner_commands import ask_about_scripts

    settings, file, key = _load()
    found = find_known(settings, node)
    entry = file.entry(found)
    if entry is None or entry.role != "revoked":
        raise ConfigurationError(f"{_called(settings, file, found)} is not banned")
    if not yes:
        confirm(f"Admit {_called(settings, file, found)} again, as a member?")
    operator.admit(file, key, entry.key, name=entry.name)
    typer.echo(f"{_called(settings, file, found)} is a member again.")
    if not yes:
        ask_about_scripts(settings, found, _called(settings, file, found))


def admit(
    node: NodeName,
    admin: Annotated[
        bool, typer.Option("--admin/--member", help="Whether it may admit and ban others.")
    ] = False,
    days: Annotated[
        float, typer.Option(min=0, help="Days after which the admission ends; 0: never.")
    ] = 0,
) -> None:
    """Change the role of a machine of the cluster, or the end of its admission.

    A new machine comes in by `potluck pair` and `potluck join`.
    """
    from potluck._core.cluster.trust import operator

    settings, file, key = _load()
    found = find_known(settings, node)
    entry = file.entry(found)
    if entry is None or entry.role == "revoked":
        how = "potluck pair" if entry is None else f"potluck unban {found[:12]}"
        raise ConfigurationError(f"node {found[:12]} is not in the cluster; to admit it: {how}")
    if entry.role == "founder":
        raise ConfigurationError(f"node {found[:12]} founded the cluster, and stays its admin")
    verdict: Verdict = "admin" if admin else "member"
    operator.admit(file, key, entry.key, name=entry.name, verdict=verdict, days=days)
    until = f" for {days:g} days" if days else ""
    typer.echo(f"{_called(settings, file, found)} is {verdict}{until}.")


def lock(yes: _Yes = False) -> None:
    """Close an open cluster: from now on only listed machines are in.

    A cluster whose secret comes from POTLUCK_PSK or POTLUCK_PASSPHRASE is open: whoever holds the
    secret is in. This command makes this machine the founder of the list, with the machines of the
    cluster's present view as members. Needs `potluck up` on this machine. `potluck init
    --recovery-codes 3` then makes codes that replace this machine if it is stolen or lost.
    """
    settings, file, key = _load()
    if file.load() is not None:
        raise ConfigurationError(
            "this cluster is closed already: only the machines that `potluck nodes` lists are in"
        )
    _lock(settings, file, key, ask=not yes)


def rotate() -> None:
    """Change the cluster's secret while the machines work.

    The new secret goes to admitted machines only. A machine that is switched off meanwhile gets it
    when it comes back (after at most seven changes; later it must join again). No link is cut.
    `potluck ban` changes the secret by itself.
    """
    from potluck._core.cluster.trust import operator
    from potluck._core.cluster.trust.secret import change_secret, is_secret_given
    from potluck._core.transport.credentials import namespace_of

    settings, file, key = _load()
    if is_secret_given(settings):
        raise ConfigurationError(
            "the secret comes from POTLUCK_PSK or POTLUCK_PASSPHRASE: change the variable, on all "
            "machines"
        )
    psk = operator.new_secret()
    operator.change_of_secret(file, key, psk, partial(change_secret, settings.home))
    behind, total = asyncio.run(_wait_for_all(settings, namespace_of(psk)))
    typer.echo(f"The secret is changed; {total - len(behind)} of {total} machines have it.")
    for name in behind:
        typer.echo(f"{name} does not have it yet: it gets it when it can be reached.")


async def _ask_for_codes(file: AdmissionFile) -> Ed25519PrivateKey:
    """The key that is senior to the founder, of the codes that the person types."""
    from potluck._core.cluster.trust.admissions import Code, parse_code, recovery_key
    from potluck.cli.asking import Asker

    admissions = file.load()
    founding = None if admissions is None else admissions.founding
    if founding is None or not founding.codes_needed:
        raise ConfigurationError(
            "this cluster has no recovery codes. Its founder makes them (`potluck nodes`), with "
            "`potluck init --recovery-codes 3`. If that machine is lost, found a new cluster: "
            "remove ~/.potluck on a machine that you trust, run that command there, and pair anew"
        )
    asker, typed = Asker(), list[Code]()
    for at in range(1, founding.codes_needed + 1):
        text = await asker.line(f"Recovery code, {at} of {founding.codes_needed} needed: ")
        typed.append(parse_code(text, founding))
    return recovery_key(typed, founding)


async def _wait_for_all(settings: Settings, namespace: str) -> tuple[list[str], int]:
    """The labels of the machines with a link that lack the secret of ``namespace`` after
    ``_STORED_S``, and the number of machines."""
    from potluck.cli.nodes import ask_nodes, label

    deadline = time.monotonic() + _STORED_S
    while True:
        cluster = await ask_nodes(settings)
        if cluster is None:
            return [], 1
        behind = [each for each in cluster.nodes if each.secret != namespace]
        if not behind or time.monotonic() > deadline:
            return [label(each.node, cluster) for each in behind], len(cluster.nodes)
        await asyncio.sleep(0.1)


def _lock(
    settings: Settings,
    file: AdmissionFile,
    key: Ed25519PrivateKey,
    *,
    without: str = "",
    ask: bool = False,
) -> None:
    from potluck._core.cluster.trust import operator
    from potluck._core.cluster.trust.known_nodes import KnownNodes
    from potluck.cli.nodes import ask_nodes, label

    cluster = asyncio.run(ask_nodes(settings))
    if cluster is None:
        raise ConfigurationError(
            "no agent runs on this machine, so the members of the cluster are not known; start it "
            "with: potluck up"
        )
    keys = {each.node: each.key for each in KnownNodes(settings.home).nodes()}
    chosen = [e for e in cluster.nodes if e.role and e.node not in (cluster.node, without)]
    names = ", ".join(label(each.node, cluster) for each in chosen) or "no other machine"
    if ask:
        confirm(f"Close the cluster with this machine as founder, and {names} as members?")
    missing = [label(each.node, cluster) for each in chosen if not keys.get(each.node)]
    if missing:
        raise ConfigurationError(f"the keys of {', '.join(missing)} are not known yet; try again")
    others = [(bytes.fromhex(keys[each.node]), each.name) for each in chosen]
    operator.lock(file, key, others)
    typer.echo(f"The cluster is closed. Its members: this machine, {names}.")


def _load() -> tuple[Settings, AdmissionFile, Ed25519PrivateKey]:
    from potluck._core.cluster.trust.credentials import (
        load_admissions,
        load_node_credentials,
        load_or_create_identity,
    )
    from potluck._core.settings import load_settings

    settings = load_settings()
    load_node_credentials(settings)  # makes what is missing
    return settings, load_admissions(settings), load_or_create_identity(settings.home)


def _called(settings: Settings, file: AdmissionFile, node: str) -> str:
    from potluck._core.cluster.trust.known_nodes import KnownNodes

    entry = file.entry(node)
    name = KnownNodes(settings.home).name(node) or (entry.name if entry else "")
    return f"{name} (node {node[:12]})" if name else f"Node {node[:12]}"
