"""``Loader``: a rank's samples as tensors, loaded ahead by worker processes where asked.

The shares of the next steps are known, so they are loaded before they are needed. If the next share
is another one than was expected, since the group or the shares have changed, what was loaded ahead
is dropped.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, tee
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from potluck.data.reader import ShardReader
from potluck.data.shards import Samples, ShardedDataset, one_by_one
from potluck.data.stream import Stream
from potluck.training.sampler import (
    STREAM,
    Holding,
    OwnSchedule,
    Schedule,
    Share,
    StreamSchedule,
    hashed,
    holding_of,
)
from potluck.training.shard_order import ShardOrder

Collate = Callable[[list[Any]], Any]


class Loader:
    """The samples of shares. ``num_workers`` processes, each with ``prefetch`` shares ahead."""

    def __init__(
        self, dataset: Any, collate: Collate, *, num_workers: int, prefetch: int, seed: int
    ) -> None:
        for name, value, least in (("num_workers", num_workers, 0), ("prefetch", prefetch, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number from {least} on")
        may_be_empty = isinstance(dataset, Stream | TensorDataset)
        self._is_empty = not may_be_empty and not len(dataset)
        self._source: _Mapped
        if isinstance(dataset, Stream):
            dataset.ahead = num_workers * prefetch + 1
            self._source = _Streamed(dataset, collate)
        elif isinstance(dataset, ShardedDataset):
            self._source = _Sharded(dataset, collate)
        else:
            self._source = _Mapped(partial(_fetched, dataset, collate))
        self._seed = seed
        self._next: Share | None = None  # the share whose samples come next
        self._after: Iterator[Share] = iter(())
        self._ahead: Iterator[Share] = iter(())
        self._batches: Iterator[Any] = iter(())
        self._num_workers, self._prefetch = num_workers, prefetch
        self._workers: DataLoader[Any] | None = None

    def load(self, share: Share, upcoming: Callable[[], Iterator[Share]]) -> Any:
        """The samples of ``share``. ``upcoming()`` are the shares after it, as far as is known. A
        rank that has no samples of its own gets tensors of 0, of other data sets None."""
        if self._is_empty:
            return None
        if self._next is None or not _are_equal(self._next, share):
            self._restart(chain([share], upcoming()))
        self._next = None  # an error leaves it so, and the next call starts again
        samples = next(self._batches)
        self._next = next(self._after, None)
        return samples

    def close(self) -> None:
        """End the worker processes and the reading thread. The next ``load`` starts them again."""
        if self._workers is not None and self._workers._iterator is not None:
            # Else they end with the last reference, which an error's traceback may hold for long.
            self._workers._iterator._shutdown_workers()  # type: ignore[attr-defined]
        self._next, self._batches, self._workers = None, iter(()), None
        self._source.close()

    def _restart(self, shares: Iterator[Share]) -> None:
        self._source.forget()
        self._ahead, self._after = tee(shares)
        first = next(self._after)
        if not self._num_workers:
            self._batches = map(self._source.finish, self._requests())
        else:
            if self._workers is None:
                self._workers = self._new_workers()
            # Workers that load for other ranks have other random numbers.
            first_index = int(first.indices[0]) if len(first.indices) else 0
            self._workers.generator.manual_seed(self._seed + first_index)
            with warnings.catch_warnings():
                # Workers run no code of this process's other threads.
                warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
                self._batches = iter(self._workers)

    def _new_workers(self) -> DataLoader[Any]:
        return DataLoader(
            _Finishing(self._source.finish),
            batch_size=None,
            sampler=_Requests(self._requests),
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch,
            persistent_workers=True,
            # The script needs no `if __name__ == "__main__"` where processes are forked.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            generator=torch.Generator(),  # else each start would take a number of the script's
        )

    def _requests(self) -> Iterator[Any]:
        """What is to be finished: the samples of the shares ahead, in order."""
        source, window = self._source, deque[Share]()
        for share in self._ahead:
            source.expect(share)
            window.append(share)
            if len(window) > source.look_ahead:
                yield source.prepare(window.popleft())
        yield from map(source.prepare, window)


class _Mapped:
    """A map-style data set: samples by their index. ``prepare`` runs in this process, and
    ``finish`` in a worker process if there are any."""

    look_ahead = 0
    """The number of steps whose samples are expected before they are prepared."""

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self.finish = finish

    def expect(self, share: Share) -> None:
        """``prepare`` is called for this share later."""

    def prepare(self, share: Share) -> Any:
        """What ``finish`` makes the samples of this share from."""
        return share.indices.tolist()

    def forget(self) -> None:
        """Nothing is expected any more."""

    def close(self) -> None:
        """End what reads."""


def _fetched(dataset: Any, collate: Collate, indices: list[int]) -> Any:
    if isinstance(dataset, TensorDataset):
        return dataset[torch.tensor(indices, dtype=torch.int64)]
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(indices))
    return collate([dataset[index] for index in indices])


class _Sharded(_Mapped):
    """A data set in shards, which this process reads."""

    look_ahead = 32

    def __init__(self, dataset: ShardedDataset, collate: Collate) -> None:
        super().__init__(partial(_transformed, dataset.transform, collate))
        self._reader = ShardReader(dataset)

    def expect(self, share: Share) -> None:
        self._reader.expect(share.indices)

    def prepare(self, share: Share) -> Samples:
        return self._reader.take(share.indices)

    def forget(self) -> None:
        self._reader.forget()

    def close(self) -> None:
        self._reader.close()


class _Streamed(_Mapped):
    """A stream, which this process reads: it holds the items of shares that are known."""

    def __init__(self, stream: Stream, collate: Collate) -> None:
        super().__init__(collate)
        self._stream = stream

    def prepare(self, share: Share) -> Any:
        return self._stream.take(share.indices.tolist())


def _transformed(transform: Callable[[Any], Any] | None, collate: Collate, samples: Samples) -> Any:
    if isinstance(samples, dict) and transform is None:
        return {name: _as_tensor(column) for name, column in samples.items()}
    found = one_by_one(samples)
    return collate(found if transform is None else [transform(sample) for sample in found])


class _Finishing(Dataset[Any]):
    """What workers run: torch's loader calls it with each of ``_Requests``."""

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self._finish = finish

    def __getitem__(self, request: Any) -> Any:
        return self._finish(request)


