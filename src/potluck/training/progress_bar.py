"""A callback that draws a progress bar on the terminal of rank 0."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from potluck._core.forks import at_exit, not_at_exit


class ProgressBar:
    """A callback: shows samples, loss and speed on rank 0; after its loss, on the next rank 0.

    ``file`` is the output, by default stderr. An output that is no terminal gets a line per epoch.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file, stderr=file is None)
        self._job: Any = None
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def on_train_begin(self, job: Any) -> None:
        """Keep the loop, and draw the bar on rank 0."""
        self._job = job
        self._draw()

    def on_step_end(self, step: int, loss: float) -> None:
        """Move the bar."""
        if self._bar is not None:
            job = self._job
            speed = self._bar.tasks[0].speed  # of all ranks: the bar counts committed samples
            self._bar.update(
                self._task,
                completed=job.committed,
                epoch=self._epoch(job.epoch),
                loss=f"{loss:.4f}",
                speed=f"{speed:.0f} samples/s" if speed else "",
            )

    def on_epoch_end(self, epoch: int, loss: float) -> None:
        """Write a line if the output is no terminal."""
        if self._job.ctx.is_master and not self._console.is_terminal:
            self._console.print(f"epoch {self._epoch(epoch)}: loss {loss:.4f}", highlight=False)

    def on_group_change(self, world_size: int) -> None:
        """Draw the bar if this worker has become rank 0."""
        self._draw()

    def on_train_end(self, job: Any) -> None:
        """Stop drawing; the bar stays on the terminal."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            not_at_exit(self._stop)

    def _epoch(self, epoch: int) -> str:
        epochs = self._job.schedule.epochs
        return (
            str(epoch + 1) if self._job.schedule.is_open else f"{min(epoch + 1, epochs)}/{epochs}"
        )

    def _draw(self) -> None:
        is_mine = self._job.ctx.is_master and self._console.is_terminal
        if self._bar is not None or not is_mine:
            return
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        job = self._job
        self._task = self._bar.add_task(
            "",
            total=job.schedule.aim or None,
            completed=job.committed,
            epoch=self._epoch(job.epoch),
            loss="-",
            speed="",
        )
        self._bar.start()
        at_exit(self._stop)  # shows the cursor again if the script fails
