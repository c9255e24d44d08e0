"""The record of a training: losses, steps and samples, as a script reads them from the loop."""

from __future__ import annotations

import math

from potluck.training.progress import Progress
from potluck.training.sampler import Schedule


class Record:
    """The values of one loop: those of its progress are equal on all ranks, the rest is what this
    worker saw."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.losses: list[float] = []
        """Global losses of the steps committed while this worker was there; NaN: none told."""
        self.recoveries: list[float] = []
        """Seconds from each lost peer to the next commit."""
        self.num_reruns = 0
        """Steps that this worker ran again."""
        self.samples_per_s = 0.0
        """Samples per second of this rank, waiting included, averaged over the last steps."""

    @property
    def schedule(self) -> Schedule:
        """Which samples each step has."""
        return self._progress.schedule

    @property
    def step_number(self) -> int:
        """Steps committed since the training began."""
        return self._progress.step

    @property
    def committed(self) -> int:
        """Samples committed since the training began, over all epochs."""
        return self._progress.committed

    @property
    def epoch(self) -> int:
        """The epoch of the data set that the next step belongs to, from 0."""
        return self._progress.epoch

    @property
    def batch_size(self) -> int:
        """Samples of the next step, of all ranks together (fewer at the end of an epoch)."""
        return self._progress.batch_size

    @property
    def noise_scale(self) -> float:
        """The gradient's simple noise scale in samples, NaN while it is not known."""
        return self._progress.noise.scale

    @property
    def num_skipped(self) -> int:
        """Committed steps that applied nothing (a loss scale overflowed)."""
        return self._progress.num_skipped

    @property
    def last_loss(self) -> float:
        """The global loss of the last committed step, NaN if none was told."""
        return self.losses[-1] if self.losses else math.nan
