"""The display of a job: plain lines or, on a terminal, a live table below the lines of the workers;
at the end, the summary.

A thread does all writing, because a write blocks while the terminal is stopped (Ctrl-S) or a pipe
is not read, and the agent must go on watching its workers. When too many lines wait to be written
(``is_behind``), the agent stops reading the workers' output.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import queue
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from potluck._core.background import start_thread
from potluck._core.printable import coloured, paragraph, plain
from potluck._core.system import SIGPIPE
from potluck._core.waiting import to_stderr
from potluck.cli.terminal import console_on, say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.console import Group as RichGroup
    from rich.live import Live
    from rich.text import Text

    from potluck._core.cluster.jobs.summary import RecoverySummary, Summary
    from potluck._core.cluster.run import JobClient, Watcher
    from potluck._core.wire.jobs import End
    from potluck._core.wire.worker_link import Fact, Samples, WorkerStatus

_log = logging.getLogger(__name__)

_REFRESH_PER_S = 5
_MAX_BACKLOG = 10_000
_PROGRESS_S = 10.0
"""How often a progress bar that a worker draws becomes a line, where lines can't be replaced."""


def watcher_for(stream: TextIO, *, plain: bool) -> Watcher:
    """The live view if ``stream`` is a terminal that supports it, else plain lines."""
    if plain or not stream.isatty():
        return PlainView()
    console = console_on(stream)
    return PlainView() if console.is_dumb_terminal else LiveView(console)


class Writer:
    """A thread that runs the functions given to ``write``, in order. When the output can't be
    written any more, the thread calls ``on_broken`` once and drops the rest."""

    def __init__(self, on_broken: Callable[[], None]) -> None:
        self._on_broken = on_broken
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_broken = False
        self._is_terminal = sys.stdout.isatty()
        self._thread = start_thread(
            self._run, name="potluck-output", on_broken=lambda error: on_broken()
        )

    @property
    def is_behind(self) -> bool:
        return self._actions.qsize() > _MAX_BACKLOG

    def write(self, action: Callable[[], None]) -> None:
        self._actions.put(action)

    def close(self) -> None:
        """Return when all is written."""
        self._actions.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            if self._is_broken:
                continue
            try:
                action()
            except Exception as error:
                self._is_broken = True
                if isinstance(error, OSError):
                    silence(sys.stdout)
                    if self._is_terminal and error.errno == errno.EIO:  # it was closed
                        silence(sys.stderr)
                        continue  # a run that is not to outlive its terminal gets SIGHUP
                    if not isinstance(error, BrokenPipeError):  # normal: a reader like `head` ended
                        to_stderr(f"the output can't be written any more ({error.strerror})")
                else:
                    _log.exception("a line could not be written")
                self._on_broken()


def silence(stream: TextIO) -> None:
    """Redirect ``stream`` to the null device, so that the interpreter's last flush succeeds."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _View:
    """The base of both views: the job that is shown, and the thread that writes."""

    def __init__(self) -> None:
        self._job: JobClient | None = None
        self._writer: Writer | None = None

    def begin(self, job: JobClient) -> None:
        import asyncio

        loop = asyncio.get_running_loop()

        def on_broken() -> None:
            with contextlib.suppress(RuntimeError):  # the job may just have ended
                loop.call_soon_threadsafe(job.interrupt, int(SIGPIPE))

        self._job = job
        self._writer = Writer(on_broken)

    @property
    def is_behind(self) -> bool:
        return self._writer is not None and self._writer.is_behind

    def write(self, action: Callable[[], None]) -> None:
        assert self._writer is not None
        self._writer.write(action)

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()


class PlainView(_View):
    """Lines of text: those of a worker begin with its rank, potluck's own with ``potluck``. With
    ``to_stderr`` all go there, because the command's result is something else."""

    def __init__(self, *, to_stderr: bool = False) -> None:
        super().__init__()
        self._to_stderr = to_stderr
        self._due: dict[tuple[str, str], float] = {}

    def line(self, worker: str, stream: str, text: str, end: End = "\n") -> None:
        assert self._job is not None
        if end == "\r" and not self._is_due(worker, stream):
            return
        width = max(map(len, self._job.workers), default=0)
        file = sys.stderr if stream == "stderr" or self._to_stderr else sys.stdout
        line = f"[{plain(worker):>{width}}] {coloured(text)}"
        self.write(lambda: print(line, end=end and "\n", file=file, flush=True))

    def _is_due(self, worker: str, stream: str) -> bool:
        """Whether a state of a progress bar is to be shown: now and then."""
        now = time.monotonic()
        is_due = now >= self._due.get((worker, stream), 0.0)
        if is_due:
            self._due[worker, stream] = now + _PROGRESS_S
        return is_due

    def note(self, text: str) -> None:
        line = f"potluck: {paragraph(text)}"
        file = sys.stderr if self._to_stderr else sys.stdout
        self.write(lambda: print(line, file=file, flush=True))


