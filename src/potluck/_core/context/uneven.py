"""Collectives of arrays that differ in their first dimension: the sizes first, then the data."""

from __future__ import annotations

import itertools
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from potluck._core import hints
from potluck._core.checks import Duration, check_within, checked_rank
from potluck._core.context.arrays import Adapted, room_like
from potluck._core.context.collectives import Collectives
from potluck._core.engine.work import Together, Work
from potluck._core.wire.dtypes import NAMES, code_of_name

MAX_DIMS = 8
UNEVEN_TAG = 0

_COLUMNS = 3 + MAX_DIMS
_NUM_DIMS = 2
"""The column of the number of dimensions; 0 if the root was given no parts."""
_KIND = 1
"""The column of the type of the root's mistake: 1 for a TypeError, 0 for a ValueError."""
_MAX_REASON_BYTES = 512


class _Spec(NamedTuple):
    """What one rank gives, as the ranks tell each other."""

    root: int
    dtype: str
    shape: tuple[int, ...]

    def row(self) -> list[int]:
        padding = [0] * (MAX_DIMS - len(self.shape))
        return [self.root, code_of_name(self.dtype), len(self.shape), *self.shape, *padding]

    @classmethod
    def of_row(cls, row: Any) -> _Spec:
        root, code, num_dims, *shape = (int(value) for value in row)
        return cls(root, NAMES[code - 1], tuple(shape[:num_dims]))

    def __str__(self) -> str:
        dims = ", ".join(["*", *map(str, self.shape[1:])])
        root = f" with root {self.root}" if self.root >= 0 else ""
        return f"{self.dtype} of shape ({dims}){root}"


