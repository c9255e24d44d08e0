"""A thread or task that breaks tells whoever started it."""

from __future__ import annotations

import asyncio
import queue

import pytest

from potluck._core.background import Alarm, Tasks, start_task, start_thread, stop, why

WAIT_S = 20.0


def test_a_thread_that_breaks_is_told_of_with_its_traceback_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: queue.Queue[BaseException] = queue.Queue()

    def run() -> None:
        raise MemoryError("no room")

    thread = start_thread(run, name="potluck-worst", on_broken=told.put)
    error = told.get(timeout=WAIT_S)
    thread.join(WAIT_S)
    assert why(error) == "MemoryError: no room"
    (record,) = caplog.records
    assert record.getMessage() == "the thread potluck-worst broke"
    assert record.exc_info is not None


def test_a_thread_that_just_ends_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    start_thread(lambda: None, name="potluck-good", on_broken=told.append).join(WAIT_S)
    assert told == []
    assert caplog.records == []


def test_a_task_that_breaks_is_told_of_and_a_cancelled_one_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        told: asyncio.Queue[BaseException] = asyncio.Queue()

        async def breaks() -> None:
            raise ValueError

        async def stays() -> None:
            await asyncio.Event().wait()

        begun, new = (
            start_task(stays, name="patient", on_broken=told.put_nowait),
            start_task(breaks, name="hasty", on_broken=told.put_nowait),
        )
        async with asyncio.timeout(WAIT_S):
            error = await told.get()
            await new
        late = start_task(stays, name="never begun", on_broken=told.put_nowait)
        for task in (begun, late):
            task.cancel()
        await asyncio.gather(begun, late, return_exceptions=True)
        assert why(error) == "ValueError"
        assert told.empty()

    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records] == ["the task hasty broke"]


def test_tasks_are_kept_until_they_end_and_can_be_cancelled_together() -> None:
    async def story() -> None:
        tasks, ended = Tasks(), []

        async def work(name: str, until: asyncio.Event) -> None:
            try:
                await until.wait()
            finally:
                ended.append(name)

        goes = asyncio.Event()
        first = tasks.start(work("first", goes))
        tasks.start(work("second", asyncio.Event()))
        goes.set()
        await first
        assert (ended, len([*tasks])) == (["first"], 1)
        tasks.cancel()
        await tasks.ended()
        assert (ended, [*tasks]) == (["first", "second"], [])

    asyncio.run(story())


def test_an_alarm_rings_once_at_the_time_that_was_set_last() -> None:
    async def story() -> list[str]:
        rung: list[str] = []
        over = asyncio.Event()

        def ring() -> None:
            rung.append("alarm")
            over.set()

        alarm, never = Alarm(ring), Alarm(lambda: rung.append("never"))
        now = asyncio.get_running_loop().time()
        never.set(now)
        never.set(None)
        alarm.set(now + 3600)
        alarm.set(now)
        async with asyncio.timeout(WAIT_S):
            await over.wait()
        return rung

    assert asyncio.run(story()) == ["alarm"]


def test_ended_tasks_are_waited_for_and_what_they_raise_is_dropped() -> None:
    async def story() -> list[str]:
        said: list[str] = []

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                said.append("ended")

        async def breaks() -> None:
            raise ValueError("nobody asks")

        tasks = [asyncio.create_task(slow_to_end()), asyncio.create_task(breaks())]
        await asyncio.sleep(0)
        await stop(*tasks)
        return said

    assert asyncio.run(story()) == ["ended"]
