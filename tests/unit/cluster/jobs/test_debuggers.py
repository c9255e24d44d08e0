"""Who debugs a worker: one command at a time, as long as it asks."""

from __future__ import annotations

import asyncio
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
    process = Typed()
    made = Debuggers(cast(Any, {"w1": process}))
    made.asked("w1", "ada", request("first", b"p x\n"))
    with pytest.raises(LinkError, match="a command on ada debugs this rank"):
        made.asked("w1", "bob", request("second", b"q\n"))
    with pytest.raises(LinkError, match="a command on ada debugs this rank"):
        made.asked("w1", "bob", request("second", leaves=True))
    made.asked("w1", "ada", request("first", leaves=True))
    assert process.text == b"p x\n" + EOT
    made.asked("w1", "bob", request("second", b"c\n"))
    made.asked("w1", "bob", request("second", leaves=True))
    assert process.text == b"p x\n" + EOT + b"c\n" + EOT
    made.asked("w1", "bob", request("second", leaves=True))
    assert process.text.count(EOT) == 2, "it had left already"
    made.close()


def test_a_silent_command_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LEASE_S", 0.01)
    asyncio.run(silent())


async def silent() -> None:
    process = Typed()
    made = Debuggers(cast(Any, {"w1": process}))
    made.asked("w1", "ada", request("first"))
    async with asyncio.timeout(60):
        await process.has_eot.wait()
    made.asked("w1", "bob", request("second"))
    made.close()
