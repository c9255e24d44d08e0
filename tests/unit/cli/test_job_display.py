"""What a person sees of a running job, and that writing it never holds the agent up."""

from __future__ import annotations

import asyncio
import io
import threading
import time

import msgspec
import pytest
from rich.console import Console

from potluck._core.cluster.jobs.summary import RecoverySummary, Summary, WorkerSummary
from potluck._core.wire.worker_link import JobState, Samples, WorkerStatus
from potluck.cli.job_display import (
    LiveView,
    PlainView,
    Writer,
    duration,
    how_far,
    number,
    print_summary,
    watcher_for,
)


class Job:
    """A job to look at (``JobClient``)."""

    workers = ("0", "1")

    def __init__(self) -> None:
        started = [WorkerStatus(name, -1, "starting", 7, 0, "", -1, None) for name in self.workers]
        self.state = JobState(
            *("train-1", "", 0, "dir/train.py", time.time(), 0, -1, None, tuple(started), ())
        )

    def status(self) -> JobState:
        return self.state

    def interrupt(self, number: int) -> None:
        raise AssertionError("nobody interrupts here")

    def at_work(self) -> None:
        first = WorkerStatus("0", 0, "member", 7, 0, "cuda:0", 60, 812.4)
        self.reports(step=60, loss=0.25, workers=(first, *self.state.workers[1:]))

    def reports(self, **what: object) -> None:
        self.state = msgspec.structs.replace(self.state, **what)


@pytest.fixture
def job() -> Job:
    return Job()


def watch(view: PlainView | LiveView, job: Job) -> None:
    """A short job: two lines and a note."""

    async def look() -> None:
        view.begin(job)
        view.line("0", "stdout", "a [bold]line[/bold]")
        view.line("1", "stderr", "a warning")
        view.note("worker 1 lost\nand found")
        view.end()

    asyncio.run(look())


def test_plain_lines_have_their_worker_in_front(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    watch(PlainView(), job)
    shown = capsys.readouterr()
    assert shown.out == "[0] a [bold]line[/bold]\npotluck: worker 1 lost\n    and found\n"
    assert shown.err == "[1] a warning\n"


def test_the_live_view_shows_lines_above_a_table_of_workers(job: Job) -> None:
    job.at_work()
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    watch(LiveView(console), job)
    shown = screen.getvalue()
    assert "[0] a [bold]line[/bold]" in shown, "markup of a script's is not ours"
    assert "[1] a warning" in shown
    assert "potluck: worker 1 lost" in shown
    assert "train.py" in shown
    assert "step 60 · loss 0.2500" in shown
    assert "cuda:0" in shown
    assert "812" in shown


def on_screen(job: Job, width: int) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    watch(LiveView(console), job)
    return screen.getvalue()


def test_the_live_view_shows_how_far_the_training_is(job: Job) -> None:
    job.reports(samples=Samples(1000, 60_000, 100.0))
    assert "1,000 of 60,000 samples (1%)  100/s  about 9 min 50 s left" in on_screen(job, 100)
    narrow = on_screen(job, 30)
    assert "1%  about 9 min 50 s left" in narrow
    assert "samples" not in narrow


def test_a_script_that_tells_of_no_samples_is_shown_as_ever(job: Job) -> None:
    job.reports(step=60, loss=0.25)
    assert "samples (" not in on_screen(job, 100)


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (Samples(12_800, 60_000, 3e3), "12,800 of 60,000 samples (21%)  3,000/s  about 16 s left"),
        (Samples(59_999, 60_000, None), "59,999 of 60,000 samples (99%)"),
        (Samples(60_000, 60_000, 3100.0), "60,000 of 60,000 samples (100%)"),
        (Samples(1, 9, 0.0), "1 of 9 samples (11%)"),
        (Samples(10, 9, 1.0), "10 of 9 samples (111%)"),
    ],
)
def test_how_far_a_training_is_in_words(samples: Samples, text: str) -> None:
    assert how_far(samples) == text


def test_without_a_terminal_lines_are_plain() -> None:
    assert isinstance(watcher_for(io.StringIO(), plain=False), PlainView)


def test_a_blocked_screen_holds_up_the_writer_and_nobody_else() -> None:
    gate, seen = threading.Event(), []
    writer = Writer(lambda: None)
    writer.write(gate.wait)
    assert not writer.is_behind
    for line in range(20_000):
        writer.write(lambda line=line: seen.append(line))
    assert writer.is_behind
    gate.set()
    writer.close()
    assert seen == list(range(20_000))


def test_a_closed_screen_is_told_once_and_the_rest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, seen = [], []

    def broken() -> None:
        raise BrokenPipeError

    monkeypatch.setattr("potluck.cli.job_display.silence", lambda stream: None)
    writer = Writer(lambda: told.append(True))
    writer.write(broken)
    writer.write(broken)
    writer.write(lambda: seen.append(1))
    writer.close()
    assert told == [True]
    assert seen == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (7.9, "7 s"), (192, "3 min 12 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (float("nan"), "-"), (3.14159, "3.1"), (12345.6, "12,346")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_the_summary_says_what_counts(capsys: pytest.CaptureFixture[str]) -> None:
    worker = WorkerSummary("0", True, 0, 1, "ab" * 32, {})
    print_summary(
        Summary(
            job="j",
            script="s.py",
            exit_code=1,
            seconds=61.0,
            committed_steps=300,
            steps_run_again=1,
            facts={"test_accuracy": 0.98123},
            hashes_equal=False,
            workers=(worker,),
            recoveries=(
                RecoverySummary(("2",), "worker 2 lost (killed)", 0.4, 0.9, 60, True),
                RecoverySummary(("1",), "worker 1 lost (killed)", None, None, None, False),
            ),
            problems=("the workers ended with different parameters",),
            events=(),
            samples=Samples(9_600, 9_600, 812.0),
        )
    )
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if line] == [
        "test accuracy           0.9812",
        "committed samples       9,600 of 9,600",
        "committed steps         300",
        "steps run again         1",
        "seconds                 1 min 01 s",
        "recovery                worker 2 lost (killed), re-formed in 0.40 s, step 60 run again, "
        "next step committed after 0.90 s",
        "recovery                worker 1 lost (killed), no step committed after it",
        "parameters of worker 0  abababababababab",
        "parameters              DIFFERENT",
    ]
    assert shown.err == "potluck: the workers ended with different parameters\n"


def test_what_breaks_the_output_ends_the_run_and_not_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lines that nobody writes would fill the queue, and then the workers would wait for ever."""
    broken = threading.Event()
    writer = Writer(broken.set)

    def breaks() -> None:
        raise MemoryError("no room")

    writer.write(breaks)
    assert broken.wait(20)
    for _ in range(20_000):
        writer.write(breaks)
    writer.close()
    assert not writer.is_behind
    assert "a line could not be written" in caplog.text


def test_on_a_narrow_terminal_the_table_has_what_can_be_read_there(job: Job) -> None:
    job.at_work()
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=30, color_system=None)
    watch(LiveView(console), job)
    shown = screen.getvalue()
    assert all(title in shown for title in ("worker", "state", "step", "starting", "60"))
    assert "devi" not in shown
    assert "…" not in shown, "nothing is cut"
