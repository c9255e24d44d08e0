"""Partitions: which samples of a data set belong to which rank. Pure: the same on every rank.

Every partition is an order of the samples, cut into one contiguous part per rank. The modes differ
in the order and in the sizes of the parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from potluck._core import hints
from potluck._core.checks import checked_whole
from potluck.training.sampler import order, shares
from potluck.training.shares import Cost

MODES = ("contiguous", "strided", "stratified", "weighted", "dirichlet", "shards")
_BY_LABEL = ("stratified", "dirichlet", "shards")


class DataPartitioner:
    """Split the samples ``0 .. total_size - 1`` among ``world_size`` ranks, each sample to one rank.

    No communication: every rank computes the same partition from the same arguments. A partition of
    fewer samples than ranks leaves some ranks without samples.

    | mode | part of a rank |
    |---|---|
    | ``contiguous`` | a range, as ``numpy.array_split``: sizes differ by at most 1 |
    | ``strided`` | every ``world_size``-th sample, from its rank on |
    | ``weighted`` | a range whose size follows ``weights``, for example samples per second |
    | ``stratified`` | the classes of ``labels`` in equal parts: sizes, and the counts of each class, differ by at most 1 |
    | ``dirichlet`` | of each class a random fraction; the fractions follow a Dirichlet distribution with parameter ``alpha``. Small values give each rank few classes (Hsu et al. 2019, "Measuring the effects of non-identical data distribution for federated visual classification", section 2) |
    | ``shards`` | ``shards_per_rank`` random pieces of the samples sorted by label (McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data", section 3) |

    ``labels`` has shape ``(total_size,)`` and any sortable dtype. ``seed`` has an effect only on the
    last three modes. ValueError or TypeError for arguments that do not fit. Memory: 8 bytes per
    sample for the modes with labels.
    """  # noqa: E501 (a row of a table is one line)

    @hints.arguments({}, same=hints.PARTITIONER)
    def __init__(
        self,
        total_size: int,
        world_size: int,
        mode: str = "contiguous",
        seed: int = 0,
        *,
        labels: ArrayLike | None = None,
        weights: Sequence[float] | None = None,
        alpha: float = 0.5,
        shards_per_rank: int = 2,
    ) -> None:
        self.total_size = checked_whole("total_size", total_size, at_least=0)
        self.world_size = checked_whole("world_size", world_size, at_least=1)
        self.seed = checked_whole("seed", seed, at_least=0)
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        self.mode = mode
        if (weights is not None) != (mode == "weighted"):
            raise ValueError(f"weights are for mode 'weighted', and needed there; mode is {mode!r}")
        if (labels is not None) != (mode in _BY_LABEL):
            modes = ", ".join(_BY_LABEL)
            raise ValueError(
                f"labels are for the modes {modes}, and needed there; mode is {mode!r}"
            )
        self._order: NDArray[np.int64] | None = None
        if mode == "weighted":
            assert weights is not None
            bounds = [start for start, _ in shares(total_size, world_size, self._costs(weights))]
        elif mode in ("dirichlet", "shards"):
            known = self._checked(labels)
            if mode == "dirichlet":
                self._order, bounds = self._dirichlet(known, alpha)
            else:
                pieces = checked_whole("shards_per_rank", shards_per_rank, at_least=1)
                self._order, bounds = self._shards(known, pieces)
        else:
            bounds = [start for start, _ in shares(total_size, world_size)]
            if mode == "stratified":
                self._order = _dealt(self._by_label(self._checked(labels)), world_size)
        self._bounds = [*bounds, self.total_size]

    def get_partition(self, rank: int) -> tuple[int, int]:
        """The ``(start, end)`` of the part of ``rank``, for the modes whose parts are ranges.

        ValueError for the other modes, which have ``get_indices``, and for a rank out of range.
        """
        if self._order is not None or self.mode == "strided":
            raise ValueError(
                f"the parts of mode {self.mode!r} are no ranges of samples: use get_indices(rank)"
            )
        return self._range(rank)

    def get_indices(self, rank: int) -> NDArray[np.int64]:
        """The samples of ``rank``: int64, shape ``(partition_size(rank),)``."""
        start, end = self._range(rank)
        if self.mode == "strided":
            return np.arange(rank, self.total_size, self.world_size, dtype=np.int64)
        if self._order is None:
            return np.arange(start, end, dtype=np.int64)
        return self._order[start:end].copy()

    def partition_size(self, rank: int) -> int:
        """The number of samples of ``rank``."""
        start, end = self._range(rank)
        return end - start

    def _range(self, rank: int) -> tuple[int, int]:
        rank = checked_whole("rank", rank, at_least=0)
        if rank >= self.world_size:
            raise ValueError(
                f"rank is {rank}; the ranks of {self.world_size} are 0 to {self.world_size - 1}"
            )
        return self._bounds[rank], self._bounds[rank + 1]

    def _costs(self, weights: Sequence[float]) -> list[Cost]:
        if len(weights) != self.world_size:
            raise ValueError(f"there are {len(weights)} weights for {self.world_size} ranks")
        if not all(0 < weight < np.inf for weight in weights):
            raise ValueError(f"weights are {list(weights)}; they must be positive and finite")
        return [Cost(0.0, 1 / weight) for weight in weights]

    def _checked(self, labels: ArrayLike | None) -> NDArray[np.int64]:
        """The number of each sample's class, in sorted order of the labels."""
        found = np.asarray(labels)
        if found.shape != (self.total_size,):
            raise ValueError(
                f"labels have shape {found.shape}; for {self.total_size} samples it must be "
                f"({self.total_size},)"
            )
        return np.unique(found, return_inverse=True)[1].astype(np.int64)

    def _by_label(self, classes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples sorted by class, those of one class in random order."""
        shuffled = order(self.seed, 0, self.total_size)
        return shuffled[np.argsort(classes[shuffled], kind="stable")]

    def _dirichlet(
        self, classes: NDArray[np.int64], alpha: float
    ) -> tuple[NDArray[np.int64], list[int]]:
        if not 0 < alpha < np.inf:
            raise ValueError(f"alpha is {alpha}; it must be positive and finite")
        # RandomState is frozen: machines with different NumPy versions draw the same numbers.
        random = np.random.RandomState(np.random.Philox(key=self.seed))
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(self.world_size)]
        ordered = self._by_label(classes)
        ends = np.cumsum(np.bincount(classes))
        for start, end in itertools.pairwise([0, *ends.tolist()]):
            drawn = random.gamma(alpha, size=self.world_size)
            # A tiny alpha may underflow to all zeros, whose limit is one rank with everything.
            fractions = (
                drawn if drawn.any() else np.eye(self.world_size)[random.randint(self.world_size)]
            )
            cuts = np.cumsum(fractions / fractions.sum())[:-1] * (end - start)
            for part, piece in zip(
                parts, np.split(ordered[start:end], cuts.astype(int)), strict=True
            ):
                part.append(piece)
        return _joined(parts)

    def _shards(
        self, classes: NDArray[np.int64], pieces: int
    ) -> tuple[NDArray[np.int64], list[int]]:
        cut = np.array_split(self._by_label(classes), self.world_size * pieces)
        dealt = order(self.seed, 1, len(cut)).reshape(self.world_size, pieces)
        return _joined([[cut[piece] for piece in row] for row in dealt])


def _dealt(samples: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    """``samples`` dealt out in turn, one part behind the other."""
    return np.concatenate([samples[rank::world_size] for rank in range(world_size)])


def _joined(parts: list[list[NDArray[np.int64]]]) -> tuple[NDArray[np.int64], list[int]]:
    """The parts of all ranks behind each other, and where each begins."""
    joined = [np.sort(np.concatenate([np.empty(0, np.int64), *part])) for part in parts]
    starts = np.cumsum([0, *map(len, joined)])[:-1]
    return np.concatenate(joined), starts.tolist()