class UnevenCollectives(Collectives):
    """Gather and scatter of parts of unequal length.

    Parts have one dimension to eight, and are equal in dtype and in all dimensions but the first,
    which may be 0. Cost beside the data: one collective of 88 bytes per rank. With
    ``async_op=True`` the call returns when the sizes of all ranks are known.
    """

    def all_gather_uneven(
        self, array: Any, *, timeout: Duration | None = None, async_op: bool = False
    ) -> Any:
        """Return every rank's array as a list in rank order; they may differ in their first
        dimension.

        Desync, on all ranks, if arrays differ in dtype or in another dimension. Each rank's array
        is sent to all others: as one all_gather if all are equal in shape, else by a broadcast from
        each rank.
        """
        deadline = self._deadline(timeout)
        mine = self._adapt(array, writable=False)
        specs = self._exchange("all_gather_uneven", _spec(mine), deadline)
        left = left_until(deadline)
        if len({spec.shape for spec in specs}) == 1:
            work: Work = self.all_gather(array, timeout=left, async_op=True)
            work.then(list)
            return work if async_op else work.wait()
        rooms = [self._room_like(array, spec.shape) for spec in specs]
        rooms[self.rank].array[...] = mine.array
        works = [
            self.broadcast(room.array, rank, timeout=left, async_op=True)
            for rank, room in enumerate(rooms)
            if 0 not in specs[rank].shape
        ]
        return self._together("all_gather_uneven", works, _all_of(rooms), async_op)

    @hints.arguments({}, same=hints.ROOTED)
    def gather_uneven(
        self, array: Any, root: int = 0, *, timeout: Duration | None = None, async_op: bool = False
    ) -> Any:
        """Return every rank's array on rank ``root``, as a list in rank order; None elsewhere.

        The arrays may differ in their first dimension. Desync, on all ranks, if they differ in
        dtype or in another dimension, or if ranks name different roots. Each rank sends its array
        once.
        """
        root = self._checked_root(root)
        deadline = self._deadline(timeout)
        mine = self._adapt(array, writable=False)
        specs = self._exchange("gather_uneven", _spec(mine, root), deadline)
        aside, left = self.communicator.aside(), left_until(deadline)
        if self.rank != root:
            works = []
            if 0 not in mine.array.shape:
                works = [aside.send(mine.array, root, UNEVEN_TAG, timeout_s=left)]
            return self._together("gather_uneven", works, lambda _: None, async_op)
        rooms = [self._room_like(array, spec.shape) for spec in specs]
        rooms[root].array[...] = mine.array
        works = [
            aside.recv(room.array, rank, UNEVEN_TAG, timeout_s=left)
            for rank, room in enumerate(rooms)
            if rank != root and 0 not in specs[rank].shape
        ]
        return self._together("gather_uneven", works, _all_of(rooms), async_op)

    @hints.arguments({}, same=hints.ROOTED)
    def scatter_uneven(
        self,
        parts: Any = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        like: Any = None,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's part of what rank ``root`` passes; the parts may differ in length.

        On ``root``, ``parts`` is a sequence of one array per rank, or one array that is cut along
        its first dimension into pieces of ``counts`` rows. On other ranks it is None, and the part
        is a new NumPy array, or an array like ``like`` (a tensor, for a tensor on its device).
        The root sends each part once. ValueError or TypeError, the same on all ranks, if the
        parts are not one per rank, or differ in dtype or in another dimension than the first, or
        if ``counts`` are not whole numbers; TypeError if ``like`` has another dtype. The group
        goes on.
        """
        root = self._checked_root(root)
        deadline = self._deadline(timeout)
        if self.rank == root:
            try:
                given = [self._adapt(part, writable=False) for part in self._split(parts, counts)]
                specs = _equal_parts([_spec(part, root) for part in given])
            except (ValueError, TypeError) as error:
                self._tell_mistake(root, error, deadline)
                raise
            rows = np.array([spec.row() for spec in specs], np.int64)
        else:
            rows = np.zeros((self.world_size, _COLUMNS), np.int64)
        self.broadcast(rows, root, timeout=left_until(deadline))
        if rows[self.rank, _NUM_DIMS] == 0:
            self._raise_mistake(root, int(rows[self.rank, _KIND]), deadline)
        spec = _Spec.of_row(rows[self.rank])
        aside, left = self.communicator.aside(), left_until(deadline)
        if self.rank != root:
            # A part that does not fit ``like`` is taken all the same: it would be the next one's.
            misfit = _misfit(like, spec)
            room = self._room_like(_model(spec) if like is None or misfit else like, spec.shape)
            is_there = 0 not in spec.shape
            works = [aside.recv(room.array, root, UNEVEN_TAG, timeout_s=left)] if is_there else []
            if misfit:
                self._together("scatter_uneven", works, room.write_back, False)
                raise TypeError(misfit)
            return self._together("scatter_uneven", works, room.write_back, async_op)
        works = [
            aside.send(part.array, rank, UNEVEN_TAG, timeout_s=left)
            for rank, part in enumerate(given)
            if rank != root and 0 not in part.array.shape
        ]
        own = self._room_like(given[root].user, spec.shape)
        own.array[...] = given[root].array
        return self._together("scatter_uneven", works, own.write_back, async_op)

    # -- inside

    def _deadline(self, timeout: Duration | None) -> float:
        return time.monotonic() + self._patience(timeout)

    def _checked_root(self, root: object) -> int:
        number = checked_rank("root", root, self.world_size)
        check_within("root", number, self.world_size)
        return number

    def _exchange(self, operation: str, mine: _Spec, deadline: float) -> list[_Spec]:
        """What each rank gives; Desync, which ends the group, if the ranks disagree."""
        row = np.array(mine.row(), np.int64)
        specs = [_Spec.of_row(each) for each in self.all_gather(row, timeout=left_until(deadline))]
        if len({str(spec) for spec in specs}) > 1:
            self._disagree(operation, specs)
        return specs

    def _disagree(self, operation: str, specs: list[_Spec]) -> NoReturn:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, spec in enumerate(specs):
            ranks[str(spec)].append(rank)
        told = "; ".join(f"{_ranks(which)} gave {what}" for what, which in ranks.items())
        self._end_group(
            f"{operation} in epoch {self.epoch}: parts may differ in their first dimension only, "
            f"but {told}",
            operation,
        )

    def _tell_mistake(self, root: int, error: Exception, deadline: float) -> None:
        """The root was given what it can't scatter: the others must not wait for parts."""
        rows = np.zeros((self.world_size, _COLUMNS), np.int64)
        rows[:, _KIND] = isinstance(error, TypeError)
        self.broadcast(rows, root, timeout=left_until(deadline))
        reason = np.zeros(_MAX_REASON_BYTES, np.uint8)
        text = str(error).encode()[:_MAX_REASON_BYTES]
        reason[: len(text)] = np.frombuffer(text, np.uint8)
        self.broadcast(reason, root, timeout=left_until(deadline))

    def _raise_mistake(self, root: int, kind: int, deadline: float) -> NoReturn:
        reason = np.zeros(_MAX_REASON_BYTES, np.uint8)
        self.broadcast(reason, root, timeout=left_until(deadline))
        text = reason.tobytes().rstrip(b"\0").decode(errors="replace")
        raise (TypeError if kind else ValueError)(
            f"scatter_uneven: rank {root}, the root, can't scatter what it was given: {text}"
        )

    def _split(self, parts: Any, counts: Sequence[int] | None) -> list[Any]:
        if parts is None:
            raise ValueError(f"scatter_uneven: rank {self.rank} is the root and must pass parts")
        if counts is not None:
            whole = _whole_counts(counts)
            ends = [0, *itertools.accumulate(whole)]
            if len(whole) != self.world_size or min(whole) < 0 or ends[-1] != len(parts):
                raise ValueError(
                    f"scatter_uneven: counts {whole} must be {self.world_size} numbers, "
                    f"0 or more, with the sum {len(parts)}"
                )
            return [parts[begin:end] for begin, end in itertools.pairwise(ends)]
        if len(parts) != self.world_size:
            raise ValueError(
                f"scatter_uneven takes one part per rank, {self.world_size}, not {len(parts)}; "
                "one array needs counts"
            )
        return list(parts)

    def _room_like(self, array: Any, shape: tuple[int, ...]) -> Adapted:
        return room_like(array, shape, device=self.communicator.device)

    def _together(
        self,
        operation: str,
        works: Sequence[Work],
        result: Callable[[Any], Any],
        async_op: bool,
    ) -> Any:
        """The work of all ``works``, after which ``result(None)`` is returned."""
        text = f"{operation} in epoch {self.communicator.group.epoch}"
        return self._end(Together(text, works, None), result, async_op)


def _all_of(rooms: Sequence[Adapted]) -> Callable[[Any], Any]:
    return lambda _: [room.write_back() for room in rooms]


def _spec(part: Adapted, root: int = -1) -> _Spec:
    shape = tuple(part.array.shape)
    if not 1 <= len(shape) <= MAX_DIMS:
        raise ValueError(f"uneven parts have 1 to {MAX_DIMS} dimensions, not the shape {shape}")
    return _Spec(root, _dtype_name(part), shape)


def _whole_counts(counts: Iterable[Any]) -> list[int]:
    try:
        return [operator.index(count) for count in counts]
    except TypeError:
        raise TypeError(
            f"scatter_uneven: counts must be whole numbers, one for each rank, not {counts!r:.100}"
        ) from None


def _dtype_name(part: Adapted) -> str:
    return str(part.array.dtype).removeprefix("torch.")


def _misfit(like: Any, spec: _Spec) -> str:
    """Why the part of ``spec`` can't be an array like ``like``; empty if it can."""
    if like is None:
        return ""
    # torch.float32, mlx.core.float32
    dtype = str(getattr(like, "dtype", type(like).__name__)).rpartition(".")[2]
    if dtype == spec.dtype:
        return ""
    return f"scatter_uneven: the parts are {spec.dtype}, but like is {dtype}"


def _model(spec: _Spec) -> Any:
    return np.empty(0, dtype=spec.dtype)


def _equal_parts(specs: list[_Spec]) -> list[_Spec]:
    kinds = list(dict.fromkeys(map(str, specs)))
    if len(kinds) > 1:
        raise ValueError(
            "scatter_uneven: parts may differ in their first dimension only, but there are "
            + " and ".join(kinds)
        )
    return specs


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def left_until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