class LiveView(_View):
    """A table of the workers at the bottom of the terminal, below the lines of workers and notes,
    with the progress bars that workers draw. While something may be typed behind a worker's prompt
    there is no table."""

    _COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._open: dict[tuple[str, str], Text] = {}
        self._live: Live | None = None

    def begin(self, job: JobClient) -> None:
        super().begin(job)
        self._show_table()

    def _show_table(self) -> None:
        from rich.live import Live

        if self._live is None:  # one that was stopped would erase what came since
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=_REFRESH_PER_S,
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._live.start()

    def _hide_table(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, worker: str, stream: str, text: str, end: End = "\n") -> None:
        from rich.text import Text

        number = worker.split(" ")[0]
        color = self._COLORS[int(number) % len(self._COLORS) if number.isdigit() else 0]
        line = Text(f"[{plain(worker)}] ", style=color)
        line.append(Text.from_ansi(coloured(text), style="default"))
        if end == "\r":
            self._open[worker, stream] = line
            return
        self._open.pop((worker, stream), None)
        self.write(partial(self._prompt if end == "" else self._print, line))

    def note(self, text: str) -> None:
        from rich.text import Text

        self.write(partial(self._print, Text(f"potluck: {paragraph(text)}", style="bold")))

    def _print(self, line: Text) -> None:
        self._show_table()
        self._console.print(line, soft_wrap=True)

    def _prompt(self, line: Text) -> None:
        self._hide_table()
        self._console.print(line, soft_wrap=True, end="")

    def end(self) -> None:
        super().end()
        try:
            self._hide_table()
        except OSError:  # the terminal was closed
            silence(sys.stdout)
            silence(sys.stderr)

    def _render(self) -> RichGroup:
        from rich.box import HEAVY_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        job = self._job
        if job is None:
            return Group()
        state = job.status()
        is_narrow = self._console.width < _WIDE
        bar = [] if state.samples is None else [_bar(state.samples, is_narrow=is_narrow)]
        parts = [Path(state.script).name, duration(time.time() - state.started)]
        parts.append(f"group {state.epoch}")
        if state.step >= 0:
            parts.append(f"step {state.step}")
        if state.loss is not None and not math.isnan(state.loss):
            parts.append(f"loss {state.loss:.4f}")
        title = Text(_in_lines(list(map(plain, parts)), self._console.width), style="bold")
        table = Table(box=None if is_narrow else HEAVY_HEAD)
        titles = _NARROW_TITLES if is_narrow else TITLES
        for name in titles:
            table.add_column(name, justify="left" if name in ("state", "device") else "right")
        for worker in state.workers:
            cells: dict[str, str | Text] = {**cells_of(worker)}
            cells["state"] = Text(worker.phase, style=_STYLES.get(worker.phase, ""))
            table.add_row(*(cells[name] for name in titles))
        drawn = list(self._open.values())
        for line in drawn:
            line.truncate(self._console.width, overflow="ellipsis")
        return Group(title, table, *bar, *drawn)


def cells_of(worker: WorkerStatus) -> dict[str, str]:
    """The cells of a table of workers, by the titles of their columns."""
    return {
        "worker": f"{worker.worker} {worker.node}".strip(),
        "rank": str(worker.rank) if worker.rank >= 0 else "-",
        "state": worker.phase,
        "device": worker.device or "-",
        "samples/s": number(worker.samples_per_s),
        "step": str(worker.step) if worker.step >= 0 else "-",
    }


def _in_lines(parts: list[str], width: int) -> str:
    """``parts`` with dots between, in as few lines of ``width`` as they need whole."""
    text, used = parts[0], len(parts[0])
    for part in parts[1:]:
        fits = used + 3 + len(part) <= width
        text += f" · {part}" if fits else f"\n{part}"
        used = used + 3 + len(part) if fits else len(part)
    return text


