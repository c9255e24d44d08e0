"""``potluck allow``, ``deny``, ``pause``, ``resume`` and ``continue``: requests of this machine's
owner to its agent."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from potluck.cli.nodes import NodeName, find_known
from potluck.cli.terminal import say
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck._core.settings import Settings
    from potluck._core.wire.local import Request


def allow(node: NodeName) -> None:
    """Let scripts that NODE starts run on this machine.

    Holds until `potluck deny`, or until `potluck up --run-for` gives another rule. A running agent
    takes part in the node's jobs at once.
    """
    _decide(node, is_allowed=True)


def deny(node: NodeName) -> None:
    """Let no script that NODE starts run on this machine.

    A running agent ends the workers of the node's jobs here; the jobs go on without this machine.
    The node stays a member of the cluster; `potluck ban` takes it out.
    """
    _decide(node, is_allowed=False)


def pause() -> None:
    """Take this machine back: end all workers here, and take no new ones until `potluck resume`.

    Jobs go on without this machine, those that it leads as well, and it stays in the cluster. A job
    that runs nowhere else waits. The pause holds when the agent is started anew.
    """
    _ask("pause")


def resume() -> None:
    """Let this machine take part in jobs again, after `potluck pause`."""
    _ask("resume")


def ask_about_scripts(settings: Settings, node: str, called: str) -> None:
    """Ask the person at the terminal whether scripts of ``node`` may run here, unless the owner's
    rule or an earlier decision says it. Without a terminal nothing is asked or decided."""
    from potluck._core.cluster.sharing.offers import SharingStore
    from potluck._core.cluster.sharing.rules import is_allowed
    from potluck._core.system import user_name

    verdict = is_allowed(SharingStore(settings.home).read().offer(), node)
    if verdict is not None:
        does, change = ("run", "deny") if verdict else ("do not run", "allow")
        typer.echo(f"Its scripts {does} on this machine (`potluck {change} {node[:8]}`).")
    elif sys.stdin.isatty():
        question = f"May scripts of {called} run on this machine, as {user_name()}?"
        _decide(node, is_allowed=typer.confirm(question, err=True))
    else:
        typer.echo(f"Its scripts run here after `potluck allow {node[:8]}`.")


def forget(settings: Settings, node: str) -> None:
    """``node`` was banned: what the owner allowed it is over."""
    from potluck._core.cluster.sharing.offers import SharingStore
    from potluck._core.cluster.sharing.rules import forgotten

    store = SharingStore(settings.home)
    kept = store.read()
    if (after := forgotten(kept, [node])) != kept:
        store.write(after)


def _decide(text: str, *, is_allowed: bool) -> None:
    from potluck._core.cluster.home.node_state import find_agent
    from potluck._core.cluster.sharing.offers import SharingStore
    from potluck._core.cluster.sharing.rules import decided
    from potluck._core.cluster.trust.credentials import load_node_credentials
    from potluck._core.settings import load_settings

    settings = load_settings()
    node = find_known(settings, text)
    if node == load_node_credentials(settings).node_id:
        raise ConfigurationError("that is this machine, which always runs its own jobs")
    if find_agent(settings.home) is not None:
        _ask("allow" if is_allowed else "deny", node)
        return
    store = SharingStore(settings.home)
    store.write(decided(store.read(), node, is_allowed=is_allowed))
    word = "run" if is_allowed else "do not run"
    typer.echo(f"potluck: jobs of {text} {word} here, once `potluck up` runs")


def _ask(change: Literal["allow", "deny", "pause", "resume"], node: str = "") -> None:
    from potluck._core.wire.local import ShareRequest

    ask(ShareRequest(change, node))


_ANSWER_S = 30.0


def continue_(
    alone: Annotated[
        bool, typer.Option("--alone", help="Confirm that the cluster is to have two histories.")
    ] = False,
) -> None:
    """Let a paused node continue without the machines that it can't reach.

    A minority that is cut off pauses, so that two parts of a cluster never train apart. With
    --alone the minority continues as a fork: when the machines meet again, the work of one part
    since the fork is dropped, never merged.
    """
    from potluck._core.wire.local import ContinueRequest

    if not alone:
        typer.echo("potluck: this makes a fork; to confirm: potluck continue --alone", err=True)
        raise typer.Exit(2)
    ask(ContinueRequest())


def ask(request: Request) -> None:
    """Send ``request`` to the agent of this machine, and print its answer; exit code 1 if that is a
    refusal."""
    from potluck._core.cluster.links.local import ask_agent
    from potluck._core.settings import load_settings
    from potluck._core.wire.local import CommandResult

    answer = asyncio.run(ask_agent(load_settings(), request, timeout_s=_ANSWER_S))
    assert isinstance(answer, CommandResult)
    say(f"potluck: {answer.text}", err=not answer.ok)
    if not answer.ok:
        raise typer.Exit(1)
