"""What a training does, for TensorBoard, as a callback."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from potluck.optional import require

FLUSH_S = 10
"""Seconds until figures show in TensorBoard at the latest."""


class TensorBoardLogger:
    """Writes event files to ``directory``; look at them with ``tensorboard --logdir DIRECTORY``.

    Rank 0 writes; after its loss the next rank 0 does, to a file of its own that TensorBoard joins
    on. Scalars: loss/step, loss/epoch, world_size, batch_size, samples_per_s (of rank 0),
    skipped_steps, and with dynamic batching noise_scale. ``log`` adds others.

    Needs tensorboardX: MissingDependency, on every rank, with the pip command.
    """

    def __init__(self, directory: str | os.PathLike[str], *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1")
        self._module: Any = require("tensorboardX", "tensorboard")
        self._directory = os.fspath(directory)
        self._every = every
        self._job: Any = None
        self._writer: Any = None

    def on_train_begin(self, job: Any) -> None:
        """Keep the loop."""
        self._job = job

    def on_step_end(self, step: int, loss: float) -> None:
        """Write the figures of a step."""
        if step % self._every:
            return
        job = self._job
        self.log(
            step,
            **{"loss/step": loss},
            world_size=job.ctx.world_size,
            batch_size=job.batch_size,
            samples_per_s=job.samples_per_s,
            skipped_steps=job.num_skipped,
            noise_scale=job.noise_scale,
        )

    def on_epoch_end(self, epoch: int, loss: float) -> None:
        """Write the mean loss of an epoch, and let it reach the disk."""
        self.log(self._job.step_number, **{"loss/epoch": loss})
        if self._writer is not None:
            self._writer.flush()

    def on_train_end(self, job: Any) -> None:
        """End the file."""
        self.close()

    def log(self, step: int, /, **scalars: float) -> None:
        """Write ``scalars`` at ``step``; nothing on other ranks than the leader."""
        if self._job is None:
            raise RuntimeError("log belongs into a training: pass this object in callbacks=[...]")
        if not self._job.ctx.is_master:
            return
        if self._writer is None:
            # What an earlier run wrote beyond this step is taken back. The library names files by
            # the second: the suffix keeps two writers apart, in the order of their beginning.
            self._writer = self._module.SummaryWriter(
                self._directory,
                purge_step=step,
                flush_secs=FLUSH_S,
                filename_suffix=f".{time.time_ns()}",
            )
        for name, value in scalars.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left to the disk. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
