"""``potluck continue``: a request to this machine's agent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.terminal import say

if TYPE_CHECKING:
    from potluck._core.wire.local import Request

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
