"""What the elastic loop does by itself, and when."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.training.noise import NoiseBatching
from potluck.training.shares import ProportionalShares


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How often the loop does what costs something, what it adapts, and how long it tries.

    Every ``hash_every`` steps parameters are compared between ranks; every ``save_every`` steps
    (and at the end) a checkpoint is written, if there is a place for it. After a loss a step must
    be committed within ``recovery_s`` seconds and ``max_attempts`` groups.

    With ``shares`` faster ranks get more samples, with ``batching`` the batch size follows the
    gradient's noise. For these, ranks exchange what they measured every ``adapt_every`` steps, and
    sooner after a change of the group (one all_gather of 40 bytes per rank).
    """

    hash_every: int = 50
    save_every: int = 100
    recovery_s: float = 300.0
    max_attempts: int = 50
    adapt_every: int = 5
    shares: ProportionalShares | None = None
    batching: NoiseBatching | None = None

    def __post_init__(self) -> None:
        for name in ("hash_every", "save_every", "adapt_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name, kind in (("shares", ProportionalShares), ("batching", NoiseBatching)):
            if not isinstance(getattr(self, name), kind | None):
                raise TypeError(f"{name} is {getattr(self, name)!r}: pass a {kind.__name__}(...)")
