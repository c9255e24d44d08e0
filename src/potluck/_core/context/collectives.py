"""The operations on a group: arrays in, arrays out, blocking or as a Work.

docs/reference/potluck.md describes what all operations share: dtypes, arguments, errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from potluck._core import hints
from potluck._core.backends.base import Communicator
from potluck._core.checks import Duration, check_parts, checked_rank, checked_seconds, checked_tag
from potluck._core.codecs import codec_of
from potluck._core.collectives.plan import Operation
from potluck._core.context.arrays import Adapted, adapt, collide, empty_like, is_array, room_like
from potluck._core.context.compressed import start_own
from potluck._core.engine.arrays.coding import Encoding
from potluck._core.engine.request import Request
from potluck._core.engine.work import Work
from potluck._core.forks import Uncopied
from potluck._core.types import Group, Member, reduce_op
from potluck._core.wire.immutable import library_of
from potluck._core.wire.tensors import is_tensor
from potluck.errors import Desync

_ALL_REDUCE = Operation.ALL_REDUCE
_REDUCE_SCATTER = Operation.REDUCE_SCATTER
_ALL_GATHER = Operation.ALL_GATHER

_SCATTER = "scatter(output, parts, root=0), with parts.reshape(world_size, ...) on the root"
_GATHER = "gather(array, root=0, out=rows), which returns the rows on the root"
_FIRST = "the context comes first: potluck.{}(ctx, array)"


class Waits:
    """The sum of the seconds for which calls have blocked."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds


