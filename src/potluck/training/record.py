"""The record of a training: the losses, steps and samples that a script reads from the loop."""

from __future__ import annotations

import math

from potluck.training.progress import Progress
from potluck.training.sampler import Schedule


class Record:
    """The values of one loop. ``losses``, ``recoveries``, ``num_reruns`` and ``samples_per_s`` are
    this worker's; the properties that come from ``progress`` are equal on all ranks."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.losses: list[float] = []
        """Global losses of the steps committed while this worker was a member; NaN: none known."""
        self.recoveries: list[float] = []
        """Seconds from each lost peer to the next commit."""
        self.num_reruns = 0
        """The number of steps that this worker ran again."""
        self.samples_per_s = 0.0
        """Samples per second of this rank, with its waits: a moving average over steps."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of samples that the loop was made with."""
        return self._progress.schedule

    @property
    def step_number(self) -> int:
        """The number of steps committed since the training began."""
        return self._progress.step

    @property
    def committed(self) -> int:
        """The number of samples committed since the training began, over all epochs."""
        return self._progress.committed

    @property
    def epoch(self) -> int:
        """The epoch of the data set that the next step belongs to, from 0."""
        return self._progress.epoch

    @property
    def batch_size(self) -> int:
        """The samples of a step of all ranks together (the last step of an epoch may have
        fewer)."""
        return self._progress.batch_size

    @property
    def noise_scale(self) -> float:
        """The gradient's simple noise scale in samples; NaN while it is unknown."""
        return self._progress.noise.scale

    @property
    def num_skipped(self) -> int:
        """The number of committed steps without an update (after an overflow of the loss scale)."""
        return self._progress.num_skipped

    @property
    def last_loss(self) -> float:
        """The global loss of the last committed step; NaN if none is known."""
        return self.losses[-1] if self.losses else math.nan
