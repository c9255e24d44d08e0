"""The logs of jobs whose starter has gone are written by a thread, in order and to the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from potluck._core.cluster.jobs import log as module
from potluck._core.cluster.jobs.log import KEPT_LOGS, JobLog
from support.disk import changes_by_this_thread


class Disk(JobLog):
    """A log whose disk takes no line before ``is_quick`` is set."""

    def __init__(self, home: Path) -> None:
        self.notes: list[str] = []
        self.is_quick = threading.Event()
        super().__init__(home, self.notes.append)

    def _append(self, lines: Iterable[tuple[str, str]]) -> None:
        assert self.is_quick.wait(30)
        super()._append(lines)


def test_lines_are_written_by_another_thread_in_their_order(tmp_path: Path) -> None:
    async def story() -> list[str]:
        log = JobLog(tmp_path, on_note=pytest.fail)
        with changes_by_this_thread(tmp_path) as changes:
            for number in range(1000):
                log.write(f"job-{number % 2}", f"line {number}\nits second half")
                if number % 100 == 0:
                    await log.written()
            await log.close()
        return changes

    assert asyncio.run(story()) == []
    for each in (0, 1):
        wanted = [f"line {n}\n    its second half" for n in range(each, 1000, 2)]
        assert (tmp_path / f"logs/job-{each}.log").read_text() == "\n".join(wanted) + "\n"


def test_a_slow_disk_holds_nobody_and_the_end_waits_for_it(tmp_path: Path) -> None:
    async def story() -> None:
        log = Disk(tmp_path)
        log.write("job", "first")
        await asyncio.sleep(0)
        log.write("job", "second")
        ending = asyncio.create_task(log.close())
        await asyncio.sleep(0)
        assert not ending.done()
        log.is_quick.set()
        await ending
        assert log.path("job").read_text() == "first\nsecond\n"
        assert log.notes == []

    asyncio.run(story())


def test_what_a_disk_can_not_take_is_lost_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNWRITTEN", 100)
    monkeypatch.setattr(module, "_CLOSE_S", 0.01)

    async def story() -> None:
        log = Disk(tmp_path)
        for _ in range(10):
            log.write("job", "x" * 50)
        assert [note.partition("lost: ")[2] for note in log.notes] == [
            "the disk is too slow: lines are left out"
        ]
        await log.close()
        assert "the disk does not answer" in log.notes[-1]
        log.is_quick.set()
        await log.written()
        assert len(log.path("job").read_text().splitlines()) == 3
        log.write("job", "after it")
        await log.written()
        assert log.path("job").read_text().endswith("after it\n")

    asyncio.run(story())


def test_a_folder_that_can_not_be_written_is_said_once_until_it_can(tmp_path: Path) -> None:
    async def story() -> None:
        notes: list[str] = []
        log = JobLog(tmp_path, notes.append)
        (tmp_path / "logs").write_text("a file where the folder should be")
        for _ in range(3):
            log.write("job", "lost")
            await log.written()
        assert len(notes) == 1
        (tmp_path / "logs").unlink()
        log.write("job", "kept")
        await log.close()
        assert log.path("job").read_text() == "kept\n"

    asyncio.run(story())


def test_logs_are_bounded_in_size_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)

    async def story() -> None:
        log = JobLog(tmp_path, on_note=pytest.fail)
        for number in range(KEPT_LOGS + 3):
            for _ in range(5):
                log.write(f"job-{number}", "x" * 49)
        await log.close()

    asyncio.run(story())
    sizes = [path.stat().st_size for path in (tmp_path / "logs").iterdir()]
    assert sizes == [150] * KEPT_LOGS
