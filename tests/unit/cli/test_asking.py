"""Questions to a person at a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
from collections.abc import Iterator

import pytest

from potluck.cli.asking import Asker


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What is written to it is typed on the terminal that is this process's stdin."""
    master, slave = pty.openpty()
    with open(slave, closefd=True) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield master
    os.close(master)


def test_what_was_typed_before_the_question_is_no_answer(
    keyboard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Enter after the code would say no, and void the code; a `y` would say yes unseen."""

    def shown(text: str, **_: object) -> None:
        os.write(keyboard, b"274-831-927\ny\n" if "code" in text else b"no\n")

    monkeypatch.setattr("typer.echo", shown)

    async def story() -> None:
        asker = Asker()
        assert await asker.line("The code: ") == "274-831-927"
        assert not await asker.says_yes("Join?")

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_script_may_answer_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.write(write, b"274-831-927\ny\n")
    os.close(write)

    async def story() -> None:
        asker = Asker()
        assert await asker.line("The code: ") == "274-831-927"
        assert await asker.says_yes("Join?")
        assert not await asker.says_yes("Really?"), "the end of the input is no yes"

    with open(read) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        asyncio.run(asyncio.wait_for(story(), 60))
