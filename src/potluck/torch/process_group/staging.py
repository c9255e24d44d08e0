"""Tensors as the engine takes them: flat arrays in host memory, where a device has them in pieces.

Tensors on the CPU are used in place. One on another device passes through (pinned) host memory. An
operation is then split into several collectives, each on a piece of every tensor. While piece ``k``
is on the network, piece ``k + 1`` is copied from the device, and results are copied back as they
arrive. If any rank has an accelerator, all ranks split alike, also those with tensors on the CPU.
The calling thread posts the pieces in order, so operations keep their order; it returns when the
last piece has left the device. Messages (send, recv, and those of all_to_all) are not split,
because a receiver may not know the sender of the next message.

Dtypes that NumPy lacks are converted to another one of the same size: bfloat16 to that of ml_dtypes
(which can be reduced), float8 and others to bytes (which can only be moved).

An operation changes only the values of a user's tensor, not its storage (which stays resizable),
strides, flags, ``requires_grad`` or version counter. So, as with Gloo and NCCL, autograd does not
notice that an operation wrote into a tensor that it has saved. Therefore results are copied through
``tensor.data``, which has a version counter of its own; ``detach()`` shares the tensor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.work import Work
from potluck._core.types import ReduceOp
from potluck._core.wire.tensors import check_plain, memory_of
from potluck.torch.process_group.work import GroupWork
from potluck.torch.process_group.world import Comms

_PLAIN: dict[torch.dtype, np.dtype[Any]] = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int16,
        torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16,
        torch.uint32, torch.uint64,
    )
}  # fmt: skip
_ARRAYS = _PLAIN | {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.complex32: np.dtype(np.float16),
}
"""The dtypes that the engine can reduce; tensors of other dtypes are bytes for it."""
_BYTES = np.dtype(np.uint8)

PIECE_BYTES = 4 << 20


class Lane(Protocol):
    """Copies of pieces between one device and host memory."""

    def room(self, pieces: Sequence[Tensor]) -> Tensor:
        """Host memory for pieces of one length and dtype, of shape (pieces, length)."""

    def fetch(self, piece: Tensor, host: Tensor) -> Callable[[], None]:
        """Start a copy to the host; the returned function waits for its end."""

    def put(self, host: Tensor, piece: Tensor) -> None:
        """Start a copy to the device."""

    def finish(self) -> None:
        """Wait for the end of all copies to the device."""


class PlainLane:
    """Blocking copies, for any device (MPS has no streams to order copies by).

    A tensor in host memory is used in place, and so are several that lie one after the other.
    """

    def room(self, pieces: Sequence[Tensor]) -> Tensor:
        first, length = pieces[0], pieces[0].numel()
        if all(_follows(first, number, each) for number, each in enumerate(pieces)):
            return first.as_strided((len(pieces), length), (length, 1))
        return torch.empty(len(pieces), length, dtype=first.dtype)

    def fetch(self, piece: Tensor, host: Tensor) -> Callable[[], None]:
        if host.data_ptr() != piece.data_ptr():
            host.copy_(piece)
        return _nothing

    def put(self, host: Tensor, piece: Tensor) -> None:
        if host.data_ptr() != piece.data_ptr():
            piece.copy_(host)

    def finish(self) -> None:
        return None


def _follows(first: Tensor, number: int, piece: Tensor) -> bool:
    """Whether a piece is in host memory, ``number`` pieces behind the first."""
    return (
        piece.device.type == "cpu"
        and piece.data_ptr() == first.data_ptr() + number * first.nbytes
        and piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    )


class CudaLane:
    """Copies through pinned memory on a CUDA stream, which waits for the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def room(self, pieces: Sequence[Tensor]) -> Tensor:
        size = (len(pieces), pieces[0].numel())
        return torch.empty(size, dtype=pieces[0].dtype, pin_memory=True)

    def fetch(self, piece: Tensor, host: Tensor) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            host.copy_(piece, non_blocking=True)
            piece.record_stream(self._stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event.synchronize

    def put(self, host: Tensor, piece: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            piece.copy_(host, non_blocking=True)
            piece.record_stream(self._stream)

    def finish(self) -> None:
        # The waiting thread may use another stream than the caller, so the copies must have ended.
        self._stream.synchronize()


class Crossing(NamedTuple):
    """One collective, or one pair of messages, and the copies before and after it."""

    fetches: Sequence[tuple[Tensor, Tensor]]
    """Pairs (on the device, in host memory): this rank's contribution."""
    post: Callable[[], Sequence[Work]]
    puts: Sequence[tuple[Tensor, Tensor]]
    """Pairs (in host memory, on the device): this rank's result."""


def lane_for(tensor: Tensor) -> Lane:
    return CudaLane(tensor.device) if tensor.device.type == "cuda" else PlainLane()


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether the tensor is on another device than the CPU."""
    return tensor.device.type != "cpu"


def is_staged(comms: Comms, tensor: Tensor) -> bool:
    """Whether an operation on ``tensor``, of several its largest, is staged.

    Equal on all ranks for large tensors, which are split; small tensors are one piece.
    """
    return is_elsewhere(tensor) or (comms.has_devices and tensor.nbytes > PIECE_BYTES)


def fast_path(
    comms: Comms,
    operation: Operation,
    opts: Any,
    source: Tensor | None,
    result: Tensor | None,
    op: ReduceOp | None = None,
    root: int = 0,
) -> GroupWork | None:
    """The work of a call that the engine's fast path has taken, which is complete; None if nothing
    was done.

    Only for blocking calls (``async_op=False``, which torch puts into ``opts``), and for tensors
    that are not staged.
    """
    fast = comms.communicator.fast_path
    if fast is None or getattr(opts, "asyncOp", True):
        return None
    for each in (source, result) if source is not result else (source,):
        if each is not None and is_staged(comms, each):
            return None
    if not fast(operation, source, result, op, root, comms.seconds(opts), True):
        return None
    return GroupWork((), [] if result is None else [result], comms.completions)


def in_place(
    comms: Comms,
    tensor: Tensor,
    post: Callable[[Array], Work],
    *,
    reads: bool = True,
    writes: bool = True,
    is_cut: bool = True,
) -> GroupWork:
    """An operation on one tensor: ``post`` is called for it, or for each piece of it.

    ``reads``: the operation uses this rank's values; ``writes``: this rank gets a result;
    ``is_cut``: large tensors are split.
    """
    if not (is_staged(comms, tensor) if is_cut else is_elsewhere(tensor)):
        array, is_shared = on_host(tensor)
        work = post(array)
        settle = None if is_shared or not writes else lambda: store(array, tensor)
        return GroupWork((work,), [tensor], comms.completions, settle)
    lane, flat = lane_for(tensor), Flat(tensor)
    crossings = []
    for start, end in _cuts(comms, tensor, 1) if is_cut else [(0, tensor.numel())]:
        piece = flat.row[start:end]
        host = lane.room([piece])
        crossings.append(
            Crossing(
                [(piece, host[0])] if reads else [],
                lambda host=host: [post(as_array(host))],  # type: ignore[misc]
                [(host[0], piece)] if writes else [],
            )
        )
    return cross(comms, lane, [tensor], crossings, [flat] if writes else [])


def in_columns(
    comms: Comms,
    sources: Sequence[Tensor] | Tensor,
    results: Sequence[Tensor] | Tensor,
    post: Callable[[Array, Array], Work],
) -> GroupWork:
    """An operation from some tensors to others: ``post(source, result)`` is called for each piece
    of all.

    All are of one size and dtype. One tensor in place of a sequence stands for its parts, one for
    each rank. The arrays of ``post`` hold the same piece of all sources or results, concatenated,
    and are empty if this rank has none.
    """
    one, other = _only(sources), _only(results)
    if not (one is None or other is None or is_staged(comms, one) or is_staged(comms, other)):
        source, (result, is_shared) = on_host(one)[0], on_host(other)
        work = post(source, result)
        settle = None if is_shared else lambda: store(result, other)
        return GroupWork((work,), [other], comms.completions, settle)
    (given, _), (made, flats) = _rows(comms, sources), _rows(comms, results)
    first = (*given, *made)[0]
    lane = lane_for(first)
    crossings = []
    for start, end in _cuts(comms, first, comms.world_size):
        reads, writes = [each[start:end] for each in given], [each[start:end] for each in made]
        here = lane.room(reads) if reads else first.new_empty(0, device="cpu")
        there = lane.room(writes) if writes else first.new_empty(0, device="cpu")
        crossings.append(
            Crossing(
                list(zip(reads, here, strict=True)) if reads else [],
                lambda h=here, t=there: [post(as_array(h), as_array(t))],  # type: ignore[misc]
                list(zip(there, writes, strict=True)) if writes else [],
            )
        )
    shown = [results] if isinstance(results, Tensor) else list(results)
    return cross(comms, lane, shown, crossings, flats)


def _only(side: Sequence[Tensor] | Tensor) -> Tensor | None:
    """The tensor of a side that has no more."""
    if isinstance(side, Tensor):
        return side
    return side[0] if len(side) == 1 else None


def _rows(comms: Comms, side: Sequence[Tensor] | Tensor) -> tuple[list[Tensor], list[Flat]]:
    """The tensors of one side as contiguous rows, and the tensors that the rows are parts of."""
    if isinstance(side, Tensor):
        whole = Flat(side)
        return list(whole.row.view(comms.world_size, -1)), [whole]
    flats = [Flat(each) for each in side]
    return [flat.row for flat in flats], flats


def cross(
    comms: Comms, lane: Lane, tensors: Sequence[Tensor], crossings: Sequence[Crossing],
    flats: Sequence[Flat],
) -> GroupWork:  # fmt: skip
    """Fetch, post and copy back each of ``crossings``; at the end copy ``flats`` back. ``tensors``
    are those of the work."""
    arrivals = [[lane.fetch(*pair) for pair in crossing.fetches] for crossing in crossings]
    posted: list[Sequence[Work]] = []
    for arrived, crossing in zip(arrivals, crossings, strict=True):
        for wait in arrived:
            wait()
        posted.append(crossing.post())

    def bring_back() -> None:
        for works, crossing in zip(posted, crossings, strict=True):
            for work in works:
                work.wait()
            for pair in crossing.puts:
                lane.put(*pair)
        lane.finish()
        for flat in flats:
            flat.copy_back()

    writes = any(crossing.puts for crossing in crossings)
    all_works = [work for works in posted for work in works]
    work = GroupWork(all_works, tensors, comms.completions, bring_back if writes else None)
    work.settles_itself = writes and any(map(is_elsewhere, tensors))
    return work


class Flat:
    """A tensor as a contiguous row on its device; a copy if the tensor is not contiguous."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.data  # a version counter of its own
        self.row = self._tensor.resolve_conj().resolve_neg().contiguous().view(-1)

    def copy_back(self) -> None:
        plain = not (self._tensor.is_conj() or self._tensor.is_neg())
        if not plain or self.row.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.row.view(self._tensor.shape))


def _cuts(comms: Comms, tensor: Tensor, parts: int) -> Iterator[tuple[int, int]]:
    """The (start, end) of each piece of ``parts`` tensors of this size; one piece for an empty
    tensor."""
    count = tensor.numel()
    is_cut = comms.has_devices and tensor.nbytes * parts > PIECE_BYTES
    length = max(1, PIECE_BYTES // tensor.element_size() // parts) if is_cut else count
    for start in range(0, max(1, count), max(1, length)):
        yield start, min(start + length, count)


def _nothing() -> None:
    return None


def check(tensor: Tensor, operation: str) -> None:
    """TypeError or ValueError, with the remedy, if ``tensor`` can't be communicated."""
    try:
        check_plain(tensor)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{operation}: {error}") from None
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{operation}: tensors of layout {tensor.layout} can't be communicated; "
            "use tensor.to_dense() (all_reduce takes sparse COO tensors as they are)"
        )


def on_host(tensor: Tensor) -> tuple[Array, bool]:
    """``tensor`` as a flat array, and whether the array shares its memory (else it is a copy)."""
    detached = tensor.detach() if tensor.requires_grad else tensor
    if detached.is_conj() or detached.is_neg():
        detached = detached.resolve_conj().resolve_neg()
    host = detached.cpu() if detached.device.type != "cpu" else detached
    is_shared = host is tensor or detached is host
    if not host.is_contiguous():
        host, is_shared = host.contiguous(), False
    if is_shared and (tensor.is_conj() or tensor.is_neg()):
        is_shared = False
    return as_array(host), is_shared


def as_array(host: Tensor) -> Array:
    """The memory of a contiguous host tensor as a flat array."""
    return memory_of(host, _ARRAYS.get(host.dtype, _BYTES))


def store(array: Array, tensor: Tensor) -> None:
    """Copy ``array``, a result of ``on_host``, back into ``tensor``."""
    tensor.data.copy_(as_tensor(array, tensor.dtype).view(tensor.shape))


def as_tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """The array's memory as a flat host tensor of ``dtype``."""
    if dtype in _PLAIN:
        return torch.from_numpy(array)
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array.view(np.uint8)).view(dtype)


