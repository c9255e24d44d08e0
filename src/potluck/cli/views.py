"""How a running job looks: plain lines, or on a terminal a live table below the workers' lines."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Group as RichGroup

    from potluck.cluster.agent import Agent
    from potluck.launch.job import Watcher

_REFRESH_PER_S = 5


def watcher_for(stream: TextIO, *, plain: bool) -> Watcher:
    """The live view on a terminal that can show it, else plain lines."""
    if plain or not stream.isatty():
        return PlainView()
    from rich.console import Console

    console = Console(file=stream)
    return PlainView() if console.is_dumb_terminal else LiveView(console)


class PlainView:
    """Every line with its worker's number in front; potluck's own with ``potluck``."""

    def __init__(self) -> None:
        self._width = 1

    def begin(self, agent: Agent) -> None:
        self._width = max(len(name) for name in agent.job.workers)

    def line(self, worker: str, stream: str, text: str) -> None:
        file = sys.stderr if stream == "stderr" else sys.stdout
        print(f"[{worker:>{self._width}}] {text}", file=file, flush=True)

    def note(self, text: str) -> None:
        for line in text.splitlines():
            print(f"potluck: {line}", flush=True)

    def end(self) -> None:
        return None


class LiveView:
    """A table that stays at the bottom, with what happened below it."""

    _COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")

    def __init__(self, console: object) -> None:
        from rich.console import Console
        from rich.live import Live

        assert isinstance(console, Console)
        self._console = console
        self._agent: Agent | None = None
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESH_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )

    def begin(self, agent: Agent) -> None:
        self._agent = agent
        self._live.start()

    def line(self, worker: str, stream: str, text: str) -> None:
        from rich.text import Text

        color = self._COLORS[int(worker) % len(self._COLORS) if worker.isdigit() else 0]
        line = Text(f"[{worker}] ", style=color)
        line.append(text, style="default")
        self._console.print(line, soft_wrap=True)

    def note(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(f"potluck: {text}", style="bold"), soft_wrap=True)

    def end(self) -> None:
        self._live.stop()

    def _render(self) -> RichGroup:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        agent = self._agent
        if agent is None:
            return Group()
        state = agent.status()
        loss = "" if state.loss is None or math.isnan(state.loss) else f" · loss {state.loss:.4f}"
        step = f" · step {state.step}" if state.step >= 0 else ""
        table = Table(
            title=f"{Path(state.script).name} · {duration(time.time() - state.started)} · "
            f"epoch {state.epoch}{step}{loss}",
            title_justify="left",
            title_style="bold",
        )
        for title in ("worker", "rank", "state", "device", "samples/s", "step"):
            table.add_column(title, justify="left" if title in ("state", "device") else "right")
        for worker in state.workers:
            table.add_row(
                worker.worker,
                str(worker.rank) if worker.rank >= 0 else "-",
                Text(worker.phase, style=_STYLES.get(worker.phase, "")),
                worker.device or "-",
                number(worker.samples_per_s),
                str(worker.step) if worker.step >= 0 else "-",
            )
        return Group(table)


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
    """Samples per second, with the digits that mean something."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """``7 s``, ``3 min 12 s``, ``2 h 05 min``."""
    whole = int(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
