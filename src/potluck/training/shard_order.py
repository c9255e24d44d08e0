"""The order of samples that are stored in shards. Pure: the same on every rank.

A shard is a piece of the data that is read as a whole: a row group of Parquet, a tar archive. A
random order of all samples would read a shard for each sample. Here the shards of an epoch are
shuffled and dealt to a few *lanes*, and the samples of the epoch come from the lanes in turn.
Within a shard the samples are shuffled. So a batch mixes one shard of each lane, and a rank, whose
share is a contiguous part of the lanes, reads the shards of its own lanes only.

A sample is still a number, and a position in the order still determines it, so what is committed is
counted as with any other order: each sample of an epoch exactly once, whoever comes or goes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """The order of the samples of shards with ``sizes`` samples, from ``lanes`` lanes.

    Sample ``i`` of shard ``s`` has the number ``sum(sizes[:s]) + i``. More lanes mix more shards in
    a batch; a rank holds about ``lanes / world_size`` shards in memory.
    """

    sizes: tuple[int, ...]
    lanes: int = 8

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 0 or not sum(self.sizes):
            raise ValueError("the data set is empty: its shards have no samples")
        if self.lanes < 1:
            raise ValueError(f"lanes is {self.lanes}; it must be at least 1")

    @property
    def num_samples(self) -> int:
        """The number of samples of all shards."""
        return sum(self.sizes)

    @property
    def fingerprint(self) -> str:
        """Hex SHA3-256 of sizes and lanes: equal for equal orders."""
        text = f"{self.lanes} {' '.join(map(str, self.sizes))}"
        return hashlib.sha3_256(text.encode()).hexdigest()

    def indices(
        self, seed: int, epoch: int, start: int, size: int, part: slice = slice(None)
    ) -> NDArray[np.int64]:
        """The samples at the positions ``start`` to ``start + size`` of the epoch, by lane, and of
        these the ``part``. Int64. Cost: O(size log shards)."""
        plan = _lanes(self.sizes, self.lanes, seed, epoch)
        return plan.samples(np.sort(plan.places(np.arange(start, start + size)))[part])


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The lanes of one epoch. The *place* of a sample is its position in all lanes, one lane after
    the other.

    Lanes are in order of their lengths. While all have samples they take turns, then all but the
    shortest, and so on: ``ends[k]`` is the position at which lane ``k`` has no more.
    """

    seed: int
    epoch: int
    sizes: tuple[int, ...]
    shards: NDArray[np.int64]  # in order of their places
    shard_starts: NDArray[np.int64]  # the place of the first sample of each of these, and the end
    first_samples: NDArray[np.int64]  # by shard: the number of its first sample
    lane_starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ends: NDArray[np.int64]

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of the samples at ``positions`` of the epoch."""
        shortest = np.searchsorted(self.ends, positions, side="right")  # the shortest lane in use
        earlier = np.concatenate([[0], self.lengths])[shortest]
        turn = positions - np.concatenate([[0], self.ends])[shortest]
        num_lanes = len(self.lengths) - shortest
        lane = shortest + turn % num_lanes
        return np.asarray(self.lane_starts[lane] + earlier + turn // num_lanes, np.int64)

    def samples(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of the samples at ``places``, which are sorted."""
        found = np.empty(len(places), np.int64)
        slots = np.searchsorted(self.shard_starts, places, side="right") - 1
        for slot in np.unique(slots):
            here = slice(*np.searchsorted(slots, [slot, slot + 1]))
            shard = int(self.shards[slot])
            rows = places[here] - self.shard_starts[slot]
            keys = (self.seed, self.epoch, 1 + shard)
            found[here] = self.first_samples[shard] + shuffled(keys, self.sizes[shard], rows)
        return found


@lru_cache(maxsize=4)
def _lanes(sizes: tuple[int, ...], lanes: int, seed: int, epoch: int) -> _Lanes:
    """Shuffle the shards, and give each one to the lane that has the fewest samples so far."""
    present = [shard for shard, size in enumerate(sizes) if size]
    keys = np.random.Philox(key=_key(seed, epoch), counter=_counter(0)).random_raw(len(sizes))
    present.sort(key=lambda shard: int(keys[shard]))
    dealt: list[list[int]] = [[] for _ in range(min(lanes, len(present)))]
    lengths = [0] * len(dealt)
    for shard in present:
        lane = lengths.index(min(lengths))
        dealt[lane].append(shard)
        lengths[lane] += sizes[shard]
    ranked = sorted(range(len(dealt)), key=lambda lane: lengths[lane])
    shards = [shard for lane in ranked for shard in dealt[lane]]
    by_length = [lengths[lane] for lane in ranked]
    steps = np.diff(by_length, prepend=0)
    return _Lanes(
        seed,
        epoch,
        sizes,
        np.array(shards, np.int64),
        _starts([sizes[shard] for shard in shards]),
        _starts(sizes),
        _starts(by_length)[:-1],
        np.array(by_length, np.int64),
        np.cumsum(steps * np.arange(len(ranked), 0, -1)),
    )


def shuffled(keys: tuple[int, int, int], size: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where ``rows`` are in a random permutation of ``range(size)`` that ``keys`` determine.

    A Feistel network permutes the numbers of an even number of bits; numbers beyond ``size`` are
    permuted again until they are below it (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", section 3). So the permutation takes neither memory nor time before its use: for the
    samples of a shard, and of a data set that is too large for ``sampler.order``.
    """
    bits = max((size - 1).bit_length() + 1, 2) // 2
    mask = np.uint64((1 << bits) - 1)
    rounds = np.random.Philox(key=_key(*keys[:2]), counter=_counter(keys[2])).random_raw(_ROUNDS)
    found = rows.astype(np.uint64)
    again = np.arange(len(rows))
    while len(again):
        left, right = found[again] >> np.uint64(bits), found[again] & mask
        for key in rounds:
            left, right = right, left ^ (hashed(right ^ key) & mask)
        found[again] = left << np.uint64(bits) | right
        again = again[found[again] >= size]
    return found.astype(np.int64)


def _key(seed: int, epoch: int) -> NDArray[np.uint64]:
    return np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], np.uint64)


def _counter(stream: int) -> NDArray[np.uint64]:
    """The counter of one of many streams of random numbers; ``sampler.order`` begins at zero."""
    return np.array([0, 0, 1, stream], np.uint64)


def _starts(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]).astype(np.int64)


def hashed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64, element by element (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators", figure 18). A permutation of all uint64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""What SplitMix64 adds to its state for each number: 2**64 over the golden ratio."""
