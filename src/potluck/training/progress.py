"""The progress of a training: the committed steps and samples, equal on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from potluck.checkpoint.state import State
from potluck.errors import CheckpointError, ConfigurationError
from potluck.training.noise import NoiseBatching, NoiseEstimate
from potluck.training.sampler import Batch, Schedule


@dataclass(slots=True)
class Progress:
    """Steps and samples committed since the training began, and the batch of the next step.

    ``num_skipped`` counts committed steps without an update (after an overflow of the loss scale).
    ``is_stopped``: the script ended the training before the end of the schedule.
    """

    schedule: Schedule
    batching: NoiseBatching | None = None
    step: int = 0
    committed: int = 0
    num_skipped: int = 0
    is_stopped: bool = False
    batch_size: int = field(init=False)
    noise: NoiseEstimate = field(default_factory=NoiseEstimate)
    _loss_sum: float = 0.0
    _loss_weight: float = 0.0

    def __post_init__(self) -> None:
        size = self.schedule.batch_size
        if self.batching is not None and self.batching.clamp(size) != size:
            raise ValueError(
                f"batch_size {size} is not between min_batch {self.batching.min_batch} "
                f"and max_batch {self.batching.max_batch}"
            )
        self.batch_size = size

    @property
    def done(self) -> bool:
        """Whether every sample of every epoch is committed, or the script has stopped."""
        return self.is_stopped or self.committed >= self.schedule.total

    @property
    def epoch(self) -> int:
        """The epoch of the data set that the next step belongs to."""
        return self.batch().epoch

    @property
    def epoch_loss(self) -> float:
        """The mean loss of the present epoch's samples; NaN without losses."""
        return self._loss_sum / self._loss_weight if self._loss_weight else math.nan

    def batch(self) -> Batch:
        """The batch of the next step."""
        return self.schedule.batch(self.committed, self.batch_size)

    def count(self, batch: Batch, loss: float, *, skipped: bool) -> None:
        """Count the step on ``batch``, which was committed with the global ``loss`` (or NaN)."""
        if not batch.start:
            self._loss_sum = self._loss_weight = 0.0
        if math.isfinite(loss):
            self._loss_sum += loss * batch.size
            self._loss_weight += batch.size
        self.step += 1
        self.committed += batch.size
        self.num_skipped += skipped

    def capture(self) -> dict[str, State]:
        """The progress as a state, for a joining worker or a checkpoint."""
        return {
            "step": self.step,
            "committed": self.committed,
            "num_samples": self.schedule.num_samples,
            "seed": self.schedule.seed,
            "shuffle": self.schedule.shuffle,
            "num_skipped": self.num_skipped,
            "is_stopped": self.is_stopped,
            "batch_size": self.batch_size,
            "noise": [self.noise.signal, self.noise.noise, self.noise.num],
            "epoch_loss": [self._loss_sum, self._loss_weight],
        }

    def restore(self, state: State) -> None:
        """Set the progress to ``state``, a result of ``capture`` on this or another rank.

        CheckpointError if it is no such state; ConfigurationError if it belongs to another data set
        or seed. Without ``batching`` the batch size of the script's schedule applies.
        """
        try:
            found = {name: int(state[name]) for name in ("step", "committed", "num_skipped")}
            order = (state["num_samples"], state["seed"], state["shuffle"])
            batch_size = int(state["batch_size"])
            signal, noise, num = state["noise"]
            loss_sum, loss_weight = map(float, state["epoch_loss"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not the state of an elastic loop: {error!r}") from error
        mine = (self.schedule.num_samples, self.schedule.seed, self.schedule.shuffle)
        if order != mine:
            raise ConfigurationError(
                f"this state belongs to a training on {_describe(*order)}; this training is on "
                f"{_describe(*mine)}: pass the same, or another directory for checkpoints"
            )
        self.step, self.committed = found["step"], found["committed"]
        self.num_skipped = found["num_skipped"]
        self.is_stopped = bool(state.get("is_stopped", False))
        self._loss_sum, self._loss_weight = loss_sum, loss_weight
        if self.batching is not None:
            self.batch_size = self.batching.clamp(batch_size)
            self.noise = NoiseEstimate(float(signal), float(noise), int(num))


def _describe(num_samples: Any, seed: Any, shuffle: Any) -> str:
    order = f"shuffled with seed {seed}" if shuffle else "in their own order"
    return f"{num_samples} samples {order}"
