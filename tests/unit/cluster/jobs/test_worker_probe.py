"""An agent looks at its workers' processes before it blames one that does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from potluck._core.cluster.jobs.worker_probe import (
    NUM_DISK_WAITS,
    Look,
    WorkerProbe,
    is_stopped,
    look,
)

WAIT_S = 20.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its input to end."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.send_signal(signal.SIGCONT)


def unexpected(text: str) -> None:
    raise AssertionError(text)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


class Told:
    """What a WorkerProbe found out; ``first`` waits for the first."""

    def __init__(self) -> None:
        self.stalled: list[tuple[str, str]] = []
        self._has_some = asyncio.Event()

    def __call__(self, worker: str, reason: str) -> None:
        self.stalled.append((worker, reason))
        self._has_some.set()

    async def first(self) -> tuple[str, str]:
        async with asyncio.timeout(WAIT_S):
            await self._has_some.wait()
        return self.stalled[0]


def test_a_stopped_process_is_named_and_how_to_wake_it(process: subprocess.Popen[bytes]) -> None:
    stop(process)

    async def story() -> None:
        told = Told()
        pulse = WorkerProbe(told, unexpected)
        pulse.probed("1", process.pid)
        worker, reason = await told.first()
        assert worker == "1"
        assert f"its process {process.pid} is stopped" in reason
        assert f"kill -CONT {process.pid}" in reason

    asyncio.run(story())


def test_a_process_that_sleeps_in_a_system_call_is_not_blamed(
    process: subprocess.Popen[bytes],
) -> None:
    """It answers nothing and uses no processor time, as a native call that holds the lock."""
    with subprocess.Popen(process.args, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stopped:
        assert stopped.stdout is not None
        stopped.stdout.readline()
        stop(stopped)

        async def story() -> None:
            told = Told()
            pulse = WorkerProbe(told, unexpected)
            pulse.probed("sleeps", process.pid)
            pulse.probed("is stopped", stopped.pid)
            await told.first()
            assert [worker for worker, _ in told.stalled] == ["is stopped"]

        asyncio.run(story())
        stopped.send_signal(signal.SIGCONT)


def test_an_answer_clears_also_a_process_that_was_stopped_since(
    process: subprocess.Popen[bytes],
) -> None:
    stop(process)

    async def story() -> None:
        told = Told()
        pulse = WorkerProbe(told, unexpected)
        pulse.probed("answers", process.pid)
        pulse.probed("is stopped", process.pid)
        pulse.answered("answers")
        await told.first()
        assert [worker for worker, _ in told.stalled] == ["is stopped"]

    asyncio.run(story())


def test_a_process_that_has_ended_is_somebody_elses_news() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert look(process.pid) is None
    assert not is_stopped(None, None)


def test_a_process_that_waits_for_its_disk_is_told_of_once_and_blamed_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that swaps; its looks are made up here, as nobody can hold a process so at will."""
    monkeypatch.setattr("potluck._core.cluster.jobs.worker_probe.ANSWER_S", 0.0)
    looks: list[int] = []
    notes: list[str] = []

    def sees(pid: int) -> Look:
        looks.append(pid)
        return Look("disk-sleep", 1.0)

    async def story() -> None:
        pulse = WorkerProbe(lambda worker, reason: unexpected(reason), notes.append, sees)

        async def unanswered(probes: int) -> None:
            for _ in range(probes):
                judged = len(looks) + 2
                pulse.probed("1", 77)
                async with asyncio.timeout(WAIT_S):
                    while len(looks) < judged:
                        await asyncio.sleep(0)

        await unanswered(NUM_DISK_WAITS - 1)
        pulse.answered("1")
        await unanswered(NUM_DISK_WAITS - 1)
        assert not notes, "it answered in between"
        await unanswered(3)
        [note] = notes
        assert "worker 1 holds the others up: its process 77 waits for a disk" in note

    asyncio.run(story())


def test_a_process_held_by_a_debugger_is_not_said_to_wake_by_a_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("potluck._core.cluster.jobs.worker_probe.ANSWER_S", 0.0)

    async def story() -> None:
        told = Told()
        WorkerProbe(told, unexpected, lambda pid: Look("tracing-stop", 1.0)).probed("1", 77)
        _, reason = await told.first()
        assert "its process 77 is stopped by a debugger" in reason
        assert "kill -CONT" not in reason

    asyncio.run(story())


@pytest.mark.parametrize(
    ("before", "after", "is_proof"),
    [
        (Look("stopped", 1.0), Look("stopped", 1.0), True),
        (Look("tracing-stop", 1.0), Look("tracing-stop", 1.0), True),
        (Look("running", 1.0), Look("stopped", 1.0), False),
        (Look("stopped", 1.0), Look("sleeping", 1.0), False),
        (Look("stopped", 1.0), Look("stopped", 1.1), False),
        (Look("sleeping", 1.0), Look("sleeping", 1.0), False),
        (Look("stopped", 1.0), None, False),
    ],
)
def test_two_looks_must_agree(before: Look | None, after: Look | None, is_proof: bool) -> None:
    assert is_stopped(before, after) is is_proof
