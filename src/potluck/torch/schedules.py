"""The schedule of a data set: of the same one on all ranks, or of each rank's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import TensorDataset

from potluck.data.shards import ShardedDataset
from potluck.training.own_samples import OwnSchedule, hashed, held
from potluck.training.sampler import Holding, Schedule
from potluck.training.shard_order import ShardOrder

_MOST_ROWS = 1024


def check_samples(samples: object) -> None:
    """ValueError for another word than "own" or "all"."""
    if samples not in ("own", "all"):
        raise ValueError(
            f'samples is {samples!r}: pass "own" if each worker has its own part of the samples, '
            '"all" if every worker has all of them'
        )


def schedule_of(
    dataset: Any, batch_size: int, epochs: int, seed: int, shuffle: bool, samples: str
) -> Schedule:
    """The schedule of ``epochs`` passes over ``dataset``."""
    num, shards = len(dataset), None
    if isinstance(dataset, ShardedDataset) and num:
        shards = ShardOrder(dataset.sizes, dataset.lanes)
    if samples == "all":
        return Schedule(num, batch_size, epochs, seed, shuffle, shards)
    # Before a group has formed the number of all samples is unknown.
    found = max(num, 1), batch_size, epochs, seed, shuffle, shards
    return OwnSchedule(*found, own=_held(dataset))


def _held(dataset: Any) -> Holding:
    """What this rank says of its own samples: hashes of up to 1,024 of them, of one shard; unknown
    if there are none, or some that can't be hashed."""
    num = len(dataset)
    if not num:
        return Holding(0)
    if isinstance(dataset, TensorDataset):
        text = ", ".join(f"{each.dtype} {list(each.shape[1:])}" for each in dataset.tensors)
        return held(num, dataset.tensors, text.replace("torch.", ""))
    if isinstance(dataset, ShardedDataset):
        shard = int(np.argmax(np.array(dataset.sizes) > 0))
        first = dataset.load(shard).take(np.arange(min(dataset.sizes[shard], _MOST_ROWS)))
        return Holding(num, hashed([list(dataset.sizes), first]))
    return Holding(num, hashed([num, *(dataset[row] for row in sorted({0, num // 2, num - 1}))]))
