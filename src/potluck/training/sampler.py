"""The schedule of samples: a pure function of (seed, epoch, committed samples).

An epoch is a permutation of the data set. A step takes the next ``batch_size`` samples of it (the
last step of an epoch may have fewer) and gives every rank a contiguous share. The position is
counted in *committed* samples, so a step that is interrupted, or runs again in a smaller or larger
group, covers the same samples: each sample of an epoch is committed exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.errors import ConfigurationError
from potluck.training.ledger import Deal, Span, total
from potluck.training.shard_order import ShardOrder, shuffled
from potluck.training.shares import EQUAL, Cost, apportion


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch: ``size`` samples of ``epoch``, from position ``start`` of its permutation."""

    epoch: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a global batch.

    ``indices`` (int64, 1-D) are the samples to compute on, ``weight`` this rank's weight in the
    global mean: its samples divided by those of the batch. A rank without samples gets one sample
    of the batch with weight 0, so that its forward and backward passes run.
    """

    epoch: int
    indices: NDArray[np.int64]
    weight: float

    @property
    def num_samples(self) -> int:
        """The number of samples with which this rank counts: 0 for a weight of 0."""
        return len(self.indices) if self.weight else 0


@dataclass(frozen=True, slots=True)
class Holding:
    """Which samples one rank holds: ``num`` of its own, -1 where all ranks have the same.

    ``fingerprint`` and ``kind`` (below 2 ** 52, 0 for unknown) are equal where samples are, and
    where their shapes and dtypes are, which ``text`` describes on this rank.
    """

    num: int = -1
    fingerprint: int = 0
    kind: int = 0
    text: str = field(default="", compare=False)

    @property
    def row(self) -> list[int]:
        """As three numbers that a float64 holds; ``of`` is the inverse."""
        return [self.num, self.fingerprint, self.kind]

    @classmethod
    def of(cls, row: Sequence[float]) -> Holding:
        num, fingerprint, kind = map(int, row)
        return cls(num, fingerprint, kind)

    @property
    def is_own(self) -> bool:
        return self.num >= 0


Taken = tuple[int, int]
"""Of one rank: how many samples of its own are committed in the present epoch, and how many it
has."""

MAX_SORTED = 1 << 24
"""Up to this number of samples an epoch's permutation is an array of 8 bytes a sample, the fastest
to read. Above it each index is computed when it is used: an array for 3e9 samples would take 22 GiB
on each rank. (Another limit would change the order of existing checkpoints.)"""


@lru_cache(maxsize=4)
def order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """The permutation of ``range(num_samples)`` in ``epoch``, a read-only int64 array.

    Sorts the raw 64-bit output of Philox-4x64 (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", SC 2011), which NumPy keeps stable across versions and machines, unlike the
    permutations of its Generator.
    """
    if seed < 0 or epoch < 0 or num_samples < 0:
        raise ValueError(f"seed {seed}, epoch {epoch}, num_samples {num_samples}: negative")
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], np.uint64)
    keys = np.random.Philox(key=key).random_raw(num_samples)
    permutation = np.argsort(keys, kind="stable").astype(np.int64)
    permutation.flags.writeable = False
    return permutation


def shares(
    size: int, world_size: int, costs: Sequence[Cost] | None = None
) -> list[tuple[int, int]]:
    """The (start, stop) of every rank's share of ``size`` samples.

    Shares are near-equal, the first ranks get one more. With ``costs`` all ranks end together.
    """
    counts = apportion(size, (EQUAL,) * world_size if costs is None else costs)
    return list(pairwise(accumulate(counts, initial=0)))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The samples of a whole training: ``epochs`` passes over ``num_samples`` samples.

    ``batch_size`` counts the samples of all ranks together. Without ``shuffle`` every epoch keeps
    the order of the data set. ``shards``: the samples are stored in shards, and shuffled by them.
    ``is_open``: the script ends the training by ``stop``; ``epochs`` is a bound, not shown as aim.
    ``holding``: what this rank has, which it sends to the others. ``held``: the samples of each
    rank's own in the present group; empty where all have the same.
    """

    num_samples: int
    batch_size: int
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    shards: ShardOrder | None = None
    is_open: bool = False
    holding: Holding = field(default=Holding(), kw_only=True)
    held: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size", "epochs", "seed"):
            if not isinstance(getattr(self, name), int | np.integer):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be a whole number")
        if self.num_samples < 1:
            raise ValueError("the data set is empty")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        if self.epochs < 0 or self.seed < 0:
            raise ValueError(f"epochs {self.epochs} and seed {self.seed} must not be negative")
        if self.shards is not None and self.shards.num_samples != self.num_stored:
            raise ValueError(
                f"num_samples is {self.num_stored}, but the shards have {self.shards.num_samples}"
            )

    @property
    def num_stored(self) -> int:
        """The number of samples that this rank can read."""
        return self.holding.num if self.holding.is_own else self.num_samples

    @property
    def identity(self) -> tuple[Any, ...]:
        """What the schedules of all ranks, and of a state that is restored, have in common: the
        number of samples (None: it may differ), the seed, whether they are shuffled, and a
        fingerprint of their shards."""
        shards = "" if self.shards is None else self.shards.fingerprint
        return (self.num_samples, self.seed, self.shuffle, shards)

    def for_group(self, holdings: Sequence[Holding], *, afresh: bool) -> Schedule:
        """The schedule in a group whose ranks have ``holdings``; ``afresh``: no rank has begun.
        ConfigurationError for ranks that have samples of their own."""
        for rank, each in enumerate(holdings):
            if each.is_own:
                raise ConfigurationError(
                    f'rank {rank} has samples="own", this rank has samples="all": pass the same'
                )
        return self

    def resumed(self, num_samples: int) -> Schedule:
        """The schedule of a training that goes on, which began with ``num_samples``."""
        return self

    @property
    def total(self) -> int:
        """The number of samples of the whole training."""
        return self.epochs * self.num_samples

    def batch(self, committed: int, size: int | None = None) -> Batch:
        """The global batch after ``committed`` samples (of all epochs); it ends with its epoch.

        ``size`` replaces ``batch_size``, if the batch size changes during the training.
        """
        epoch, start = divmod(committed, self.num_samples)
        return Batch(epoch, start, min(size or self.batch_size, self.num_samples - start))

    def indices(self, batch: Batch, part: slice = slice(None)) -> NDArray[np.int64]:
        """The indices of the samples in ``batch``, or in a ``part`` of it; int64."""
        if not self.shuffle:
            return np.arange(batch.start, batch.start + batch.size, dtype=np.int64)[part]
        if self.shards is not None:
            return self.shards.indices(self.seed, batch.epoch, batch.start, batch.size, part)
        if self.num_samples > MAX_SORTED:
            positions = np.arange(batch.start, batch.start + batch.size, dtype=np.int64)[part]
            return shuffled((self.seed, batch.epoch, 0), self.num_samples, positions)
        whole = order(self.seed, batch.epoch, self.num_samples)
        return whole[batch.start : batch.start + batch.size][part]

    def pick(self, epoch: int, spans: Sequence[Span]) -> NDArray[np.int64]:
        """The indices of the samples at ``spans`` of an epoch's permutation, int64."""
        parts = [self.indices(Batch(epoch, start, stop - start)) for start, stop in spans]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def counts(
        self, spans: Sequence[Span], world_size: int, costs: Sequence[Cost] | None = None
    ) -> tuple[int, ...]:
        """The number of samples of each rank at ``spans`` of an epoch."""
        return apportion(total(spans), costs or (EQUAL,) * world_size)

    def num_in(self, spans: Sequence[Span]) -> int:
        """The number of samples at ``spans`` of an epoch."""
        return total(spans)

    def dealt(
        self,
        deal: Deal,
        taken: Sequence[Taken],
        world_size: int,
        costs: Sequence[Cost] | None = None,
    ) -> list[Span]:
        """The offsets of each rank's samples in a round."""
        edges = list(accumulate(self.counts(deal.spans, world_size, costs), initial=0))
        return list(pairwise(edges))

    def usual(self, size: int, world_size: int) -> float:
        """How many samples a rank has in a round of ``size`` if nothing is owed, and ranks are
        equally fast."""
        return size / world_size

    def pick_dealt(self, deal: Deal, part: Span) -> NDArray[np.int64]:
        """The samples of this rank at the offsets ``part`` of a round. Int64."""
        return self.pick(deal.epoch, deal.part(*part))

    def epoch_parts(
        self, epoch: int, rank: int, world_size: int, size: int
    ) -> Iterator[NDArray[np.int64]]:
        """The samples of ``rank`` in a whole epoch, in parts of ``size``. Int64."""
        start, stop = shares(self.num_samples, world_size)[rank]
        for at in range(start, stop, size):
            yield self.indices(Batch(epoch, at, min(size, stop - at)))

    def owed(self, deal: Deal, done: Sequence[Span]) -> tuple[Span, ...]:
        """What later rounds owe of one of which the offsets ``done`` were computed."""
        return deal.rest(done)

    def take(self, taken: Sequence[Taken], done: Sequence[Span]) -> list[Taken]:
        """``taken`` after a round of which each rank has computed the offsets ``done``."""
        return []

    def left(self, taken: Sequence[Taken]) -> tuple[Span, ...]:
        """The spans, up to the end of the epoch, in which ranks have samples that are not among
        those ``taken``, once all of the epoch was dealt."""
        return ()

    def share(
        self, batch: Batch, rank: int, world_size: int, costs: Sequence[Cost] | None = None
    ) -> Share:
        """The share of ``rank`` in a group of ``world_size``, equal or by ``costs``."""
        start, stop = shares(batch.size, world_size, costs)[rank]
        if start == stop:
            return Share(batch.epoch, self.indices(batch, slice(1)), 0.0)
        part = slice(start, stop)
        return Share(batch.epoch, self.indices(batch, part), (stop - start) / batch.size)

    def upcoming(
        self,
        committed: int,
        size: int,
        rank: int,
        world_size: int,
        costs: Sequence[Cost] | None = None,
    ) -> Iterator[Share]:
        """The shares of ``rank`` after ``committed`` samples to the end, if nothing changes."""
        while committed < self.total:
            batch = self.batch(committed, size)
            yield self.share(batch, rank, world_size, costs)
            committed += batch.size
