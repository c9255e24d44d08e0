"""The policy of the elastic loop: intervals, adaptation, limits of recovery."""

from __future__ import annotations

from dataclasses import dataclass

from potluck._core.checks import checked_seconds
from potluck.training.noise import NoiseBatching
from potluck.training.shares import ProportionalShares
from potluck.training.transfer import MAX_STATE_BYTES


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
