"""Questions to the person at the terminal, in an event loop that goes on meanwhile.

``Questions`` asks the owner at the terminal of ``potluck up`` whose scripts may run here."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import typer

from potluck._core.background import Tasks
from potluck._core.system import forget_typed, has_terminal
from potluck.errors import ConfigurationError, PotluckError


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
            data = await typed()
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


async def typed() -> bytes:
    """What was typed on stdin, at most 4096 bytes, once there is a line; empty at its end. A thread
    that reads could not be interrupted."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(sys.stdin.fileno(), ready.set)
        await ready.wait()
    except PermissionError:  # a file, which is always readable
        pass
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return os.read(sys.stdin.fileno(), 4096)


_MAX_LINE = 1024


class Undecided(Protocol):
    """The owner's decisions, as ``Offers`` has them."""

    def undecided(self) -> tuple[str, ...]:
        """The nodes about which the owner is to be asked."""

    async def decide(self, node: str, *, is_allowed: bool) -> None:
        """The owner's answer."""


@dataclass(eq=False, repr=False)
class Questions:
    """Asks about one node at a time. ``look`` when there may be new ones, ``remind`` after each
    line of others, so that an open question is the last line, ``answer`` with each line of the
    owner; ``say`` prints."""

    offers: Undecided
    called: Callable[[str], str]
    user: str
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._asked = ""

    def look(self) -> None:
        """Ask about the first node that is undecided, unless it was asked about last."""
        waiting = self.offers.undecided()
        if self._asked in waiting:
            return
        self._asked = waiting[0] if waiting else ""
        if self._asked:
            self._ask()

    def remind(self) -> None:
        """Another line was printed: ask again below it."""
        if self._asked in self.offers.undecided():
            self._ask()

    async def answer(self, line: str) -> None:
        """The owner wrote ``line``."""
        word, node = line.strip().lower(), self._asked
        if not node:
            return
        if word not in ("y", "yes", "n", "no"):
            self._ask()
            return
        self._asked = ""
        try:
            await self.offers.decide(node, is_allowed=word.startswith("y"))
        except PotluckError as error:  # it could not be kept, so nothing is decided
            self.say(str(error))

    def _ask(self) -> None:
        name = self.called(self._asked)
        self.say(f"may scripts of {name} run on this machine, as {self.user}? y or n, then Enter")


def read_answers(take: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Give each line that the owner writes to ``take``, in a task of the event loop, until there is
    no terminal in the foreground any more."""
    loop = asyncio.get_running_loop()
    tasks = Tasks()

    def read() -> None:
        # A process in the background that reads from the terminal is stopped by it.
        line = os.read(0, _MAX_LINE) if has_terminal() else b""
        if not line:
            loop.remove_reader(0)
            return
        tasks.start(take(line.decode(errors="replace")))

    loop.add_reader(0, read)
