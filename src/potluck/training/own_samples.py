"""The schedule of ranks that have samples of their own, which stay where they are. Pure.

A position is a fraction of the epoch: one of ``num_samples``, as many as all ranks had when the
training began. In the step from position ``start`` to ``stop`` a rank with ``n`` samples takes
those from ``n * start // num_samples`` to ``n * stop // num_samples`` of an order of its own. So
all ranks end an epoch with the same step, each sample counts once, and a rank that comes or goes
with its samples moves no other rank's position.

In a round each rank takes what it has not taken up to the round's last position. So a rank that
did not compute its part of a round, because others were dealt it first or a deadline ended it,
takes that part in the next one. What is left so at the end of the epoch is dealt again, and only
the ranks that owe it compute there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.checkpoint.state import fingerprint
from potluck.errors import ConfigurationError
from potluck.training.ledger import Deal, Span
from potluck.training.sampler import Batch, Holding, Schedule, Share, Taken
from potluck.training.shares import Cost


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

    def resumed(self, num_samples: int) -> Schedule:
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
