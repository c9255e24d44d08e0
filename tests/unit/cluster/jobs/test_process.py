"""Bytes of a worker's pipe into lines."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

import pytest

from potluck._core.cluster.jobs.orphans import Orphans
from potluck._core.cluster.jobs.process import MAX_LINE, LineSplitter, WorkerProcess
from potluck._core.wire.worker_link import EOT
from potluck.errors import LinkError


def lines_of(*pieces: bytes) -> list[str]:
    splitter = LineSplitter()
    return [line for piece in pieces for line in splitter.feed(piece)] + splitter.finish()


def test_lines_come_out_whole_whatever_the_pieces() -> None:
    assert lines_of(b"one\ntw", b"o\n", b"thr", b"ee") == ["one", "two", "three"]


def test_empty_lines_are_kept() -> None:
    assert lines_of(b"one\n\n\ntwo\n") == ["one", "", "", "two"]


def test_all_states_of_a_progress_bar_are_one_line() -> None:
    assert lines_of(b"10%\r20%\r", b"done\r", b"\nnext\r\n") == ["done", "next"]
    assert lines_of(b"\r 0%", b"\r 50%", b"\r100%\n") == ["100%"]
    gone = b"\r100%\r    \r"
    assert lines_of(gone) == [], "the bar was cleared"
    assert lines_of(gone, b"best: 3\n") == ["best: 3"]


def test_the_state_of_a_progress_bar_can_be_seen_at_any_time() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"starting\n\r 10%") == ["starting"]
    assert (splitter.open, splitter.is_progress) == (" 10%", True)
    assert splitter.feed(b"\r 20%\r") == []
    assert (splitter.open, splitter.is_progress) == (" 20%", True)
    for percent in range(30, 100):
        assert splitter.feed(b"\r %d%%" % percent) == []
    assert splitter.open == " 99%"
    assert splitter.feed(b"\r100%\nname? ") == ["100%"]
    assert (splitter.open, splitter.is_progress) == ("name? ", False)


def test_bars_below_each_other_take_turns() -> None:
    """As tqdm draws a bar in a bar: down by a line feed, and up by an escape sequence."""
    splitter = LineSplitter()
    assert splitter.feed(b"\router 0%") == []
    for percent in (10, 20):
        assert splitter.feed(b"\n\rinner %d%%\x1b[A" % percent) == (
            ["outer 0%"] if percent == 10 else []
        )
        assert splitter.open == f"inner {percent}%"
    assert splitter.feed(b"\router 50%") == []
    assert splitter.open == "outer 50%"


def test_what_is_no_text_is_shown_as_such() -> None:
    assert lines_of(b"\xff\xfe\n") == ["��"]


def test_a_line_without_end_is_cut_and_bounded() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(10) for line in splitter.feed(b"x" * MAX_LINE)]
    assert {len(line) for line in lines} == {MAX_LINE}
    assert len("".join(lines + splitter.finish())) == 10 * MAX_LINE


def test_any_cut_gives_the_same_lines(seed: int) -> None:
    rng = random.Random(seed)
    text = b"".join(rng.choice([b"a", b"bc", b"\n", b"\r\n", b"\r", b""]) for _ in range(300))
    whole = lines_of(text)
    for _ in range(50):
        cuts = sorted(rng.randrange(len(text)) for _ in range(rng.randrange(20)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert lines_of(*pieces) == whole


def test_nothing_gives_no_line() -> None:
    assert lines_of() == []
    assert lines_of(b"") == []


WRITES_AT_THE_END = """
import os, sys, time
os.close(2)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os.write(1, b"all that it found out\\n" * 2000)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="workers need POSIX")
def test_what_waits_in_the_pipe_of_an_ended_worker_is_read_after_the_loop_stood_still(
    tmp_path: Path,
) -> None:
    """The output is behind, so reading pauses; the agent's loop stands still until the pause and
    the wait for last words are over at once."""
    lines: list[str] = []
    is_behind = False

    async def run() -> None:
        nonlocal is_behind
        exited = asyncio.Event()
        process = WorkerProcess(
            [sys.executable, "-c", WRITES_AT_THE_END, str(tmp_path / "go")],
            {},
            limits={},
            sink=lambda stream, line, end: lines.append(line),
            is_behind=lambda: is_behind,
            on_exit=lambda code: exited.set(),
            orphans=Orphans(),
        )
        async with asyncio.timeout(60):
            _, errors = process._readers
            await errors.ended.wait()
            is_behind = True
            (tmp_path / "go").touch()
            await exited.wait()
            releasing = asyncio.create_task(process.release())
            await asyncio.sleep(0)
            is_behind = False
            asyncio.get_running_loop().call_soon(time.sleep, 1.5)
            await releasing

    asyncio.run(run())
    assert lines == ["all that it found out"] * 2000


READS_WHAT_IS_TYPED = """
import os, sys, time
fd, *_ = map(int, os.environ["POTLUCK_TYPED"].split(":"))
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
num = 0
while (text := os.read(fd, 4096)) and b"\\4" not in text:
    num += len(text)
sys.exit(0 if num + text.index(b"\\4") == int(sys.argv[2]) else 1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="workers need POSIX")
def test_what_is_typed_at_a_debugger_waits_for_a_full_pipe_and_too_much_is_refused(
    tmp_path: Path,
) -> None:
    typed = b"p 1\n" * 1024

    async def run() -> int:
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        most = 64 * 1024 + len(typed)  # the limit is looked at before the text is taken
        process = WorkerProcess(
            [sys.executable, "-c", READS_WHAT_IS_TYPED, str(tmp_path / "go"), str(most)],
            {},
            limits={},
            sink=lambda stream, line, end: None,
            is_behind=lambda: False,
            on_exit=exited.set_result,
            orphans=Orphans(),
        )
        async with asyncio.timeout(60):
            for _ in range(most // len(typed)):
                process.type(typed)  # before the loop can write any
            with pytest.raises(LinkError, match="reads nothing of what is typed"):
                process.type(typed)
            process.type(EOT)
            while len(process._waiting) > most:
                await asyncio.sleep(0)  # until the pipe is full
            (tmp_path / "go").touch()
            code = await exited
            process.type(b"late\n")
            await process.release()
        return code

    assert asyncio.run(run()) == 0