class Collectives(Uncopied):
    """Collective and point-to-point operations on one group."""

    take_instead = "its links belong to this process; call potluck.init() in the other one"

    communicator: Communicator
    """The communicator of the present group."""

    def __init__(self, timeout_s: float, waits: Waits | None = None) -> None:
        self.timeout_s = timeout_s
        self._waits = waits if waits is not None else Waits()

    def set_timeout(self, timeout: Duration) -> None:
        """Set ``timeout_s``, the deadline of this rank's later operations that name none, and of
        ``reform``.

        Sub-groups and Remotes that were made before keep theirs. TypeError or ValueError for what
        is no duration above 0. Cost: no message.
        """
        self.timeout_s = checked_seconds(timeout)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has been blocked in these operations and those of sub-groups."""
        return self._waits.seconds + self.communicator.metrics.waited_s

    @property
    def group(self) -> Group:
        """The present group, immutable."""
        return self.communicator.group

    @property
    def epoch(self) -> int:
        """The number of the present group, which rises with every ``reform``."""
        return self.group.epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the present group in rank order."""
        return self.group.members

    @property
    def local_rank(self) -> int:
        """This worker's number among the workers of its node."""
        return self.group.me.local_rank

    @property
    def is_master(self) -> bool:
        """Whether this worker is rank 0, the most senior member."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """This worker's rank in the group, from 0 to ``world_size - 1``."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """The number of workers in the group."""
        return self.communicator.world_size

    def all_reduce(
        self,
        array: Any,
        op: str = "sum",
        *,
        algorithm: str | None = None,
        codec: str | None = None,
        residual: Any = None,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine all ranks' arrays element by element, in place, and return ``array``.

        The result is equal bit by bit on every rank. Cost, as a ring: ``2 (world - 1)`` steps, in
        which each rank sends ``2 (world - 1) / world`` times the array's bytes.
        """
        if algorithm is None and codec is None and residual is None and not async_op:
            # `_has_run` inlined, here and twice below: its call takes a tenth of a 4 KiB
            # all_reduce.
            fast = self.communicator.fast_path
            if fast is not None:
                patience = self.timeout_s if timeout is None else self._patience(timeout)
                if fast(_ALL_REDUCE, array, array, op, 0, patience, False):
                    return array
        mine = self._adapt(array)
        encoding = self._encoding(codec, residual)
        if encoding is not None and not encoding.codec.code and algorithm is None:
            own = start_own(self, mine.array, reduce_op(op), *encoding, timeout)
            own.then(mine.write_back)
            return own if async_op else own.wait()
        request = Request(
            Operation.ALL_REDUCE,
            mine.array,
            mine.array,
            reduce_op(op),
            algorithm=algorithm,
            encoding=encoding,
            timeout_s=self._patience(timeout),
        )
        return self._run(request, mine.write_back, async_op)

    def reduce_scatter(
        self,
        array: Any,
        op: str = "sum",
        *,
        algorithm: str | None = None,
        codec: str | None = None,
        residual: Any = None,
        out: Any = None,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine all ranks' ``(world, *s)`` arrays and return part ``rank``, of shape ``s``.

        ``array`` stays as it is. ValueError if its first dimension is not ``world``. Cost, as a
        ring: ``world - 1`` steps, in which each rank sends ``(world - 1) / world`` times the
        array's bytes.
        """
        if algorithm is None and codec is None and residual is None and not async_op:
            output = out
            if out is None and self._has_parts(array):
                output = self._room(array, array.shape[1:])
            fast = self.communicator.fast_path
            if fast is not None:
                patience = self.timeout_s if timeout is None else self._patience(timeout)
                if fast(_REDUCE_SCATTER, array, output, op, 0, patience, False):
                    return output
        parts = self._adapt(array, writable=False)
        check_parts("reduce_scatter", parts.array.shape, self.world_size)
        shape = parts.array.shape[1:]
        result = self._result("reduce_scatter", array, parts, shape, out)
        request = Request(
            Operation.REDUCE_SCATTER,
            parts.array,
            result.array.reshape(shape),
            reduce_op(op),
            algorithm=algorithm,
            encoding=self._encoding(codec, residual),
            timeout_s=self._patience(timeout),
        )
        return self._run(request, result.write_back, async_op)

    def all_gather(
        self,
        array: Any,
        *,
        algorithm: str | None = None,
        codec: str | None = None,
        residual: Any = None,
        out: Any = None,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return every rank's array, in rank order: shape ``(world, *array.shape)``.

        Cost, as a ring: ``world - 1`` steps, in which each rank sends ``world - 1`` times the
        array's bytes.
        """
        if algorithm is None and codec is None and residual is None and not async_op:
            output = self._room_for_all(array) if out is None else out
            fast = self.communicator.fast_path
            if fast is not None:
                patience = self.timeout_s if timeout is None else self._patience(timeout)
                if fast(_ALL_GATHER, array, output, None, 0, patience, False):
                    return output
        mine = self._adapt(array, writable=False)
        shape = (self.world_size, *mine.array.shape)
        result = self._result("all_gather", array, mine, shape, out)
        request = Request(
            Operation.ALL_GATHER,
            mine.array,
            result.array.reshape(shape),
            algorithm=algorithm,
            encoding=self._encoding(codec, residual),
            timeout_s=self._patience(timeout),
        )
        return self._run(request, result.write_back, async_op)

    @hints.arguments({}, same=hints.ROOTED)
    def broadcast(
        self,
        array: Any,
        root: int = 0,
        *,
        algorithm: str | None = None,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Make every rank's array equal to that of rank ``root``, in place, and return ``array``.

        Shape and dtype are the same on all ranks. ValueError if ``root`` is no rank.
        """
        if (
            algorithm is None
            and not async_op
            and self._has_run(Operation.BROADCAST, array, array, timeout, None, root)
        ):
            return array
        root = checked_rank("root", root, self.world_size)
        mine = self._adapt(array, writable=self.rank != root)
        request = Request(
            Operation.BROADCAST,
            mine.array,
            mine.array,
            root=root,
            algorithm=algorithm,
            timeout_s=self._patience(timeout),
        )
        return self._run(request, mine.write_back, async_op)

    @hints.arguments({}, same=hints.ROOTED)
    def reduce(
        self,
        array: Any,
        root: int = 0,
        op: str = "sum",
        *,
        algorithm: str | None = None,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine all ranks' arrays element by element into that of rank ``root``, in place.

        Returns ``array``; on the other ranks it is as before. ValueError if ``root`` is no rank.
        """
        if algorithm is None and not async_op:
            into = array if self.rank == root else None
            if self._has_run(Operation.REDUCE, array, into, timeout, op, root):
                return array
        root = checked_rank("root", root, self.world_size)
        mine = self._adapt(array, writable=self.rank == root)
        request = Request(
            Operation.REDUCE,
            mine.array,
            mine.array if self.rank == root else None,
            reduce_op(op),
            root=root,
            algorithm=algorithm,
            timeout_s=self._patience(timeout),
        )
        done = mine.write_back if self.rank == root else (lambda _: array)
        return self._run(request, done, async_op)

    @hints.arguments({}, _SCATTER, same=hints.ROWS)
    def scatter(
        self,
        output: Any,
        parts: Any = None,
        root: int = 0,
        *,
        algorithm: str | None = None,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fill ``output``, of shape ``s``, with part ``rank`` of the root's ``parts``; return it.

        ``parts`` has shape ``(world, *s)`` and the dtype of ``output``; only rank ``root`` passes
        it. ValueError on the root for another shape or dtype, or without ``parts``.
        """
        if algorithm is None and not async_op:
            given = parts if self.rank == root and self._has_parts(parts, output) else None
            if self._has_run(Operation.SCATTER, given, output, timeout, None, root):
                return output
        root = checked_rank("root", root, self.world_size)
        mine = self._adapt(output)
        source = None
        if self.rank == root:
            if parts is None:
                raise ValueError(f"scatter: rank {root} is the root and must pass the parts")
            source = self._adapt(parts, writable=False).array
            wanted = (self.world_size, *mine.array.shape)
            if source.shape != wanted or source.dtype != mine.array.dtype:
                raise ValueError(
                    f"scatter: the parts are {source.dtype} of shape {source.shape}; for an output "
                    f"that is {mine.array.dtype} of shape {mine.array.shape} they must have shape "
                    f"{wanted}: {_SCATTER}"
                )
        request = Request(
            Operation.SCATTER,
            source,
            mine.array,
            root=root,
            algorithm=algorithm,
            timeout_s=self._patience(timeout),
        )
        return self._run(request, mine.write_back, async_op)

    @hints.arguments({}, _GATHER, same=hints.GATHERED)
    def gather(
        self,
        array: Any,
        root: int = 0,
        *,
        algorithm: str | None = None,
        out: Any = None,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return every rank's array on rank ``root``: shape ``(world, *array.shape)``.

        On the other ranks the result is None, and ``out`` has no effect.
        """
        if algorithm is None and not async_op:
            output = None
            if self.rank == root:
                output = self._room_for_all(array) if out is None else out
            if self._has_run(Operation.GATHER, array, output, timeout, None, root):
                return output
        root = checked_rank("root", root, self.world_size)
        mine = self._adapt(array, writable=False)
        room, done = None, lambda _: None
        if self.rank == root:
            shape = (self.world_size, *mine.array.shape)
            result = self._result("gather", array, mine, shape, out)
            room, done = result.array.reshape(shape), result.write_back
        request = Request(
            Operation.GATHER,
            mine.array,
            room,
            root=root,
            algorithm=algorithm,
            timeout_s=self._patience(timeout),
        )
        return self._run(request, done, async_op)

    def all_to_all(
        self,
        array: Any,
        *,
        algorithm: str | None = None,
        out: Any = None,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send row ``i`` of ``array`` to rank ``i``; return the rows that came, by sender.

        ``array`` and the result have shape ``(world, *s)``. ValueError if the first dimension is
        not ``world``, or if ``out`` overlaps ``array``. Each rank sends ``world - 1`` rows.
        """
        if algorithm is None and not async_op:
            output = out
            if out is None and self._has_parts(array):
                output = self._room(array, array.shape)
            if self._has_run(Operation.ALL_TO_ALL, array, output, timeout):
                return output
        mine = self._adapt(array, writable=False)
        check_parts("all_to_all", mine.array.shape, self.world_size)
        shape = mine.array.shape
        result = self._result("all_to_all", array, mine, shape, out)
        request = Request(
            Operation.ALL_TO_ALL,
            mine.array,
            result.array.reshape(shape),
            algorithm=algorithm,
            timeout_s=self._patience(timeout),
        )
        return self._run(request, result.write_back, async_op)

    def barrier(self, *, algorithm: str | None = None, timeout: Duration | None = None) -> None:
        """Return once every rank has called ``barrier``."""
        if algorithm is None and self._has_run(Operation.BARRIER, None, None, timeout):
            return
        request = Request(Operation.BARRIER, algorithm=algorithm, timeout_s=self._patience(timeout))
        self._run(request, lambda _: None, False)

    @hints.arguments({}, same=hints.SENT)
    def send(
        self,
        array: Any,
        dst: int,
        tag: int = 0,
        *,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send ``array`` to rank ``dst``; return ``array`` when its memory may be reused.

        Rank ``dst`` receives it with a [recv][potluck.DistributedContext.recv] of the same ``tag``
        (0 to 2**31 - 1), size and dtype. Messages with one tag from one rank arrive in order.
        ValueError for a tag out of range, or if ``dst`` is this rank or no rank; LinkError if the
        network between the two ranks is cut (``ctx.group.cut``).
        """
        mine = self._adapt(array, writable=False)
        peer = checked_rank("dst", dst, self.world_size)
        patience = self._patience(timeout)
        work = self.communicator.send(mine.array, peer, checked_tag(tag), timeout_s=patience)
        return self._end(work, lambda _: array, async_op)

    @hints.arguments({}, same=hints.RECEIVED)
    def recv(
        self,
        array: Any,
        src: int = -1,
        tag: int = 0,
        *,
        timeout: Duration | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fill ``array`` with the next message from rank ``src`` that has this tag; return it.

        ``src`` -1 takes a message from any rank; with ``async_op=True`` the Work's ``source`` then
        tells the sender. Desync if the message has another size or dtype than ``array``.
        """
        mine = self._adapt(array)
        peer = checked_rank("src", src, self.world_size)
        patience = self._patience(timeout)
        work = self.communicator.recv(mine.array, peer, checked_tag(tag), timeout_s=patience)
        return self._end(work, mine.write_back, async_op)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """The same object: a copy of what holds a context works in the same group."""
        return self

    # -- inside

    if not TYPE_CHECKING:  # else a type checker would find every attribute

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raised AttributeError itself
                return object.__getattribute__(self, name)
            raise AttributeError(hints.of_object(self, name), name=name, obj=self)

    def _has_run(
        self,
        operation: Operation,
        source: Any,
        result: Any,
        timeout: Duration | None,
        op: str | None = None,
        root: int = 0,
    ) -> bool:
        """Try the fast path. Returns False if it can't take this call; the caller then uses
        ``run``."""
        fast = self.communicator.fast_path
        if fast is None:
            return False
        patience = self.timeout_s if timeout is None else self._patience(timeout)
        try:
            return fast(operation, source, result, op, root, patience, False)
        except TypeError:  # the slow path says that the root is no number
            return False

    def _has_parts(self, array: Any, part: Any = None) -> bool:
        """Whether ``array`` has one row per rank (of the shape of ``part``)."""
        if not is_array(array) or array.shape[:1] != (self.world_size,):
            return False
        return part is None or (is_array(part) and array.shape[1:] == part.shape)

    def _room(self, array: Any, shape: tuple[int, ...]) -> Any:
        """A new array for the result of a call on the fast path; None if there is no such path."""
        return None if self.communicator.fast_path is None else empty_like(array, shape)

    def _room_for_all(self, array: Any) -> Any:
        """A new array for the ``array`` of every rank; None if there is no fast path."""
        if not is_array(array):
            return None
        return self._room(array, (self.world_size, *array.shape))

    def _result(
        self, operation: str, like: Any, given: Adapted, shape: tuple[int, ...], out: Any
    ) -> Adapted:
        """The array for the result: ``out``, of any shape, or a new array like ``like``."""
        if out is None:
            return room_like(like, shape, device=self.communicator.device)
        if library_of(out) is not None:
            raise TypeError(f"{operation}: arrays like out can't be changed; take what is returned")
        result, dtype = self._adapt(out), given.array.dtype
        if result.array.dtype != dtype or math.prod(result.array.shape) != math.prod(shape):
            raise ValueError(
                f"{operation}: the result is {dtype} of shape {shape}, but out is "
                f"{result.array.dtype} of shape {result.array.shape}"
            )
        if collide(given.array, result.array, self.rank, self.world_size):
            raise ValueError(
                f"{operation}: out overlaps the array given; pass other memory, or as the smaller "
                f"array part {self.rank} of the larger one"
            )
        return result

    def _run(self, request: Request, result: Callable[[Any], Any], async_op: bool) -> Any:
        return self._end(self.communicator.run(request), result, async_op)

    def _end(self, work: Work, result: Callable[[Any], Any], async_op: bool) -> Any:
        work.on_wait = self._waits.add
        work.then(result)
        return work if async_op else work.wait()

    def _end_group(self, text: str, operation: str, rank: int = -1) -> NoReturn:
        """End the group on all ranks with a Desync, because of ``rank`` (-1: of no single one)."""
        error = Desync(text, rank=rank, epoch=self.epoch, operation=operation)
        self.communicator.abort(error)
        raise error

    def _adapt(self, array: Any, *, writable: bool = True) -> Adapted:
        return adapt(array, writable=writable, device=self.communicator.device)

    def _encoding(self, codec: str | None, residual: Any) -> Encoding | None:
        if codec is None:
            if residual is not None:
                raise ValueError("a residual keeps what a codec loses: name the codec, too")
            return None
        if residual is None:
            return Encoding(codec_of(codec))
        adapted = self._adapt(residual)
        if not adapted.is_shared:
            raise ValueError(
                "the residual is changed in place: it must be contiguous, and a tensor on the CPU, "
                "also where the array is on another device"
            )
        return Encoding(codec_of(codec), adapted.array)

    def _patience(self, timeout: Duration | None) -> float:
        return self.timeout_s if timeout is None else checked_seconds(timeout)


@hints.arguments({}, _FIRST.format("all_reduce_sum"))
def all_reduce_sum(context: Collectives, array: Any) -> Any:
    """Return the sum of all ranks' arrays, as a new array of the same kind, dtype and shape.

    ``array`` is a NumPy array, a torch tensor, a number or a (nested) list of numbers, of the same
    shape and dtype on all ranks, and stays as it is. ``context`` may be a sub-group. Cost and
    errors are those of ``all_reduce``; TypeError if the context does not come first.
    """
    _check_order(context, "all_reduce_sum")
    return context.all_reduce(_copy(array), "sum")


@hints.arguments({}, _FIRST.format("all_reduce_mean"))
def all_reduce_mean(context: Collectives, array: Any) -> Any:
    """Return the mean of all ranks' arrays, as a new array of the same kind, dtype and shape.

    As ``all_reduce_sum``, for floats and complex numbers. Integers and lists of integers become
    float64; an array of integers is a TypeError.
    """
    _check_order(context, "all_reduce_mean")
    copied = _copy(array)
    if isinstance(array, int | list | tuple) and copied.dtype.kind in "iu":
        copied = copied.astype(np.float64)
    return context.all_reduce(copied, "mean")


def _copy(array: Any) -> Any:
    if library_of(array) is not None:
        return array  # the result is a new one
    return array.detach().clone() if is_tensor(array) else np.array(array)


def _check_order(context: object, name: str) -> None:
    if not isinstance(context, Collectives):
        raise TypeError(f"{_FIRST.format(name)}; the first argument is a {type(context).__name__}")
