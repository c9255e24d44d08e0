"""The record of a training: losses, steps and samples, as a script reads them from the loop.

``Record`` holds the values of one loop; ``Recorded`` are the properties that every loop built on it
has, so that ``potluck.training.ElasticLoop`` and ``potluck.torch.ElasticLoop`` read alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from potluck.training.progress import Progress
from potluck.training.sampler import Schedule


@dataclass(slots=True)
class Record:
    """``progress`` is equal on all ranks; the rest is what this worker saw."""

    progress: Progress
    losses: list[float] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    num_reruns: int = 0
    samples_per_s: float = 0.0


class Recorded:
    """A loop whose values are in ``_record``."""

    _record: Record

    @property
    def schedule(self) -> Schedule:
        """Which samples each step has."""
        return self._record.progress.schedule

    @property
    def step_number(self) -> int:
        """Steps committed since the training began."""
        return self._record.progress.step

    @property
    def committed(self) -> int:
        """Samples committed since the training began, over all epochs."""
        return self._record.progress.committed

    @property
    def epoch(self) -> int:
        """The epoch of the data set that the next step belongs to, from 0."""
        return self._record.progress.epoch

    @property
    def batch_size(self) -> int:
        """Samples of the next step, of all ranks together (fewer at the end of an epoch)."""
        return self._record.progress.batch_size

    @property
    def noise_scale(self) -> float:
        """The gradient's simple noise scale in samples, NaN while it is not known."""
        return self._record.progress.noise.scale

    @property
    def num_skipped(self) -> int:
        """Committed steps that applied nothing (a loss scale overflowed)."""
        return self._record.progress.num_skipped

    @property
    def losses(self) -> list[float]:
        """Global losses of the steps committed while this worker was there; NaN: none told."""
        return self._record.losses

    @property
    def last_loss(self) -> float:
        """The global loss of the last committed step, NaN if none was told."""
        return self.losses[-1] if self.losses else math.nan

    @property
    def recoveries(self) -> list[float]:
        """Seconds from each lost peer to the next commit."""
        return self._record.recoveries

    @property
    def num_reruns(self) -> int:
        """Steps that this worker ran again."""
        return self._record.num_reruns

    @property
    def samples_per_s(self) -> float:
        """Samples per second of this rank, waiting included, averaged over the last steps."""
        return self._record.samples_per_s
