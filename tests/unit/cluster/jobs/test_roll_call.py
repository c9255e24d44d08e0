"""A job's first group names the workers that it waits for until it has formed."""

from __future__ import annotations

import asyncio

import pytest

from potluck._core import waiting
from potluck._core.cluster.jobs.output_relay import RollCall

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.05)
    monkeypatch.setattr(waiting, "EVERY_S", 0.05)


def test_the_missing_are_named_again_until_all_are_there_and_then_a_next_time() -> None:
    async def story() -> list[str]:
        missing, lines, said = ["1", "2"], list[str](), asyncio.Event()

        def say(line: str) -> None:
            lines.append(line.partition(" (")[0])
            said.set()

        call = RollCall(lambda: f"waiting for {' '.join(missing)}" if missing else "", say)
        for _ in range(2):
            call.begin()
            call.begin()
            while missing:
                async with asyncio.timeout(WAIT_S):
                    await said.wait()
                said.clear()
                missing.pop(0)
            while call._calling is None or not call._calling.done():
                await asyncio.sleep(0)
            missing.append("0")
        call.close()
        return lines

    assert asyncio.run(story()) == ["waiting for 1 2", "waiting for 2", "waiting for 0"]


def test_a_closed_call_says_nothing() -> None:
    async def story() -> None:
        lines: list[str] = []
        call = RollCall(lambda: "waiting for 1", lines.append)
        call.begin()
        call.close()
        other = asyncio.Event()
        RollCall(lambda: "waiting for 1", lambda _: other.set()).begin()
        async with asyncio.timeout(WAIT_S):
            await other.wait()
        assert lines == []

    asyncio.run(story())
