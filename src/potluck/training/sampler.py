"""The schedules of samples: pure functions of (seed, epoch, committed samples).

``Schedule``: an epoch is a permutation of the data set. A step takes the next ``batch_size``
samples of it (the last step of an epoch may have fewer) and gives every rank a contiguous share.
The position is counted in *committed* samples, so a step that is interrupted, or runs again in a
smaller or larger group, covers the same samples: each sample of an epoch is committed exactly once.

``OwnSchedule``: ranks have samples of their own, which stay where they are. A position is a
fraction of the epoch: one of ``num_samples``, as many as all ranks had when the training began. In
the step from position ``start`` to ``stop`` a rank with ``n`` samples takes those from ``n * start
// num_samples`` to ``n * stop // num_samples`` of an order of its own. So all ranks end an epoch
with the same step, each sample counts once, and a rank that comes or goes with its samples moves no
other rank's position.

In a round each rank takes what it has not taken up to the round's last position. So a rank that
did not compute its part of a round, because others were dealt it first or a deadline ended it,
takes that part in the next one. What is left so at the end of the epoch is dealt again, and only
the ranks that owe it compute there.

``StreamSchedule``: the samples are the items of a stream, in its order; the position in an epoch
counts its items. Where an epoch ends is known once all ranks have read that far.
"""

from __future__ import annotations

