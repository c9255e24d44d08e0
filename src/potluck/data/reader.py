"""``ShardReader``: reads shards on a thread, ahead of their use, and holds few of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from potluck._core.background import start_thread
from potluck.data.shards import Samples, Shard, ShardedDataset, joined

_CLOSE_S = 5.0


class ShardReader:
    """The shards of ``dataset`` that are in use, and those that are about to be.

    It reads ahead while it holds fewer than twice as many shards, and one, as the latest ``take``
    needed. To make room it lets go of the shards that were not used for the longest time.
    """

    def __init__(self, dataset: ShardedDataset) -> None:
        self._dataset = dataset
        self._pool: ThreadPoolExecutor | None = None
        self._held: OrderedDict[int, Future[Shard]] = OrderedDict()  # the latest used at the end
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._fresh: set[int] = set()  # read ahead, and not used yet
        self._in_use: set[int] = set()

    def expect(self, indices: NDArray[np.int64]) -> None:
        """These samples will be taken soon: read their shards, if there is room."""
        shards, _ = self._dataset.find(indices)
        self._wanted.update(dict.fromkeys(np.unique(shards).tolist()))
        self._read_ahead()

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """The samples ``indices``, in this order. DataError if a shard can't be read."""
        shards, rows = self._dataset.find(indices)
        edges = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
        runs = [slice(start, stop) for start, stop in pairwise(edges)]
        self._in_use = set(shards.tolist())
        self._fresh -= self._in_use
        for shard in self._in_use:
            self._wanted.pop(shard, None)
        parts = [self._get(int(shards[run.start])).take(rows[run]) for run in runs]
        self._read_ahead()
        return joined(parts, lambda n: self._dataset.describe(int(shards[runs[n].start])))

    def forget(self) -> None:
        """What was expected is not."""
        self._wanted.clear()
        self._fresh.clear()

    def close(self) -> None:
        """End the thread, once it has read the shard that it reads now; that is waited for, but not
        longer than ``_CLOSE_S``. The next ``expect`` or ``take`` starts another one."""
        pool = self._pool
        if pool is not None:
            end = partial(pool.shutdown, cancel_futures=True)
            start_thread(end, name="potluck-shards-end", on_broken=lambda error: None).join(
                _CLOSE_S
            )
        self._pool = None
        self._held.clear()
        self.forget()

    def _get(self, shard: int) -> Shard:
        if shard not in self._held:
            self._make_room()
            self._held[shard] = self._start(shard)
        self._held.move_to_end(shard)
        try:
            return self._held[shard].result()
        except BaseException:
            self._held.pop(shard, None)  # the next attempt reads again
            raise

    def _start(self, shard: int) -> Future[Shard]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="potluck-shards")
        return self._pool.submit(self._dataset.load, shard)

    def _read_ahead(self) -> None:
        for shard in list(self._wanted):
            if shard not in self._held:
                if not self._make_room():
                    return
                self._held[shard] = self._start(shard)
                self._fresh.add(shard)
            del self._wanted[shard]

    def _make_room(self) -> bool:
        """Let go of shards beyond the bound. Whether there is room for another one."""
        most = 2 * max(len(self._in_use), 1) + 1
        for shard in self._oldest():
            if len(self._held) < most:
                break
            del self._held[shard]
        return len(self._held) < most

    def _oldest(self) -> Iterable[int]:
        """The shards that have been used, and are not in use, oldest first."""
        return [each for each in self._held if each not in self._in_use | self._fresh]