def _bar(samples: Samples, *, is_narrow: bool) -> RenderableType:
    """The progress of the training in words, with a bar if the terminal is wide enough."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    if is_narrow:
        return f"{_percent(samples)}  {time_left(samples)}".strip()
    line = Table.grid(padding=(0, 1))
    line.add_row(
        ProgressBar(total=samples.total, completed=samples.committed, width=_BAR),
        how_far(samples),
    )
    return line


TITLES = ("worker", "rank", "state", "device", "samples/s", "step")
_NARROW_TITLES = ("worker", "state", "step")
_WIDE = 60
"""Columns that a terminal needs to show all titles."""
_BAR = 20

_STYLES = {
    "member": "green",
    "finished": "green",
    "starting": "yellow",
    "ready": "yellow",
    "waiting": "yellow",
    "evicted": "red",
    "gone": "dim",
    "stopping": "dim",
}


def number(value: float | None) -> str:
    """The text of a rate in samples per second: one decimal below 100, ``-`` if it is unknown."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def how_far(samples: Samples) -> str:
    """The progress in words: ``12,800 of 60,000 samples (21%)  3,100/s  about 15 s left``."""
    text = f"{samples.committed:,} of {samples.total:,} samples ({_percent(samples)})"
    left = time_left(samples)
    return f"{text}  {number(samples.per_s)}/s  {left}" if left else text


def time_left(samples: Samples) -> str:
    """The estimate ``about 15 s left``; empty at the end, and while the rate is not known."""
    left = samples.total - samples.committed
    if left <= 0 or not samples.per_s:
        return ""
    return f"about {duration(math.ceil(left / samples.per_s))} left"


def _percent(samples: Samples) -> str:
    return f"{100 * samples.committed // samples.total}%"  # 100% only when all is done


def duration(seconds: float) -> str:
    """The text of a time: ``7 s``, ``3 min 12 s``, ``2 h 05 min``."""
    whole = int(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def print_summary(summary: Summary, *, is_collected: bool = False) -> None:
    """Write the summary to stdout, and the problems of the job to stderr. ``is_collected``: the
    files that workers wrote are brought here next."""
    lines = list(_lines(summary))
    if lines:
        typer.echo("")
        for line in lines:
            say(line)
    if summary.written and not is_collected:
        say(f"potluck: {_written(summary)}")
    for problem in summary.problems:
        say(f"potluck: {problem.strip() or 'failed'}", err=True)


def _lines(summary: Summary) -> list[str]:
    rows: list[tuple[str, str]] = []
    for name, value in summary.facts.items():
        rows.append((name.replace("_", " "), _shown(value)))
    if summary.committed_steps:
        if summary.samples is not None:
            committed, total = summary.samples.committed, summary.samples.total
            rows.append(("committed samples", f"{committed:,} of {total:,}"))
        rows.append(("committed steps", str(summary.committed_steps)))
        rows.append(("steps run again", str(summary.steps_run_again)))
        rows.append(("seconds", duration(summary.seconds)))
    for recovery in summary.recoveries:
        rows.append(("recovery", _recovery(recovery)))
    for worker in summary.workers:
        if worker.parameter_hash is not None:
            rows.append((f"parameters of worker {worker.worker}", worker.parameter_hash[:16]))
    if summary.hashes_equal is not None:
        rows.append(("parameters", "equal on all" if summary.hashes_equal else "DIFFERENT"))
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _written(summary: Summary) -> str:
    """Where files of the job are, and how to get them."""
    from potluck._core.printable import size_in_words

    known = [
        (each, each.num_files, each.num_bytes or 0) for each in summary.written if each.num_files
    ]
    total = sum(count or 0 for _, count, _ in known)
    where = ", ".join(
        f"{each.machine} ({count}, {size_in_words(size)})" if each.machine else size_in_words(size)
        for each, count, size in known
    )
    away = ", ".join(each.machine for each in summary.written if each.num_files is None)
    parts = []
    if known:
        verb = "file was" if total == 1 else "files were"
        parts.append(f"{total} {verb} written on {where}")
    if away:
        parts.append(f"{away} left before the end, and may hold more")
    return f"{'; '.join(parts)}: potluck fetch {summary.job}"


def _recovery(recovery: RecoverySummary) -> str:
    parts = [recovery.cause]
    if recovery.reformed_s is not None:
        parts.append(f"re-formed in {recovery.reformed_s:.2f} s")
    if recovery.run_again:
        parts.append(f"step {recovery.step} run again")
    if recovery.recovered_s is not None:
        parts.append(f"next step committed after {recovery.recovered_s:.2f} s")
    else:
        parts.append("no step committed after it")
    return ", ".join(parts)


def _shown(value: Fact) -> str:
    if isinstance(value, float) and not math.isnan(value):
        return f"{value:.4f}"
    return str(value)
