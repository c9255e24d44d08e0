"""Transfer of states between ranks: safetensors bytes in pieces, verified by a hash before use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from potluck.checkpoint.state import State, decode, digest, encode
from potluck.errors import CheckpointError

if TYPE_CHECKING:
    from potluck.context import DistributedContext

PIECE_BYTES = 4 << 20
MAX_STATE_BYTES = 1 << 42
MAX_OWN_BYTES = 1 << 30


def broadcast_state(ctx: DistributedContext, state: State, source: int, *, wanted: bool) -> State:
    """Broadcast the ``state`` of rank ``source``. Returns it on ranks with ``wanted``, else None.

    A collective call. Cost: one broadcast of the encoded state, for any number of receivers.
    CheckpointError if the received bytes do not have the hash of the sent ones.
    """
    is_source = ctx.rank == source
    header = np.zeros(40, np.uint8)
    data = bytearray(encode(state)) if is_source else bytearray()
    if is_source:
        header[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
        header[8:] = np.frombuffer(bytes.fromhex(digest(data)), np.uint8)
    ctx.broadcast(header, root=source)
    length = int.from_bytes(header[:8].tobytes(), "little")
    if length > MAX_STATE_BYTES:
        raise CheckpointError(f"rank {source} announces a state of {length} bytes")
    if wanted and not is_source:
        data = bytearray(length)
    whole = np.frombuffer(data, np.uint8) if data else None
    # A rank that does not want the state still forwards every piece.
    scratch = np.empty(min(length, PIECE_BYTES), np.uint8) if whole is None else None
    for start in range(0, length, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, length)
        piece = whole[start:stop] if whole is not None else scratch
        assert piece is not None
        ctx.broadcast(piece[: stop - start], root=source)
    if is_source:
        return state if wanted else None
    if not wanted:
        return None
    if digest(data) != header[8:].tobytes().hex():
        raise CheckpointError(f"the state from {ctx.group.describe(source)} arrived damaged")
    return decode(bytes(data))


def gather_states(ctx: DistributedContext, mine: State) -> list[State]:
    """Gather the ranks' own states on every rank, in rank order. For small states.

    A collective call. Cost: two all_gathers, of 8 bytes and of the bytes of the largest state per
    rank. CheckpointError if a state has more than 1 GiB.
    """
    data = np.frombuffer(encode(mine), np.uint8)
    lengths = ctx.all_gather(np.array([len(data)], np.int64)).reshape(-1)
    if lengths.min() < 0 or lengths.max() > MAX_OWN_BYTES:
        raise CheckpointError(f"ranks announce states of {lengths.tolist()} bytes of their own")
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(data)] = data
    rows = ctx.all_gather(padded)
    return [decode(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
