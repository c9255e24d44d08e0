"""Who debugs a worker: one command at a time, as long as it asks."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import pytest

from potluck._core.cluster.jobs import process
from potluck._core.cluster.jobs.process import Debuggers
from potluck._core.wire.jobs import DebugRequest
from potluck._core.wire.worker_link import EOT
from potluck.errors import LinkError


class Typed:
    """A worker's process that keeps what it is given."""

    def __init__(self) -> None:
        self.text = b""
        self.has_ended = False
        self.has_eot = asyncio.Event()

    def type(self, text: bytes) -> None:
        self.text += text
        if text == EOT:
            self.has_eot.set()


def request(session: str, typed: bytes = b"", *, leaves: bool = False) -> DebugRequest:
    return DebugRequest("train-1", 1, session, typed, leaves)


def test_one_command_holds_a_worker_until_it_leaves() -> None:
    asyncio.run(one_after_the_other())


async def one_after_the_other() -> None:
    process, made = Typed(), Debuggers()
    asked = partial(made.asked, cast(Any, process))
    assert asked("ada", request("first", b"p x\n"))
    with pytest.raises(LinkError, match="a command on ada debugs this rank"):
        asked("bob", request("second", b"q\n"))
    with pytest.raises(LinkError, match="a command on ada debugs this rank"):
        asked("bob", request("second", leaves=True))
    asked("ada", request("first", leaves=True))
    assert process.text == b"p x\n" + EOT
    asked("bob", request("second", b"c\n"))
    asked("bob", request("second", leaves=True))
    assert process.text == b"p x\n" + EOT + b"c\n" + EOT
    asked("bob", request("second", leaves=True))
    assert process.text.count(EOT) == 2, "it had left already"
    made.close()


def test_a_session_keeps_its_process_though_that_ends() -> None:
    asyncio.run(of_one_process())


async def of_one_process() -> None:
    before, after, made = Typed(), Typed(), Debuggers()
    assert made.process_of("first") is None
    made.asked(cast(Any, before), "ada", request("first"))
    before.has_ended = True
    assert made.process_of("first") is cast(Any, before)
    assert not made.asked(cast(Any, before), "ada", request("first", b"c\n"))
    assert made.asked(cast(Any, after), "bob", request("second", b"n\n"))
    made.asked(cast(Any, before), "ada", request("first", leaves=True))
    assert after.text == b"n\n"
    made.close()


def test_a_silent_command_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LEASE_S", 0.01)
    asyncio.run(silent())


async def silent() -> None:
    process, made = Typed(), Debuggers()
    made.asked(cast(Any, process), "ada", request("first"))
    async with asyncio.timeout(60):
        await process.has_eot.wait()
    made.asked(cast(Any, process), "bob", request("second"))
    made.close()
