"""Staging: operations on tensors of accelerators, through (pinned) host memory, in pieces.

An operation is split into several collectives, each on a piece of every tensor. While piece ``k``
is on the network, piece ``k + 1`` is copied from the device, and results are copied back as they
arrive. If any rank has an accelerator, all ranks split alike, also those with tensors on the CPU.
The calling thread posts the pieces in order, so operations keep their order; it returns when the
last piece has left the device. Messages (send, recv, and those of all_to_all) are not split,
because a receiver may not know the sender of the next message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.work import Work
from potluck.torch.process_group import buffers
from potluck.torch.process_group.comms import Comms
from potluck.torch.process_group.work import GroupWork

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

    A tensor in host memory is used in place.
    """

    def room(self, pieces: Sequence[Tensor]) -> Tensor:
        if len(pieces) == 1 and pieces[0].device.type == "cpu":
            return pieces[0].view(1, -1)
        return torch.empty(len(pieces), pieces[0].numel(), dtype=pieces[0].dtype)

    def fetch(self, piece: Tensor, host: Tensor) -> Callable[[], None]:
        if host.data_ptr() != piece.data_ptr():
            host.copy_(piece)
        return _nothing

    def put(self, host: Tensor, piece: Tensor) -> None:
        if host.data_ptr() != piece.data_ptr():
            piece.copy_(host)

    def finish(self) -> None:
        return None


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


def sent(comms: Comms, tensor: Tensor, post: Callable[[Array], Work]) -> GroupWork:
    """Send a tensor of a device as one message."""
    return _message(comms, tensor, post, reads=True)


def received(comms: Comms, tensor: Tensor, post: Callable[[Array], Work]) -> GroupWork:
    """Receive one message into a tensor of a device."""
    return _message(comms, tensor, post, reads=False)


def _message(
    comms: Comms, tensor: Tensor, post: Callable[[Array], Work], *, reads: bool
) -> GroupWork:
    lane, flat = lane_for(tensor), Flat(tensor)
    host = lane.room([flat.row])
    crossing = Crossing(
        [(flat.row, host[0])] if reads else [],
        lambda: [post(buffers.as_array(host))],
        [] if reads else [(host[0], flat.row)],
    )
    return cross(comms, lane, [tensor], [crossing], [] if reads else [flat])


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether the tensor is on another device than the CPU."""
    return tensor.device.type != "cpu"


def is_staged(comms: Comms, tensor: Tensor, parts: int = 1) -> bool:
    """Whether an operation on ``parts`` tensors of the size of ``tensor`` is staged.

    Equal on all ranks for large tensors, which are split; small tensors are one piece.
    """
    return is_elsewhere(tensor) or (comms.has_devices and tensor.nbytes * parts > PIECE_BYTES)


def cross(
    comms: Comms, lane: Lane, tensors: Sequence[Tensor], crossings: Sequence[Crossing],
    flats: Sequence[Flat] = (),
) -> GroupWork:  # fmt: skip
    """Fetch, post and copy back each of ``crossings``; at the end copy ``flats`` back."""
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
    work.settles_itself = writes
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


def in_pieces(
    comms: Comms,
    tensor: Tensor,
    post: Callable[[Array], Work],
    *,
    reads: bool = True,
    writes: bool = True,
) -> GroupWork:
    """Stage an operation in place: ``post`` is called for each piece of ``tensor``.

    ``reads``: the operation uses this rank's values; ``writes``: this rank gets a result.
    """
    lane, flat = lane_for(tensor), Flat(tensor)
    crossings = []
    for start, end in _cuts(comms, tensor, 1):
        piece = flat.row[start:end]
        host = lane.room([piece])
        crossings.append(
            Crossing(
                [(piece, host[0])] if reads else [],
                lambda host=host: [post(buffers.as_array(host))],  # type: ignore[misc]
                [(host[0], piece)] if writes else [],
            )
        )
    return cross(comms, lane, [tensor], crossings, [flat] if writes else [])


def in_columns(
    comms: Comms,
    sources: Sequence[Tensor],
    results: Sequence[Tensor],
    post: Callable[[Array, Array], Work],
    *,
    world_parts: int,
    tensors: Sequence[Tensor] | None = None,
    wholes: Sequence[Flat] = (),
) -> GroupWork:
    """Stage an operation: ``post(source, result)`` is called for each piece of all tensors.

    ``sources`` and ``results`` have equal sizes. The arrays of ``post`` hold the same piece of all
    sources or results, concatenated, and are empty if this rank has none. ``tensors`` are the
    tensors of the work, by default the results; ``wholes`` are copied back last.
    """
    first = (*sources, *results)[0]
    lane = lane_for(first)
    given, made = [Flat(each) for each in sources], [Flat(each) for each in results]
    crossings = []
    for start, end in _cuts(comms, first, world_parts):
        reads = [flat.row[start:end] for flat in given]
        writes = [flat.row[start:end] for flat in made]
        source = lane.room(reads) if reads else first.new_empty(0, device="cpu")
        result = lane.room(writes) if writes else first.new_empty(0, device="cpu")
        crossings.append(
            Crossing(
                list(zip(reads, source, strict=True)) if reads else [],
                lambda s=source, r=result: [post(buffers.as_array(s), buffers.as_array(r))],  # type: ignore[misc]
                list(zip(result, writes, strict=True)) if writes else [],
            )
        )
    shown = list(results if tensors is None else tensors)
    return cross(comms, lane, shown, crossings, [*made, *wholes])


def _cuts(comms: Comms, tensor: Tensor, parts: int) -> Iterator[tuple[int, int]]:
    """The (start, end) of each piece of a tensor; one piece for an empty tensor."""
    count = tensor.numel()
    is_cut = comms.has_devices and tensor.nbytes * parts > PIECE_BYTES
    length = max(1, PIECE_BYTES // tensor.element_size() // parts) if is_cut else count
    for start in range(0, max(1, count), max(1, length)):
        yield start, min(start + length, count)


def _nothing() -> None:
    return None
