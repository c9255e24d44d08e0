"""Mini-batches of the samples of all ranks, and random numbers that all ranks draw alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils import gen_batches

from potluck._core.context import DistributedContext
from potluck.estimators.shards import Array


@dataclass(frozen=True)
class Place:
    """Where this rank's samples are among those of all ranks, in rank order.

    ``start`` is the number of the first, ``own`` counts this rank's, ``num`` those of all ranks.
    """

    start: int
    own: int
    num: int

    def batches(self, order: Array, size: int) -> Iterator[tuple[int, Array]]:
        """Each mini-batch of ``size`` samples in ``order``: its size, and the rows of this rank's
        samples in it. ``order`` has the numbers of samples of all ranks."""
        for batch in gen_batches(len(order), size):
            yield batch.stop - batch.start, self.rows(order[batch])[1]

    def rows(self, numbers: Array) -> tuple[Array, Array]:
        """Which of the samples ``numbers`` this rank has: their positions in ``numbers``, and their
        rows in the shard."""
        rows = numbers - self.start
        positions = np.flatnonzero((rows >= 0) & (rows < self.own))
        return positions, rows[positions]


def place_of(ctx: DistributedContext, own: int) -> Place:
    """The place of this rank's ``own`` samples. One all_gather of 8 bytes per rank."""
    counts = ctx.all_gather(np.array([own], np.int64)).ravel()
    return Place(int(counts[: ctx.rank].sum()), own, int(counts.sum()))


def saved(random: Any) -> dict[str, Any]:
    """The state of a RandomState, as entries of a fit's state."""
    name, keys, position, _, _ = random.get_state()
    assert name == "MT19937"
    return {"keys": keys, "position": int(position)}


def restored(state: dict[str, Any]) -> Any:
    """The RandomState that was ``saved``."""
    random = np.random.RandomState()
    random.set_state(("MT19937", state["keys"], state["position"], 0, 0.0))
    return random
