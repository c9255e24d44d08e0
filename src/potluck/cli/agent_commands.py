"""``potluck rotate`` and ``potluck continue``: one request each to this machine's agent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from potluck.wire.local import Request

_ANSWER_S = 30.0


def rotate() -> None:
    """Give all nodes a new secret while they work; the old one is void 10 minutes later.

    Do this after `potluck ban`, so that a machine that was taken out can't come back under another
    id. All nodes that this machine's agent has a link to get the secret; none shows it before all
    have it. A machine that is switched off now must join again, with `potluck pair` and `potluck
    join`. Needs `potluck up` to run here.
    """
    from potluck.wire.local import RotateRequest

    _ask(RotateRequest())


def continue_(
    alone: Annotated[
        bool, typer.Option("--alone", help="Say that you mean it: there will be two histories.")
    ] = False,
) -> None:
    """Let a paused node go on without the machines that it can't reach.

    A minority that is cut off pauses, so that two sides never train apart. With --alone it goes on
    as a fork: when the machines meet again, one side's work since then is dropped, never merged.
    """
    from potluck.wire.local import ContinueRequest

    if not alone:
        typer.echo("potluck: this makes a fork; if you mean it: potluck continue --alone", err=True)
        raise typer.Exit(2)
    _ask(ContinueRequest())


def _ask(request: Request) -> None:
    from potluck.cluster.links.local import ask_agent
    from potluck.settings import load_settings
    from potluck.wire.local import CommandResult

    answer = asyncio.run(ask_agent(load_settings(), request, timeout_s=_ANSWER_S))
    assert isinstance(answer, CommandResult)
    typer.echo(f"potluck: {answer.text}", err=not answer.ok)
    if not answer.ok:
        raise typer.Exit(1)