class _Requests:
    """The requests of a ``Loader``, as torch's loader wants them: anew at each of its starts."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()


def _are_equal(share: Share, other: Share) -> bool:
    return (share.epoch, share.weight) == (other.epoch, other.weight) and np.array_equal(
        share.indices, other.indices
    )


def _as_tensor(column: NDArray[Any]) -> Any:
    """A tensor, in this machine's byte order; a list of the values if they are no numbers."""
    if column.dtype.kind in "biuf":
        native = column.dtype.newbyteorder("=")
        return torch.from_numpy(np.ascontiguousarray(column, native))
    return column.tolist()


_MOST_ROWS = 1024


def check_samples(samples: object) -> None:
    """ValueError for another word than "own" or "all"."""
    if samples not in ("own", "all"):
        raise ValueError(
            f'samples is {samples!r}: pass "own" if each worker has its own part of the samples, '
            '"all" if every worker has all of them'
        )


def stream_of(dataset: Any) -> Stream | None:
    """The stream of a data set that has no samples by number; None of one that has."""
    is_map = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_stream = isinstance(dataset, IterableDataset)  # which may have both, from Dataset
    is_stream |= not is_map and (callable(dataset) or hasattr(dataset, "__iter__"))
    return Stream(dataset) if is_stream and not isinstance(dataset, DataLoader | type) else None


def schedule_of(
    dataset: Any, batch_size: int, epochs: int, seed: int, shuffle: bool, samples: str
) -> Schedule:
    """The schedule of ``epochs`` passes over ``dataset``."""
    if isinstance(dataset, Stream):
        if samples == "own":
            raise ValueError("all ranks read the same stream: leave samples='own' out")
        return StreamSchedule(STREAM, batch_size, epochs, shuffle=False, is_open=epochs == STREAM)
    num, shards = len(dataset), None
    if isinstance(dataset, ShardedDataset) and num:
        shards = ShardOrder(dataset.sizes, dataset.lanes)
    if samples == "all":
        return Schedule(num, batch_size, epochs, seed, shuffle, shards)
    # Before a group has formed the number of all samples is unknown.
    found = max(num, 1), batch_size, epochs, seed, shuffle, shards
    return OwnSchedule(*found, holding=_held(dataset))


def _held(dataset: Any) -> Holding:
    """This rank's holding: hashes of up to 1,024 of its samples, of one shard; unknown if there are
    none, or some that can't be hashed."""
    num = len(dataset)
    if not num:
        return Holding(0)
    if isinstance(dataset, TensorDataset):
        text = ", ".join(f"{each.dtype} {list(each.shape[1:])}" for each in dataset.tensors)
        return holding_of(num, dataset.tensors, text.replace("torch.", ""))
    if isinstance(dataset, ShardedDataset):
        shard = int(np.argmax(np.array(dataset.sizes) > 0))
        first = dataset.load(shard).take(np.arange(min(dataset.sizes[shard], _MOST_ROWS)))
        return Holding(num, hashed([list(dataset.sizes), first]))
    return Holding(num, hashed([num, *(dataset[row] for row in sorted({0, num // 2, num - 1}))]))
