"""The compressor ``RandomK``: elements chosen by a seed that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from potluck._core.codecs.codec import Bytes, Floats
from potluck.compressors import options
from potluck.compressors.base import (
    Array,
    Collectives,
    Compressor,
    Cost,
    Pending,
    Shape,
    divide,
)

_TABLE = 4096


@dataclass(frozen=True)
class RandomK(Compressor):
    """A share ``ratio`` of the elements, chosen anew at each step by a seed that all ranks share.

    No positions are sent, and all ranks send the same elements: the values are an ordinary array
    that any all_reduce sums, at a cost that does not grow with the number of ranks.
    ``mode="bernoulli"`` chooses each element by itself with the probability ``ratio``; ``mode="k"``
    chooses one of each of k = ratio * n equal parts, so that the number is exact.

    Without error feedback a value is multiplied by one over its probability, so that the mean over
    steps is the gradient (unbiased). With error feedback it is not: the residual keeps the rest,
    and larger values would make it grow. (Konecny et al., "Federated Learning: Compressors for
    Improving Communication Efficiency", 2016; Stich et al., "Sparsified SGD with Memory", 2018.)

    The generator is PCG64 of NumPy, whose stream is the same in all versions. ValueError unless 0 <
    ``ratio`` <= 1, ``mode`` is one of the two, and ``seed`` is not negative.
    """

    ratio: float
    mode: Literal["bernoulli", "k"] = "bernoulli"
    seed: int = 0

    def __post_init__(self) -> None:
        options.put(
            self,
            ratio=options.ratio("RandomK", self.ratio),
            seed=options.seed("RandomK", self.seed),
        )
        if self.mode not in ("bernoulli", "k"):
            raise ValueError(f"RandomK(mode={self.mode!r}): mode must be 'bernoulli' or 'k'")

    def positions(self, count: int, step: int) -> NDArray[np.int64]:
        """The positions, ascending, of the elements that are sent at ``step``."""
        stream = np.random.PCG64(np.random.SeedSequence([self.seed, step, count]))
        if self.mode == "bernoulli":
            return self._by_gaps(stream, count)
        edges = self._edges(count)
        sizes = np.diff(edges)
        draws = stream.random_raw(sizes.size).astype(np.uint64) >> np.uint64(32)
        return edges[:-1] + (draws * sizes.astype(np.uint64) >> np.uint64(32)).astype(np.int64)

    def take(self, source: Floats, residual: Floats | None, step: int) -> Floats:
        """The values that are sent, an array of the same length on all ranks.

        If an element is inf or NaN, all are NaN: chosen or not, it must stay visible.
        """
        places = self.positions(source.size, step)
        source = source.reshape(-1)
        if residual is not None:
            residual = residual.reshape(-1)
            with np.errstate(over="ignore", invalid="ignore"):
                residual += source
            source = residual
        values = source[places]
        if not _is_finite(source):
            values[:] = np.nan
        if residual is None:
            return values * self._factors(source.size)
        residual[places] = 0
        if not np.isfinite(values).all():
            residual[~np.isfinite(residual)] = 0
        return values

    def put(self, target: Floats, values: Floats, step: int) -> None:
        """Set ``target`` to what the values, or a sum of the ranks' values, stand for."""
        places = self.positions(target.size, step)
        target[...] = 0
        target.reshape(-1)[places] = values

    def compress(self, source: Floats, residual: Floats | None, step: int) -> Bytes:
        return self.take(source, residual, step).view(np.uint8)

    def decompress(self, payload: Bytes, shape: Shape, step: int) -> Floats:
        target = np.empty(shape, np.float32)
        self.put(target, payload.view(np.float32), step)
        return target

    def exchange(
        self, comm: Collectives, array: Array, residual: Array | None, step: int
    ) -> Pending:
        """Cost: one all_reduce of the values that are sent."""
        values = self.take(array, residual, step)

        def put(sums: Any) -> Array:
            self.put(array, sums, step)
            return divide(array, comm)

        return comm.all_reduce(values).then(put)

    def cost(self, shapes: Sequence[Shape]) -> Cost:
        count = sum(map(math.prod, shapes))
        return Cost(reduced_bytes=4 * round(self.ratio * count))

    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        return bool(np.isfinite(payload.view(np.float32)).all())

    def _by_gaps(self, stream: np.random.PCG64, count: int) -> NDArray[np.int64]:
        """Each of ``count`` elements with the probability ``ratio``, by one random number for each
        that is chosen: the number of elements left out before it.

        At least k are left out with the probability (1 - ratio)^k. A number beyond the table leaves
        out as many as the table is long, and chooses none: what follows has the same distribution.
        """
        table = _at_least(self.ratio)
        places, at = [np.empty(0, np.int64)], -1
        while at < count - 1:
            expected = (count - 1 - at) * max(self.ratio, 1 / len(table))
            num = int(expected + 4 * expected**0.5) + 16
            draws = (stream.random_raw(num) >> np.uint64(11)) * 2.0**-53
            gaps = len(table) - np.searchsorted(table, draws, side="right")
            chosen = gaps < len(table)
            ends = at + np.cumsum(gaps + chosen)
            places.append(ends[chosen])
            at = int(ends[-1])
        found = np.concatenate(places)
        return found[: np.searchsorted(found, count)]

    def _edges(self, count: int) -> NDArray[np.int64]:
        k = min(count, max(1, round(self.ratio * count)))
        return np.arange(k + 1, dtype=np.int64) * count // max(k, 1)

    def _factors(self, count: int) -> Floats | np.float32:
        """One over the probability with which an element is sent."""
        if self.mode == "bernoulli":
            return np.float32(1 / self.ratio)
        return np.diff(self._edges(count)).astype(np.float32)


@lru_cache(maxsize=16)
def _at_least(ratio: float) -> NDArray[np.float64]:
    """(1 - ratio)^k for k from 4096 to 1, ascending; by products only, which are exact on all
    machines, where a power is not."""
    powers = np.multiply.accumulate(np.full(_TABLE, 1 - ratio))
    return np.ascontiguousarray(powers[::-1])


def _is_finite(values: Floats) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        # The sum is the cheaper test. It may overflow by itself.
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())
