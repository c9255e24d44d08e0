"""A job's first group names the workers that it waits for until it has formed; its end waits for
the last output of its workers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from potluck._core import waiting
from potluck._core.cluster.jobs import output_relay
from potluck._core.cluster.jobs.output_relay import OutputRelay, RollCall
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.wire import jobs

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.05)
    monkeypatch.setattr(waiting, "EVERY_S", 0.05)


def breaks(error: BaseException) -> None:
    raise error


def test_the_missing_are_named_again_until_all_are_there_and_then_a_next_time() -> None:
    async def story() -> list[str]:
        missing, lines, said = ["1", "2"], list[str](), asyncio.Event()

        def say(line: str) -> None:
            lines.append(line.partition(" (")[0])
            said.set()

        call = RollCall(
            lambda: f"waiting for {' '.join(missing)}" if missing else "", say, on_broken=breaks
        )
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
        call = RollCall(lambda: "waiting for 1", lines.append, on_broken=breaks)
        call.begin()
        call.close()
        other = asyncio.Event()
        RollCall(lambda: "waiting for 1", lambda _: other.set(), on_broken=breaks).begin()
        async with asyncio.timeout(WAIT_S):
            await other.wait()
        assert lines == []

    asyncio.run(story())


def test_a_roll_call_that_breaks_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def describe() -> str:
        raise KeyError("no such worker")

    async def story() -> list[BaseException]:
        errors, reported = list[BaseException](), asyncio.Event()

        def broken(error: BaseException) -> None:
            errors.append(error)
            reported.set()

        RollCall(describe, lambda _: None, on_broken=broken).begin()
        async with asyncio.timeout(WAIT_S):
            await reported.wait()
        return errors

    [error] = asyncio.run(story())
    assert isinstance(error, KeyError)
    assert "the task roll call broke" in caplog.text


SPEC = jobs.JobSpec(
    job="job", script="train.py", package=b"\1" * 32, starter="me", versions=own_versions()
)


def relay() -> OutputRelay:
    return OutputRelay(cast(Any, None), SPEC)


async def unread(output: OutputRelay, nodes: set[str]) -> list[str]:
    async with asyncio.timeout(WAIT_S):
        return await output.all_read(lambda worker: worker in nodes)


def test_the_end_of_a_job_waits_for_output_that_comes_late() -> None:
    async def story() -> list[str]:
        output = relay()
        output.exited("0", 0)
        output.exited("1", 2)
        output.ended("0", 0)
        output.ended("1", 1)  # of an earlier process
        asyncio.get_running_loop().call_later(0.05, output.ended, "1", 2)
        return await unread(output, {"0", "1"})

    assert asyncio.run(story()) == []


def test_it_does_not_wait_for_a_node_that_leaves_meanwhile() -> None:
    async def story() -> list[str]:
        output, nodes = relay(), {"0"}
        output.exited("0", 0)

        def leave() -> None:
            nodes.clear()
            output.nodes_changed()

        asyncio.get_running_loop().call_later(0.05, leave)
        return await unread(output, nodes)

    assert asyncio.run(story()) == []


def test_workers_whose_output_does_not_come_in_time_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_relay, "_OUTPUT_S", 0.05)

    async def story() -> list[str]:
        output = relay()
        for worker in ("0", "1", "2"):
            output.exited(worker, 0)
        output.ended("1", 0)
        return await unread(output, {"0", "1", "2"})

    assert asyncio.run(story()) == ["0", "2"]
