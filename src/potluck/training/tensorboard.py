"""A callback that writes the figures of a training for TensorBoard."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from potluck._core.optional import require

FLUSH_S = 10
"""Seconds after which figures are written to the disk at the latest."""


class TensorBoardLogger:
    """A callback: writes event files to ``directory``, for ``tensorboard --logdir DIRECTORY``.

    Rank 0 writes, on every ``every``-th step; after its loss the next rank 0 continues in another
    file, which TensorBoard shows as the same run. Scalars: loss/step, loss/epoch, world_size,
    batch_size, samples_per_s (of rank 0), skipped_steps, and with ``NoiseBatching`` noise_scale.
    ``log`` writes other scalars.

    MissingDependency, on every rank, without tensorboardX.
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
        """Write the mean loss of an epoch, and flush the file."""
        self.log(self._job.step_number, **{"loss/epoch": loss})
        if self._writer is not None:
            self._writer.flush()

    def on_train_end(self, job: Any) -> None:
        """Close the file."""
        self.close()

    def log(self, step: int, /, **scalars: float) -> None:
        """Write ``scalars`` at ``step`` on rank 0; on other ranks do nothing."""
        if self._job is None:
            raise RuntimeError("log belongs into a training: pass this object in callbacks=[...]")
        if not self._job.ctx.is_master:
            return
        if self._writer is None:
            # `purge_step` hides later steps of an earlier run, which are computed again. The
            # library names files by the second; the suffix keeps two writers apart, in order of
            # their start.
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
        """Flush and close the file. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
