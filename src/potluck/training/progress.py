"""The progress of a training: the committed steps and samples, equal on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from potluck.checkpoint.state import State
from potluck.errors import CheckpointError, ConfigurationError
from potluck.training.ledger import Deal, Span, merged, total
from potluck.training.noise import NoiseEstimate
from potluck.training.policy import NoiseBatching
from potluck.training.sampler import STREAM, Batch, Schedule, Taken

_COUNTS = ("round", "step", "last_step", "committed", "num_skipped")


@dataclass(slots=True)
class Progress:
    """Steps and samples committed since the training began, and the batch of the next step.

    ``round`` counts commits: a step each, or the steps of a round. Of a training in rounds
    ``deals`` are the rounds that are dealt and not committed, the oldest first, and ``owed`` the
    spans of the present epoch that earlier rounds were dealt but have not computed. Where ranks
    have samples of their own, ``taken`` says how many of these each rank of the present group has
    in the epoch's committed rounds.
    ``is_flushed``: the last round reduced all parameters.
    ``last_step`` is ``step`` before the last commit. ``num_skipped`` counts committed steps without
    an update (after an overflow of the loss scale). ``is_stopped``: the script ended the training
    before the end of the schedule.
    """

    schedule: Schedule
    batching: NoiseBatching | None = None
    round: int = 0
    step: int = 0
    last_step: int = 0
    committed: int = 0
    owed: tuple[Span, ...] = ()
    deals: list[Deal] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    is_flushed: bool = True
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
        """Whether every sample of every epoch is committed, or the script has stopped, or
        ``max_steps`` are done."""
        is_last = 0 < self.schedule.max_steps <= self.step
        return self.is_stopped or is_last or self.committed >= self.schedule.total

    @property
    def epoch(self) -> int:
        """The epoch of the data set that the next step belongs to."""
        return self.schedule.find(self.committed)[0]

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
            num = self.schedule.num_in([(batch.start, batch.start + batch.size)])
            self._loss_sum += loss * num
            self._loss_weight += num
        self.round += 1
        self.last_step = self.step
        self.step += 1
        self.committed += batch.size
        self.num_skipped += skipped

    def passes(self, every: int, num_steps: int) -> bool:
        """Whether one of the next ``num_steps`` steps has a number that is a multiple."""
        return -(-self.step // every) * every < self.step + num_steps

    def has_passed(self, every: int) -> bool:
        """Whether the last commit has reached a multiple of ``every`` steps, or gone beyond it."""
        return self.step // every > self.last_step // every

    def will_pass(self, every: int, num_steps: int) -> bool:
        """Whether ``has_passed`` after a commit of ``num_steps`` steps."""
        return (self.step + num_steps) // every > self.step // every

    # ------------------------------------------------------------ rounds

    @property
    def frontier(self) -> int:
        """The position in the present epoch from which nothing was dealt yet."""
        start = self.epoch * self.schedule.num_samples
        waiting = total(self.owed) + sum(deal.size for deal in self.deals)
        return self.committed - start + waiting

    @property
    def is_epoch_dealt(self) -> bool:
        """Whether the rounds that are dealt hold all that is left of their epoch."""
        return not self.owed and self.frontier >= self.schedule.num_samples

    def deal(self, size: int) -> Deal:
        """Deal the next round, of at most ``size`` samples of one epoch: owed ones first."""
        frontier, owed = self.frontier, Deal(self.epoch, self.owed)
        end = min(frontier + max(0, size - owed.size), self.schedule.num_samples)
        spans = merged([*owed.part(0, size), *([(frontier, end)] if end > frontier else [])])
        self.owed = owed.part(size, owed.size)
        self.deals.append(Deal(self.epoch, spans))
        return self.deals[-1]

    def deal_nothing(self) -> Deal:
        """Deal a round without samples."""
        self.deals.append(Deal(self.epoch, ()))
        return self.deals[-1]

    def settle(self, done: list[Span], num_steps: int, loss: float) -> Deal:
        """Commit the oldest round, a round of ``num_steps`` steps, of which the offsets ``done``
        were computed. The rest is owed."""
        deal, schedule = self.deals[0], self.schedule
        rest = schedule.owed(deal, done)
        taken = schedule.take(self.taken, done)
        if self.is_epoch_dealt and len(self.deals) == 1:
            rest += schedule.left(taken)
        is_first = self.committed % schedule.num_samples == 0 and not any(n for n, _ in self.taken)
        if is_first and deal.size:
            self._loss_sum = self._loss_weight = 0.0
        self.deals.pop(0)
        size = deal.size - total(rest)
        if math.isfinite(loss):
            num = sum(stop - start for start, stop in done)
            self._loss_sum += loss * num
            self._loss_weight += num
        self.owed = merged([*self.owed, *rest])
        self.round += 1
        self.last_step = self.step
        self.step += num_steps
        self.committed += size
        has_ended = size and self.committed % schedule.num_samples == 0 and not self.owed
        self.taken = [(0, num) for _, num in taken] if has_ended else taken
        return deal

    def capture(self) -> dict[str, State]:
        """The progress as a state, for a joining worker or a checkpoint."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "num_samples": self.schedule.num_samples,
            "seed": self.schedule.seed,
            "shuffle": self.schedule.shuffle,
            "shards": self.schedule.identity[-1],
            "ends": list(self.schedule.ends),
            "is_stopped": self.is_stopped,
            "batch_size": self.batch_size,
            "noise": [self.noise.signal, self.noise.noise, self.noise.num],
            "epoch_loss": [self._loss_sum, self._loss_weight],
            "owed": [list(span) for span in self.owed],
            "deals": [[list(span) for span in deal.spans] for deal in self.deals],
            "taken": [list(each) for each in self.taken],
            "is_flushed": self.is_flushed,
        }

    def restore(self, state: State) -> None:
        """Set the progress to ``state``, a result of ``capture`` on this or another rank.

        CheckpointError if it is no such state; ConfigurationError if it belongs to another data set
        or seed. Without ``batching`` the batch size of the script's schedule applies.
        """
        try:
            counts = {name: int(state[name]) for name in _COUNTS}
            order = (state["num_samples"], state["seed"], state["shuffle"], state["shards"])
            batch_size = int(state["batch_size"])
            signal, noise, num = state["noise"]
            loss_sum, loss_weight = map(float, state["epoch_loss"])
            owed = _spans(state["owed"])
            deals = [_spans(spans) for spans in state["deals"]]
            taken = _spans(state.get("taken", ()))
            ends = [int(end) for end in state.get("ends", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not the state of an elastic loop: {error!r}") from error
        mine = self.schedule.identity
        if order[1:] != mine[1:] or mine[0] not in (None, order[0]):
            raise ConfigurationError(
                f"this state belongs to a training on {_describe(*order)}; this training is on "
                f"{_describe(*mine)}: pass the same, or another directory for checkpoints"
            )
        self.schedule = self.schedule.resumed(int(order[0]), ends)
        for name, count in counts.items():
            setattr(self, name, count)
        self.owed, self.deals = owed, [Deal(self.epoch, spans) for spans in deals]
        self.taken = list(taken)
        self.is_flushed = bool(state.get("is_flushed", True))
        self.is_stopped = bool(state.get("is_stopped", False))
        self._loss_sum, self._loss_weight = loss_sum, loss_weight
        if self.batching is not None:
            self.batch_size = self.batching.clamp(batch_size)
            self.noise = NoiseEstimate(float(signal), float(noise), int(num))


def _describe(num_samples: Any, seed: Any, shuffle: Any, shards: Any) -> str:
    order = f"shuffled with seed {seed}" if shuffle else "in their own order"
    if num_samples == STREAM:
        return "a stream"
    count = "own" if num_samples is None else num_samples
    stored = f", in shards (fingerprint {str(shards)[:8]})" if shards else ""
    return f"{count} samples {order}{stored}"


def _spans(found: Any) -> tuple[Span, ...]:
    return tuple((int(start), int(stop)) for start, stop in found)
