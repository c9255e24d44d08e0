"""The options of the elastic loop: intervals, adaptation to speed and gradient noise, limits of
recovery."""

from __future__ import annotations

from dataclasses import dataclass

from potluck._core import hints
from potluck._core.checks import checked_seconds, checked_whole
from potluck.training.transfer import MAX_STATE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalShares:
    """Split batches by the speed of the ranks.

    A rank's speed is the median over its last ``window`` steps, so a change takes effect after half
    of them. Shares change only if the step becomes shorter by more than the fraction ``threshold``.
    """

    window: int = 8
    threshold: float = 0.05

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 step")
        if not self.threshold >= 0:
            raise ValueError(f"threshold is {self.threshold}; it must not be negative")


@hints.of_init(hints.NOISE, "potluck.torch.NoiseBatching(min_batch=32, max_batch=512)")
@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseBatching:
    """Adapt the global batch size to the gradient noise scale, in [``min_batch``, ``max_batch``].

    ``smoothing`` is the weight of the newest estimate (the average over the steps between two
    adaptations). The batch size changes if the noise scale differs from it by more than the
    fraction ``threshold``, by at most the factor ``max_change`` at a time, and after ``warmup``
    estimates at the earliest. A single rank can't measure the noise and keeps its batch size.
    """

    min_batch: int
    max_batch: int
    smoothing: float = 0.1
    threshold: float = 0.2
    max_change: float = 2.0
    warmup: int = 2

    def __post_init__(self) -> None:
        checked_whole("min_batch", self.min_batch, at_least=1)
        if not self.min_batch <= checked_whole("max_batch", self.max_batch, at_least=1):
            raise ValueError(
                f"min_batch {self.min_batch} and max_batch {self.max_batch}: "
                "min_batch <= max_batch must hold"
            )
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing is {self.smoothing}; it must be above 0 and at most 1")
        if not self.threshold >= 0 or not self.max_change > 1:
            raise ValueError(
                f"threshold {self.threshold} must not be negative, "
                f"max_change {self.max_change} must be above 1"
            )

    def clamp(self, size: float) -> int:
        """``size`` as an integer between the bounds."""
        return int(min(max(size, self.min_batch), self.max_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Options of the elastic loop.

    Every ``hash_every`` steps the ranks compare hashes of their parameters; where machines round
    differently those of rank 0 count (``training/alignment.py``). Every ``save_every``
    steps, and at the end, they write a checkpoint, if the loop has a ``checkpoint``. After a loss
    the next step must be committed within ``recovery_s`` seconds and ``max_attempts`` groups; with
    a strategy of rounds a group must be formed, in which the round goes on.

    With ``shares`` faster ranks get more samples; with ``batching`` the batch size follows the
    gradient noise scale. For both, ranks exchange measurements every ``adapt_every`` steps, and
    more often after a change of the group (one all_gather of 40 bytes per rank).

    A rank that joins takes from a peer a state of at most 8 times the bytes of its own state and
    ``max_state_bytes``, whatever the peer announces. Raise it if the state is small at the start of
    the script and large later.
    """

    hash_every: int = 50
    save_every: int = 100
    recovery_s: float = 300.0
    max_attempts: int = 50
    adapt_every: int = 5
    shares: ProportionalShares | None = None
    batching: NoiseBatching | None = None
    max_state_bytes: int = MAX_STATE_BYTES

    def __post_init__(self) -> None:
        for name in ("hash_every", "save_every", "adapt_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        object.__setattr__(
            self, "recovery_s", checked_seconds(self.recovery_s, "recovery_s", at_least=0)
        )
        if self.max_state_bytes < 0:
            raise ValueError(f"max_state_bytes is {self.max_state_bytes}; it can't be negative")
        for name, kind in (("shares", ProportionalShares), ("batching", NoiseBatching)):
            if not isinstance(getattr(self, name), kind | None):
                raise TypeError(f"{name} is {getattr(self, name)!r}: pass a {kind.__name__}(...)")
