"""Questions to the person at the terminal, in an event loop that goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
import sys

import typer

from potluck._core.system import forget_typed
from potluck.errors import ConfigurationError


def confirm(question: str) -> None:
    """Return if the person says yes; else typer.Exit, or ConfigurationError without an answer."""
    try:
        if typer.confirm(question, err=True):
            return
    except typer.Abort:
        raise ConfigurationError(
            "nobody answered the question; --yes does it without asking, in scripts"
        ) from None
    typer.echo("Nothing was changed.", err=True)
    raise typer.Exit(1)


class Asker:
    """Asks on stderr and reads lines from stdin, which may be a terminal, a pipe or a file."""

    def __init__(self) -> None:
        self._rest = b""

    async def line(self, question: str) -> str:
        """The next line, without its end; empty at the end of the input."""
        typer.echo(question, nl=False, err=True)
        while b"\n" not in self._rest:
            await _readable()
            data = os.read(sys.stdin.fileno(), 4096)
            if not data:
                line, self._rest = self._rest, b""
                return line.decode(errors="replace").strip()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace").strip()

    async def says_yes(self, question: str) -> bool:
        """Whether the person answers yes; any other answer, and none, is no. What was typed on a
        terminal before the question is no answer to it."""
        if os.isatty(sys.stdin.fileno()):
            self._rest = b""
            forget_typed(sys.stdin.fileno())
        return (await self.line(f"{question} [y/N] ")).lower() in ("y", "yes")


async def _readable() -> None:
    """Wait until stdin has a line or has ended. A thread that reads could not be interrupted."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(sys.stdin.fileno(), ready.set)
    except PermissionError:  # a file, which is always readable
        return
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