def can_reduce(dtype: torch.dtype) -> bool:
    """Whether the engine can reduce tensors of ``dtype``; others it can only move."""
    return dtype in _ARRAYS


def check_pair(source: Tensor, output: Tensor, operation: str) -> None:
    """``check`` of both; TypeError unless they have one dtype."""
    check(source, operation)
    check(output, operation)
    if source.dtype != output.dtype:
        raise TypeError(
            f"{operation}: the input is {source.dtype}, the output {output.dtype}; "
            "both must have one dtype"
        )


def check_whole(
    whole: tuple[str, Tensor], part: tuple[str, Tensor], world_size: int, operation: str
) -> None:
    """ValueError unless ``whole`` has one ``part`` for each rank; both with their names."""
    (name, tensor), (of, one) = whole, part
    if tensor.numel() != one.numel() * world_size:
        raise ValueError(
            f"{operation}: the {name} must have {world_size} times the {of}'s {one.numel()} "
            f"elements, one part per rank; it has {tensor.numel()}"
        )


def check_number(tensors: Sequence[Tensor], world_size: int, operation: str, name: str) -> None:
    """ValueError unless a list has one tensor for each rank."""
    if len(tensors) != world_size:
        raise ValueError(
            f"{operation}: the {name} list has {len(tensors)} tensors; it needs one for each of "
            f"the {world_size} ranks"
        )


def check_parts(
    tensors: Sequence[Tensor], like: Tensor, world_size: int, operation: str, name: str
) -> None:
    """``check`` of all, and ``check_number``; ValueError or TypeError unless every tensor has the
    size and dtype of ``like``."""
    for tensor in (like, *tensors):
        check(tensor, operation)
    check_number(tensors, world_size, operation, name)
    for index, tensor in enumerate(tensors):
        if tensor.numel() != like.numel():
            raise ValueError(
                f"{operation}: tensor {index} of the list has {tensor.numel()} elements, but this "
                f"rank's own has {like.numel()}; all must have the same size (invalid tensor size)"
            )
        if tensor.dtype != like.dtype:
            raise TypeError(
                f"{operation}: tensor {index} of the list is {tensor.dtype}, but this rank's own "
                f"is {like.dtype}; all must have the same dtype (invalid tensor type)"
            )
