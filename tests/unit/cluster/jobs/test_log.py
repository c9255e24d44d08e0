"""The logs of jobs: written by a thread, rotated, read by cursors, copied to other nodes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

from potluck._core.cluster.jobs import log as module
from potluck._core.cluster.jobs.log import JobLog, LogPump
from potluck._core.cluster.past_jobs import Cursor
from potluck._core.wire.jobs import LogLine
from support.disk import changes_by_this_thread

KEY = "job.1234"


class Disk(JobLog):
    """A log whose disk takes no line before ``is_quick`` is set."""

    def __init__(self, home: Path) -> None:
        self.notes: list[str] = []
        self.is_quick = threading.Event()
        super().__init__(home, self.notes.append)

    def _append(self, lines: Iterable[tuple[str, LogLine]]) -> None:
        assert self.is_quick.wait(30)
        super()._append(lines)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(bounded())


async def all_of(log: JobLog, cursor: Cursor | None = None, **options: Any) -> list[LogLine]:
    """What a reader gets, part by part."""
    cursor, lines, has_more = cursor or Cursor(), list[LogLine](), True
    while has_more:
        part, has_more = await log.read(KEY, cursor.after, since=cursor.since, **options)
        for line in part:
            cursor.take(line)
        lines += part
    return lines


def texts(lines: Iterable[LogLine]) -> list[str]:
    return [line.text for line in lines]


def test_lines_are_written_by_another_thread_and_outlive_the_agent(tmp_path: Path) -> None:
    async def story() -> None:
        log = JobLog(tmp_path, on_note=pytest.fail)
        with changes_by_this_thread(tmp_path) as changes:
            for number in range(1000):
                log.add(KEY, str(number % 2), "stdout", f"{number % 2} ada", f"line {number}")
                if number % 100 == 0:
                    await log.written()
            await log.close()
        assert changes == []
        wanted = [f"line {number}" for number in range(1000)]
        assert sorted(texts(await all_of(log)), key=wanted.index) == wanted
        again = JobLog(tmp_path, on_note=pytest.fail)
        lines = await all_of(again)
        assert sorted(texts(lines), key=wanted.index) == wanted
        assert again.held(KEY) == {"0": (500, "0 ada"), "1": (500, "1 ada")}
        again.add(KEY, "0", "stdout", "0 ada", "after it")
        [last] = await all_of(again, Cursor(after={line.source: line.at for line in lines}))
        assert (last.text, last.number) == ("after it", 500)

    run(story)


def test_a_reader_gets_each_line_once_in_order_however_far_behind_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAIL_BYTES", 3000)
    monkeypatch.setattr(module, "PART_BYTES", 2000)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 4000)
    monkeypatch.setattr(module, "SEGMENTS", 10_000)
    monkeypatch.setattr(module, "JOB_SEGMENTS", 100_000)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)

    async def story() -> None:
        log = JobLog(tmp_path, on_note=pytest.fail)
        slow, seen, written = Cursor(), list[LogLine](), list[LogLine]()
        for _ in range(1500):
            source = str(chance.randrange(4))
            log.add(KEY, source, "stdout", source, "x" * chance.randrange(200))
            written.append(log._jobs[KEY].tail[-1])
            if chance.random() < 0.02:
                part, _ = await log.read(KEY, slow.after)
                assert not any(map(slow.take, part)), "nothing is missed"
                seen += part
            if chance.random() < 0.01:
                await log.written()
        seen += await all_of(log, slow)
        for source in "0123":
            wanted = [line for line in written if line.source == source]
            assert [line for line in seen if line.source == source] == wanted
        only = await all_of(log, sources=("2",))
        assert only == [line for line in written if line.source == "2"]
        await log.close()

    run(story)


def test_what_rotated_away_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAIL_BYTES", 100)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(module, "SEGMENTS", 3)

    async def story() -> None:
        log = JobLog(tmp_path, on_note=pytest.fail)
        log.add(KEY, "1", "stdout", "1", "a quiet rank")
        for number in range(100):
            log.add(KEY, "0", "stdout", "0", f"{number:50}")
        await log.close()
        assert len(list((tmp_path / KEY).glob("0.*.log"))) == 3
        cursor, missed = Cursor(), 0
        lines, _ = await log.read(KEY, {})
        for line in lines:
            missed += cursor.take(line)
        kept = [line for line in lines if line.source == "0"]
        assert missed == 100 - len(kept) > 0
        assert kept[-1].text.strip() == "99"
        assert "a quiet rank" in texts(lines), "a noisy one does not displace it"

    run(story)


def test_a_slow_disk_holds_nobody_and_the_end_waits_for_it(tmp_path: Path) -> None:
    async def story() -> None:
        log = Disk(tmp_path)
        log.add(KEY, "0", "stdout", "0", "first")
        await asyncio.sleep(0)
        log.add(KEY, "0", "stdout", "0", "second")
        assert texts((await log.read(KEY, {}))[0]) == ["first", "second"]
        ending = asyncio.create_task(log.close())
        await asyncio.sleep(0)
        assert not ending.done()
        log.is_quick.set()
        await ending
        assert texts(await all_of(JobLog(tmp_path, pytest.fail))) == ["first", "second"]
        assert log.notes == []

    run(story)


def test_what_a_disk_can_not_take_is_lost_said_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNWRITTEN", 300)
    monkeypatch.setattr(module, "_CLOSE_S", 0.01)

    async def story() -> None:
        log = Disk(tmp_path)
        for _ in range(10):
            log.add(KEY, "0", "stdout", "0", "x" * 50)
        assert log.is_behind
        assert log.notes == ["lines of job logs are lost: the disk is too slow"]
        await log.close()
        assert "the disk does not answer" in log.notes[-1]
        log.is_quick.set()
        await log.written()
        log.add(KEY, "0", "stdout", "0", "after it")
        await log.written()
        assert not log.is_behind
        cursor = Cursor()
        missed = [cursor.take(line) for line in await all_of(JobLog(tmp_path, pytest.fail))]
        assert missed == [0, 0, 0, 7]

    run(story)


def test_a_full_disk_is_said_once_and_readers_still_get_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAIL_BYTES", 500)

    async def story() -> None:
        notes: list[str] = []
        log = JobLog(tmp_path / "home", notes.append)
        (tmp_path / "home").write_text("a file where the folder should be")
        cursor = Cursor()
        for number in range(20):
            log.add(KEY, "0", "stdout", "0", f"line {number}")
            assert texts((await log.read(KEY, cursor.after))[0]) == [f"line {number}"]
            cursor.take(log._jobs[KEY].tail[-1])
            await log.written()
        assert len(notes) == 1
        late = Cursor()
        lines = await all_of(log, late)
        assert lines[-1].text == "line 19"
        assert Cursor().take(lines[0]) > 0, "what it missed is counted"
        (tmp_path / "home").unlink()
        log.add(KEY, "0", "stdout", "0", "kept")
        await log.close()
        assert texts(await all_of(JobLog(tmp_path / "home", pytest.fail))) == ["kept"]

    run(story)


def test_a_progress_bar_is_shown_in_place_and_its_last_state_stored(tmp_path: Path) -> None:
    async def story() -> None:
        log, cursor = JobLog(tmp_path, pytest.fail), Cursor()
        for state in ("10%", "20%", "30%"):
            log.add(KEY, "0", "stderr", "0", state, "\r")
        [bar] = (await log.read(KEY, cursor.after))[0]
        assert (bar.text, bar.end) == ("30%", "\r")
        assert cursor.take(bar) == 0
        assert (await log.read(KEY, cursor.after))[0] == []
        log.add(KEY, "0", "stderr", "0", "100%")
        [end] = (await log.read(KEY, cursor.after))[0]
        assert (end.text, end.end, cursor.take(end)) == ("100%", "\n", 0)
        await log.close()
        assert texts(await all_of(JobLog(tmp_path, pytest.fail))) == ["100%"]

    run(story)


def test_a_line_that_is_an_escape_sequence_is_stored_as_text(tmp_path: Path) -> None:
    async def story() -> None:
        log = JobLog(tmp_path, pytest.fail)
        evil = "\x1b]0;owned\x07\x1b[2J\u202e" + "\x1b" * 70_000
        log.write(KEY, LogLine(5, 0, "0", "stdout", "0", evil))
        log.add(KEY, "0", "stdout", "0", "\x1b[31mred\x1b[0m")
        await log.close()
        [data] = [path.read_text() for path in (tmp_path / KEY).glob("*.log")]
        evil_line, _ = data.splitlines()
        assert "\x1b" not in evil_line
        assert r"\\x1b]0;owned\\x07" in evil_line
        first, second = await all_of(JobLog(tmp_path, pytest.fail))
        assert len(first.text) <= module.MAX_TEXT
        assert second.text == "\x1b[31mred\x1b[0m", "colours stay"

    run(story)


@pytest.mark.parametrize("source", ["../../evil", "/etc/cron.d/x", "", "..", "x" * 250, "@ada"])
def test_the_name_of_a_worker_is_no_path(tmp_path: Path, source: str) -> None:
    async def story() -> None:
        log = JobLog(tmp_path / "history", pytest.fail)
        log.write(KEY, LogLine(5, 0, source, "stdout", "0", "hello"))
        await log.close()
        [path] = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert path.parent == tmp_path / "history" / KEY
        assert texts(await all_of(log, sources=(source,))) == ["hello"]

    run(story)


def test_a_pump_copies_a_log_as_far_as_there_is_room_and_again_what_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.001)

    async def story() -> None:
        log, copy = JobLog(tmp_path / "ada", pytest.fail), JobLog(tmp_path / "bob", pytest.fail)
        room, arrives, num_sent = 0, True, 0

        def send(line: LogLine) -> bool:
            nonlocal room, num_sent
            if not room:
                return False
            room, num_sent = room - 1, num_sent + 1
            if arrives:
                copy.write(KEY, line)
            return True

        pump = LogPump(log, KEY, send, lambda source: source != "9")
        for number in range(10):
            log.add(KEY, "0", "stdout", "0", str(number))
            log.add(KEY, "9", "stdout", "9", "of another node")
        await pump.sent(0.02)
        assert num_sent == 0
        room = 4
        await pump.sent(0.02)
        arrives, room = False, 3  # over a link that is about to end
        await pump.sent(0.02)
        assert texts(await all_of(copy)) == ["0", "1", "2", "3"]
        arrives, room = True, 100
        pump.again()
        await pump.sent(30)
        assert texts(await all_of(copy)) == [str(number) for number in range(10)]
        assert await all_of(copy) == await all_of(log, sources=("0",))
        assert num_sent > 10
        pump.close()

    run(story)


def test_a_leader_that_names_many_sources_and_a_reader_of_unknown_jobs_fill_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SOURCES", 3)
    notes: list[str] = []

    async def story() -> None:
        log = JobLog(tmp_path, notes.append)
        for number in range(5):
            log.add(KEY, str(number), "stdout", "", "a line")
        log.add(KEY, "1", "stdout", "", "another")
        await log.close()
        assert len(list((tmp_path / KEY).iterdir())) == 3
        assert [source for source, _ in log.newest(KEY)] == ["0", "1", "2"]
        assert log.newest("unknown") == ()
        assert await log.read("unknown", {}, num_last=3) == ([], False)
        assert log._jobs.keys() == {KEY}

    asyncio.run(story())
    assert notes == ["lines of job logs are lost: job job has more than 3 sources"]
