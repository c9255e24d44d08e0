"""``SecureAggregation``: what a user chooses, and the range of values that follows the sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.federated.secure.client import MIN_THRESHOLD
from potluck.federated.secure.masking import HEAVIER

_MUCH_CUT = 1e-3
_LEAST_LIMIT = 1e-12


@dataclass(frozen=True, slots=True)
class SecureAggregation:
    """The server learns the sum of the clients' changes, and no client's own (Bonawitz et al. 2017,
    for a server that is curious but follows the protocol).

    ``threshold``: this fraction of the clients that take part, above half of them, must stay to the
    end of a round, and at least three: of a sum of two, each of the two clients could tell the
    other's change. The others may drop out at any time. Fewer learn nothing together with the
    server. Single values of a change are cut off at ``limit``, and numbers of samples at
    ``max_samples``. For the next round ``limit`` doubles when more than a thousandth of the values
    were cut off, and halves when no client has a value above a quarter of it; ``max_samples``
    grows at once by the power of 8 that all numbers need: the sums say so. Each round reports the
    fraction of values as ``saturation``, and how many clients' numbers as ``num_heavy``: a round in
    which some are has another mean than the plain one.

    A client whose answers break the protocol is named and left out, in this round or, where only
    its end shows it, from the next one on. That the words of a client are its change, within the
    limit, nobody can check under masks: one that sends others moves the sum.

    Metrics of clients are not sent. Cost, for ``n`` clients and ``p`` parameters: ``4 * p`` bytes
    from each client; ``n`` key agreements and masks of ``p`` words on each client; two more
    exchanges before the training and one after it. Needs an aggregation that takes a mean: FedAvg,
    FedProx, FedAdam, FedYogi.
    """

    threshold: float = 2 / 3
    limit: float = 1.0
    max_samples: int = 1000

    def __post_init__(self) -> None:
        if not 0.5 < self.threshold <= 1:
            raise ValueError(
                f"threshold is {self.threshold!r}; a fraction above 0.5 and at most 1 is needed"
            )
        if not 0 < self.limit < math.inf or self.max_samples < 1:
            raise ValueError(
                f"limit={self.limit!r} must be above 0 and finite, max_samples="
                f"{self.max_samples!r} 1 or more"
            )

    def shares_needed(self, num_clients: int) -> int:
        """How many of ``num_clients`` clients must stay."""
        fraction = math.ceil(self.threshold * num_clients - 1e-9)
        return max(MIN_THRESHOLD, num_clients // 2 + 1, fraction)

    def hangs_on_one(self, began: int, stayed: int) -> bool:
        """Whether one client decides if there is a sum: where ``stayed`` of the ``began`` clients
        stay, and it comes or goes."""
        near = [(began + by, stayed + also) for by in (-1, 0, 1) for also in {0, by}]
        return len({s >= self.shares_needed(b) for b, s in near if 0 <= s <= b}) > 1


@dataclass(slots=True)
class Range:
    """The present range of values and weights. It follows sums alone, so it says nothing about a
    single client."""

    limit: float
    max_samples: float

    def follow(self, saturation: float, num_high: int, num_heavy: Sequence[int]) -> None:
        """The range for the next round; ``num_high`` single values are near the limit, and
        ``num_heavy[i]`` weights above ``max_samples * HEAVIER**i``."""
        if saturation > _MUCH_CUT:
            self.limit *= 2
        elif num_high == 0 and self.limit > _LEAST_LIMIT:
            self.limit /= 2
        self.max_samples *= HEAVIER ** sum(num > 0 for num in num_heavy)

    def state_dict(self) -> dict[str, float]:
        """The present range."""
        return {"limit": float(self.limit), "max_samples": float(self.max_samples)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with another one."""
        self.limit, self.max_samples = state["limit"], state["max_samples"]
