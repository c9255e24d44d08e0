"""Hints are called when they are due, and only so many at once."""

from __future__ import annotations

import asyncio

import pytest

from potluck._core.background import stop
from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.discovery.caller import HintCaller


def test_of_many_hints_sixteen_are_called_at_once_and_the_others_as_calls_end() -> None:
    async def story() -> None:
        called: list[int] = []
        enough, end = asyncio.Event(), asyncio.Event()

        async def call(hint: Hint) -> None:
            called.append(hint.port)
            if len(called) in (16, 40):
                enough.set()
            await end.wait()
            caller.book.reached(hint, f"node {hint.port}", asyncio.get_running_loop().time())
            caller.book.linked(f"node {hint.port}")

        caller = HintCaller(call)
        for port in range(1, 41):
            caller.heard(Hint("10.0.0.1", port, "told"))
        running = asyncio.create_task(caller.run())
        async with asyncio.timeout(30):
            await enough.wait()
            for _ in range(5):
                caller.wake()
                await asyncio.sleep(0)
            assert len(called) == 16
            enough.clear()
            end.set()
            await enough.wait()
        assert sorted(called) == list(range(1, 41))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())


def test_calls_under_way_end_with_the_caller() -> None:
    async def story() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def call(hint: Hint) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        caller = HintCaller(call)
        running = asyncio.create_task(caller.run())
        caller.heard(Hint("10.0.0.1", 1, "told"))
        async with asyncio.timeout(30):
            await begun.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert ended.is_set()

    asyncio.run(story())


def test_an_advert_of_another_time_that_does_not_count_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else a machine with a wrong clock would be missing without a word."""

    async def story() -> None:
        async def call(hint: Hint) -> None:
            caller.book.reached(hint, "node", asyncio.get_running_loop().time())
            reached.set()

        reached = asyncio.Event()
        caller = HintCaller(call)
        running = asyncio.create_task(caller.run())
        caller.heard(Hint("real", 1, "beacon", "x"))
        await reached.wait()
        for _ in range(3):
            caller.heard(Hint("attic", 1, "beacon", "y", is_current=False))
        await stop(running)

    asyncio.run(story())
    [line] = caplog.messages
    assert "heard from attic, is of another time" in line
    assert "POTLUCK_PEERS" in line
