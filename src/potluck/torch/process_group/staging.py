"""Tensors on accelerators, through (pinned) host memory, in pieces that overlap.

While piece ``k`` is on the network, piece ``k + 1`` is on its way from the device, and results go
back as they come. Where one rank has an accelerator all ranks cut alike, whatever their own tensors
are on, for each piece is a collective of its own. Pieces are posted by the calling thread, in
order, so operations keep their order too; it returns once the last piece has left the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from potluck.engine.layout import Array
from potluck.engine.work import Work
from potluck.torch.process_group import buffers
from potluck.torch.process_group.seat import Seat
from potluck.torch.process_group.work import GroupWork

PIECE_BYTES = 4 << 20


class Lane(Protocol):
    """How pieces cross between one device and the host."""

    def room(self, piece: Tensor) -> Tensor:
        """Host memory for a piece."""

    def fetch(self, piece: Tensor, host: Tensor) -> Callable[[], None]:
        """Start copying to the host; the result waits until it is there."""

    def put(self, host: Tensor, piece: Tensor) -> None:
        """Start copying back."""

    def finish(self) -> None:
        """Wait until everything put is in place."""


class PlainLane:
    """Any device (MPS has no streams to order copies by): each copy is done when it returns."""

    def room(self, piece: Tensor) -> Tensor:
        return torch.empty(piece.shape, dtype=piece.dtype)

    def fetch(self, piece: Tensor, host: Tensor) -> Callable[[], None]:
        host.copy_(piece)
        return _nothing

    def put(self, host: Tensor, piece: Tensor) -> None:
        piece.copy_(host)

    def finish(self) -> None:
        return None


class CudaLane:
    """Pinned memory and a stream of its own, which begins after what the caller has queued."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def room(self, piece: Tensor) -> Tensor:
        return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)

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

    def finish(self) -> None:
        # Whoever waits may be on another thread and stream than the caller: done means done.
        self._stream.synchronize()


def lane_for(tensor: Tensor) -> Lane:
    return CudaLane(tensor.device) if tensor.device.type == "cuda" else PlainLane()


def is_staged(seat: Seat, tensor: Tensor) -> bool:
    """Whether this operation is cut; the same on all ranks for tensors of one size."""
    return seat.has_devices and tensor.nbytes > PIECE_BYTES


def in_pieces(
    seat: Seat,
    tensor: Tensor,
    post: Callable[[Array], Work],
    *,
    reads: bool = True,
    writes: bool = True,
    lane: Lane | None = None,
) -> GroupWork:
    """``post`` for each piece of ``tensor``, in place.

    ``reads``: this rank's values matter, so they are fetched; ``writes``: it gets a result.
    """
    detached = tensor.detach()
    flat = detached.contiguous().view(-1)
    if lane is None and tensor.device.type == "cpu":
        works = [post(buffers.as_array(piece)) for piece in _pieces(flat)]
        copies = writes and flat.data_ptr() != detached.data_ptr()
        settle = (lambda: _copy(flat, detached)) if copies else None
        return GroupWork(works, [tensor], seat.completions, settle)
    used = lane or lane_for(tensor)
    pieces = list(_pieces(flat))
    hosts = [used.room(piece) for piece in pieces]
    arrivals = [
        used.fetch(piece, host) if reads else _nothing
        for piece, host in zip(pieces, hosts, strict=True)
    ]
    works = []
    for arrived, host in zip(arrivals, hosts, strict=True):
        arrived()
        works.append(post(buffers.as_array(host)))

    def bring_back() -> None:
        for work, host, piece in zip(works, hosts, pieces, strict=True):
            work.wait()
            used.put(host, piece)
        used.finish()
        if flat.data_ptr() != detached.data_ptr():
            _copy(flat, detached)

    work = GroupWork(works, [tensor], seat.completions, bring_back if writes else None)
    work.settles_itself = writes
    return work


def _pieces(flat: Tensor) -> Iterator[Tensor]:
    length = max(1, PIECE_BYTES // flat.element_size())
    return iter(torch.split(flat, length))


def _copy(flat: Tensor, tensor: Tensor) -> None:
    tensor.copy_(flat.view(tensor.shape))


def _nothing() -> None:
    return None
