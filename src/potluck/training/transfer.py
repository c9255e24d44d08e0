"""State transfer between ranks: safetensors bytes in pieces, verified by a hash before use.

The safetensors head is sent first: the names, dtypes and shapes of the tensors. A receiver checks
it against the tensors and the size that it expects before it allocates memory for the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from potluck.checkpoint.state import (
    Spec,
    State,
    decode,
    digest,
    encode,
    head_bytes,
    specs,
    specs_in,
)
from potluck.errors import CheckpointError

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

PIECE_BYTES = 4 << 20
MAX_HEAD_BYTES = 100_000_000
"""The limit of safetensors itself."""

MAX_STATE_BYTES = 1 << 30
"""Bytes that a received state may take beyond the multiple of the receiver's own state."""

MAX_OWN_BYTES = 1 << 30
"""Bytes of all ranks' own states together, which each rank gathers."""

_OWN_TIMES = 8
"""A received state may be this many times the receiver's own: 8 for Adam with master weights and
moments in float32, when the receiver has the weights in 16 bits only."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A receiver's conditions for a state, checked against its head.

    The state must have the tensors of ``fixed``, with the same names, dtypes and shapes. All its
    tensors together may take 8 times the bytes of ``own``, the receiver's present state, plus
    ``max_bytes``.
    """

    own: State = None
    fixed: State = None
    max_bytes: int = MAX_STATE_BYTES

    def check(self, theirs: dict[str, Spec], sender: str) -> None:
        """CheckpointError, with the first difference, unless ``theirs`` fits."""
        for name, spec in sorted(specs(self.fixed).items()):
            if theirs.get(name) != spec:
                raise CheckpointError(
                    f"the state of {sender} belongs to another model: {name!r} is "
                    f"{theirs.get(name, 'missing')} there, {spec} here; give every rank the same "
                    "model"
                )
        own = sum(spec.nbytes for spec in specs(self.own).values())
        nbytes = sum(spec.nbytes for spec in theirs.values())
        if nbytes > _OWN_TIMES * own + self.max_bytes:
            raise CheckpointError(
                f"{sender} announces a state of {nbytes} bytes; this rank, whose own state has "
                f"{own} bytes, takes {_OWN_TIMES} times that and {self.max_bytes} bytes "
                "(max_state_bytes of the Policy)"
            )


def broadcast_state(
    ctx: DistributedContext,
    state: State,
    source: int,
    *,
    wanted: bool,
    expected: Expected | None = None,
) -> State:
    """Broadcast the ``state`` of rank ``source``. Returns it on ranks with ``wanted``, else None.

    A collective call. Cost: one broadcast of the encoded state, for any number of receivers.
    CheckpointError if the head is not as ``expected``, before memory is allocated for the tensors,
    or if the received bytes do not have the sender's hash.
    """
    is_source = ctx.rank == source
    data = bytearray(encode(state)) if is_source else bytearray()
    head_length = head_bytes(data) if is_source else 0
    header = np.zeros(48, np.uint8)
    if is_source:
        lengths = len(data).to_bytes(8, "little") + head_length.to_bytes(8, "little")
        header[:] = np.frombuffer(lengths + bytes.fromhex(digest(data)), np.uint8)
    ctx.broadcast(header, root=source)
    length = int.from_bytes(header[:8].tobytes(), "little")
    head_length = int.from_bytes(header[8:16].tobytes(), "little")
    sender = ctx.group.describe(source)
    if not 8 <= head_length <= min(length, MAX_HEAD_BYTES):
        raise CheckpointError(f"{sender} announces a state with a head of {head_length} bytes")
    is_receiver = wanted and not is_source
    if is_receiver:
        data = bytearray(head_length)
    _broadcast(ctx, source, data, 0, head_length)
    if is_receiver:
        theirs = specs_in(data)
        if head_length + sum(spec.nbytes for spec in theirs.values()) != length:
            raise CheckpointError(f"the state of {sender} has {length} bytes, its head says other")
        (expected or Expected()).check(theirs, sender)
        head, data = data, bytearray(length)
        data[:head_length] = head
    _broadcast(ctx, source, data, head_length, length)
    if is_source:
        return state if wanted else None
    if not wanted:
        return None
    if digest(data) != header[16:].tobytes().hex():
        raise CheckpointError(f"the state from {sender} arrived damaged")
    return decode(bytes(data))


def _broadcast(
    ctx: DistributedContext, source: int, data: bytearray, start: int, stop: int
) -> None:
    """Broadcast the bytes from ``start`` to ``stop`` of ``data`` in pieces. A rank without ``data``
    forwards the pieces, and keeps none."""
    whole = np.frombuffer(data, np.uint8) if data else None
    scratch = np.empty(min(stop - start, PIECE_BYTES), np.uint8) if whole is None else None
    for at in range(start, stop, PIECE_BYTES):
        until = min(at + PIECE_BYTES, stop)
        piece = whole[at:until] if whole is not None else scratch
        assert piece is not None
        ctx.broadcast(piece[: until - at], root=source)


def gather_numbers(
    ctx: DistributedContext, mine: Mapping[str, Any], **options: Any
) -> NDArray[Any]:
    """Gather numbers and sequences of numbers, by name, on every rank: a structured array of
    float64 with a record for each rank, in rank order.

    A collective call, with the same names and lengths on all ranks and the ``options`` of
    ``all_gather``. Cost: one all_gather of 8 bytes per number and rank.
    """
    sent = np.hstack([np.asarray(each, np.float64) for each in mine.values()])
    record = np.dtype([(name, np.float64, np.shape(each)) for name, each in mine.items()])
    rows: NDArray[Any] = ctx.all_gather(sent, **options).reshape(-1).view(record)
    return rows


def gather_states(ctx: DistributedContext, mine: State) -> list[State]:
    """Gather the ranks' own states on every rank, in rank order. For small states.

    A collective call. Cost: two all_gathers, of 8 bytes and of the bytes of the largest state per
    rank. CheckpointError if the states would take more than 1 GiB on a rank.
    """
    data = np.frombuffer(encode(mine), np.uint8)
    lengths = ctx.all_gather(np.array([len(data)], np.int64)).reshape(-1)
    largest = int(lengths.max())
    if lengths.min() < 0 or largest * ctx.world_size > MAX_OWN_BYTES:
        raise CheckpointError(
            f"{ctx.group.describe(int(lengths.argmax()))} announces a state of {largest} bytes of "
            f"its own; those of {ctx.world_size} ranks may take {MAX_OWN_BYTES}"
        )
    padded = np.zeros(largest, np.uint8)
    padded[: len(data)] = data
    rows = ctx.all_gather(padded)
    return [decode(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
