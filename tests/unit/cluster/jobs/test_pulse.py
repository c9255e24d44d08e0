"""An agent looks at its workers' processes before it blames one that does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from potluck.cluster.jobs.pulse import Look, Pulse, is_stopped, look

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


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


class Told:
    """What a Pulse found out; ``first`` waits for the first."""

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
        pulse = Pulse(told)
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
            pulse = Pulse(told)
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
        pulse = Pulse(told)
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