import sys
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.checkpoint.state import fingerprint
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

    def parts(self, most: int) -> list[Share]:
        """The share in as few near-equal parts as possible of at most ``most`` samples; 0: in
        one."""
        num = len(self.indices)
        if not 0 < most < num:
            return [self]
        count = -(-num // most)
        cuts = [num * number // count for number in range(count + 1)]
        return [
            Share(self.epoch, self.indices[start:stop], self.weight * (stop - start) / num)
            for start, stop in pairwise(cuts)
        ]


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
        num, mark, kind = map(int, row)
        return cls(num, mark, kind)

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
    ``max_steps`` ends the training earlier, after that many steps; 0: it does not.
    ``holding``: what this rank has, which it sends to the others. ``held``: the samples of each
    rank's own in the present group; empty where all have the same. ``ends``: of a stream, at how
    many committed samples its epochs have ended so far.
    """

    num_samples: int
    batch_size: int
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    shards: ShardOrder | None = None
    is_open: bool = False
    max_steps: int = field(default=0, kw_only=True)
    holding: Holding = field(default=Holding(), kw_only=True)
    held: tuple[int, ...] = field(default=(), kw_only=True)
    ends: tuple[int, ...] = field(default=(), kw_only=True)

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

    def resumed(self, num_samples: int, ends: Sequence[int]) -> Schedule:
        """The schedule of a training that goes on, which began with ``num_samples`` and has these
        ``ends``."""
        return self

    @property
    def total(self) -> int:
        """The number of samples of the whole training."""
        return self.epochs * self.num_samples

    @property
    def aim(self) -> int:
        """The number of samples at which the training ends; 0 if it is unknown."""
        is_unknown = self.is_open or self.max_steps or self.total == sys.maxsize
        return 0 if is_unknown else self.total

    def find(self, committed: int) -> tuple[int, int]:
        """The epoch of the next sample after ``committed`` (of all epochs), and its position."""
        return divmod(committed, self.num_samples)

    def knows(self, committed: int, size: int) -> bool:
        """Whether the batch of ``size`` after ``committed`` samples is known."""
        return committed < self.total

    def batch(self, committed: int, size: int | None = None) -> Batch:
        """The global batch after ``committed`` samples (of all epochs); it ends with its epoch.

        ``size`` replaces ``batch_size``, if the batch size changes during the training.
        """
        epoch, start = self.find(committed)
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


@dataclass(frozen=True, slots=True)
class OwnSchedule(Schedule):
    """A schedule of which this rank has the samples that ``holding`` describes, maybe none;
    ``shards`` are its own. ``held`` and ``num_samples`` are known once a group has formed.
    """

    @property
    def identity(self) -> tuple[Any, ...]:
        return (None, self.seed, self.shuffle, "")  # ranks have unlike numbers and shards

    def for_group(self, holdings: Sequence[Holding], *, afresh: bool) -> Schedule:
        for rank, each in enumerate(holdings):
            if not each.is_own:
                raise ConfigurationError(
                    f'rank {rank} has samples="all", this rank has samples="own": pass the same'
                )
            if self.holding.kind and each.kind and each.kind != self.holding.kind:
                raise ValueError(
                    f"the samples of rank {rank} are of another shape or dtype, or have another "
                    f"kind of targets; those of this rank are {self.holding.text}"
                )
        sizes = tuple(each.num for each in holdings)
        if not sum(sizes):
            raise ValueError("the data set is empty: no worker has a sample")
        return replace(self, held=sizes, num_samples=sum(sizes) if afresh else self.num_samples)

    def resumed(self, num_samples: int, ends: Sequence[int]) -> Schedule:
        return replace(self, num_samples=num_samples)

    def batch(self, committed: int, size: int | None = None) -> Batch:
        """As of a Schedule, but longer if no rank of the group had a sample in it."""
        found = Schedule.batch(self, committed, size)
        stop = found.start + found.size
        while not self.num_in([(found.start, stop)]):
            stop += 1  # at the end of the epoch all ranks have one
        return Batch(found.epoch, found.start, stop - found.start)

    def counts(
        self, spans: Sequence[Span], world_size: int, costs: Sequence[Cost] | None = None
    ) -> tuple[int, ...]:
        return tuple(
            sum(stop - start for start, stop in (self._range(num, span) for span in spans))
            for num in self.held
        )

    def num_in(self, spans: Sequence[Span]) -> int:
        return sum(self.counts(spans, len(self.held)))

    def share(
        self, batch: Batch, rank: int, world_size: int, costs: Sequence[Cost] | None = None
    ) -> Share:
        span = (batch.start, batch.start + batch.size)
        start, stop = self._range(self.num_stored, span)
        if start < stop:
            weight = (stop - start) / self.num_in([span])
            return Share(batch.epoch, self._indices(batch.epoch, start, stop), weight)
        return Share(
            batch.epoch, self._indices(batch.epoch, start, min(start + 1, self.num_stored)), 0.0
        )

    def epoch_parts(
        self, epoch: int, rank: int, world_size: int, size: int
    ) -> Iterator[NDArray[np.int64]]:
        for at in range(0, self.num_stored, size):
            yield self._indices(epoch, at, min(at + size, self.num_stored))

    def dealt(
        self,
        deal: Deal,
        taken: Sequence[Taken],
        world_size: int,
        costs: Sequence[Cost] | None = None,
    ) -> list[Span]:
        """Offsets are places in the rank's own order of the epoch."""
        stop = deal.spans[-1][1] if deal.spans else 0
        return [(at, max(at, num * stop // self.num_samples)) for at, num in taken]

    def usual(self, size: int, world_size: int) -> float:
        return self.num_stored * size / self.num_samples

    def pick_dealt(self, deal: Deal, part: Span) -> NDArray[np.int64]:
        return self._indices(deal.epoch, *part)

    def owed(self, deal: Deal, done: Sequence[Span]) -> tuple[Span, ...]:
        return ()  # a later round takes it; a lost rank has taken its samples with it

    def take(self, taken: Sequence[Taken], done: Sequence[Span]) -> list[Taken]:
        found = []
        for rank, ((at, num), (start, stop)) in enumerate(zip(taken, done, strict=True)):
            if start < stop and start != at:
                raise ValueError(f"rank {rank} reports its samples from {start}, {at} are taken")
            found.append((at + stop - start, num))
        return found

    def left(self, taken: Sequence[Taken]) -> tuple[Span, ...]:
        last = self.num_samples
        # The last position up to which a rank has taken all its samples.
        ends = [((at + 1) * last - 1) // num for at, num in taken if at < num]
        return ((min(ends), last),) if ends else ()

    def _range(self, num: int, span: Span) -> Span:
        start, stop = span
        return num * start // self.num_samples, num * stop // self.num_samples

    def _indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        if start == stop:
            return np.empty(0, np.int64)
        options = (self.batch_size, self.epochs, self.seed, self.shuffle, self.shards)
        return Schedule(self.num_stored, *options).indices(Batch(epoch, start, stop - start))


STREAM = 1 << 62
"""The ``num_samples`` of a stream: more than it has."""


@dataclass(frozen=True, slots=True)
class StreamSchedule(Schedule):
    """A schedule of the items of a stream; ``num_samples`` is ``STREAM``, ``shuffle`` is False.

    All ranks hold the items up to ``num_known``, counted as committed samples are.
    """

    num_known: int = field(default=0, kw_only=True)

    def resumed(self, num_samples: int, ends: Sequence[int]) -> Schedule:
        return replace(self, ends=tuple(ends))

    def after(self, committed: int, num: int, *, has_ended: bool) -> StreamSchedule:
        """The schedule once all ranks hold the next ``num`` items after ``committed``, and know
        whether their epoch ``has_ended`` with these."""
        stop = committed + num
        ends = tuple(end for end in self.ends if end <= committed)
        return replace(self, num_known=stop, ends=(*ends, stop) if has_ended else ends)

    @property
    def total(self) -> int:
        if len(self.ends) < self.epochs:
            return sys.maxsize
        return self.ends[self.epochs - 1] if self.epochs else 0

    def find(self, committed: int) -> tuple[int, int]:
        epoch = bisect_right(self.ends, committed)
        return epoch, committed - (self.ends[epoch - 1] if epoch else 0)

    def knows(self, committed: int, size: int) -> bool:
        has_end = bool(self.ends) and committed < self.ends[-1]
        return has_end or committed + size <= self.num_known

    def batch(self, committed: int, size: int | None = None) -> Batch:
        epoch, start = self.find(committed)
        return Batch(epoch, start, min(size or self.batch_size, self.num_known - committed))


_MOST_ROWS = 1024


def holding_of(num: int, columns: Sequence[Any], text: str = "") -> Holding:
    """The holding of a rank with ``num`` samples of its own, arrays or tensors along their first
    axis: hashes of up to 1,024 of them, and of ``text``, which describes their kind."""
    rows = np.unique(np.linspace(0, num - 1, min(num, _MOST_ROWS)).astype(np.int64))
    return Holding(num, hashed([num, *(each[rows] for each in columns)]), hashed(text), text)


def hashed(state: Any) -> int:
    """A hash that a float64 holds; 0 for what can't be hashed."""
    try:
        return int(fingerprint(state)[:12], 16)
    except TypeError:
        return 0


CUT = ', or samples="all" to have the samples cut'


def warn_of_equal_samples(holdings: Sequence[Holding], otherwise: str = CUT) -> None:
    """A warning if all ranks have passed the same samples as their own. ``otherwise``: what they
    may do if these are meant."""
    first = holdings[0]
    if len(holdings) > 1 and first.fingerprint and set(holdings) == {first} and first.is_own:
        warnings.warn(
            f"all {len(holdings)} workers pass the same {first.num} samples as their own, so each "
            f"sample counts {len(holdings)} times per epoch: pass each worker its part "
            f"(potluck.DataPartitioner){otherwise}",
            UserWarning,
            stacklevel=2,
        )


def describe_change(before: Sequence[int], now: Sequence[int]) -> str:
    """The event in words when ranks with samples of their own have come or gone; empty if the
    number of samples is the same."""
    was, has = sum(before), sum(now)
    if has == was:
        return ""
    went = f"{was - has} samples left with a lost worker" if has < was else ""
    came = f"{has - was} samples came with a worker" if has > was else ""
    return f"{went or came}: training goes on with {has} samples of {len(now)} workers"
