"""``DistributedSampler``: each rank's share of every batch, for torch's DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from potluck._core import hints
from potluck._core.context import DistributedContext, init
from potluck.training.sampler import Schedule


class DistributedSampler(Sampler[list[int]]):
    """A batch sampler of this rank's share of each global batch.

        sampler = DistributedSampler(dataset, batch_size=64)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(10):
            for x, y in loader:
                model.weight = sampler.weight
                ...
                sampler.commit()

    ``batch_size`` counts the samples of all ranks together. The order is a function of (seed,
    epoch, committed samples), so every sample of an epoch is committed exactly once, over any
    change of the group: after an interrupted step make a new iterator, which begins after the last
    ``commit``. A loop that never calls ``commit`` gets the next epoch from its next iterator, in
    another order, once it has gone through this one. Rank and world size are the context's at the
    time of each batch. In the last batch of an epoch a rank may have no samples; it then gets one
    sample of the batch, and ``weight`` is 0. (The ElasticLoop does all of this itself.)

    ``ctx`` is the context, ``potluck.init()`` if None. No communication. TypeError or ValueError
    for an empty data set, a batch size below 1, a negative seed.
    """

    @hints.arguments(hints.SAMPLER, hints.SAMPLER["num_replicas"])
    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._schedule = Schedule(len(dataset), batch_size, seed=seed, shuffle=shuffle)
        self._ctx = ctx if ctx is not None else init()
        self._is_through = False  # an iterator has ended, and nothing was committed since its start
        self.committed = 0
        """The number of samples committed since the training began, over all epochs."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._schedule.batch(self.committed).epoch

    @property
    def weight(self) -> float:
        """This rank's weight in the batch that the next ``commit`` counts."""
        batch = self._schedule.batch(self.committed)
        return self._schedule.share(batch, self._ctx.rank, self._ctx.world_size).weight

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; if the present epoch is ``epoch``, stay at its position."""
        self._is_through = False
        if epoch != self.epoch:
            self.committed = epoch * self._schedule.num_samples

    def commit(self) -> None:
        """Count the next global batch as committed. Call it after the step's update."""
        self._is_through = False
        self.committed += self._schedule.batch(self.committed).size

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's shares (lists of indices), from the last commit to the epoch's
        end. TypeError for a DataLoader that would make batches of these batches."""
        if isinstance(sys._getframe(1).f_locals.get("self"), BatchSampler):
            raise TypeError(
                "a sampler= of a DataLoader gives single samples, and this one gives batches: "
                "write DataLoader(dataset, batch_sampler=sampler), without batch_size"
            )
        return self._shares()

    def _shares(self) -> Iterator[list[int]]:
        if self._is_through:
            self.set_epoch(self.epoch + 1)
        began, group = self.committed, self._ctx.epoch
        position, epoch = began, self.epoch
        while (batch := self._schedule.batch(position)).epoch == epoch:
            share = self._schedule.share(batch, self._ctx.rank, self._ctx.world_size)
            yield share.indices.tolist()
            position += batch.size
        # After a loss the step of this iterator may have been interrupted.
        self._is_through = self.committed == began and self._ctx.epoch == group

    def __len__(self) -> int:
        """The number of global batches from the last commit to the epoch's end."""
        left = self._schedule.num_samples - self._schedule.batch(self.committed).start
        return -(-left // self._schedule.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position as a dict, for ``load_state_dict``."""
        return {
            "committed": self.committed,
            "seed": self._schedule.seed,
            "num_samples": self._schedule.num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of ``state``; ValueError if seed or data set differ."""
        for name in ("seed", "num_samples"):
            if state[name] != getattr(self._schedule, name):
                raise ValueError(
                    f"this state has {name} {state[name]}, the sampler "
                    f"{getattr(self._schedule, name)}: their orders differ"
                )
        self._is_through = False
        self.committed = int(state["committed"])
