"""States between ranks: safetensors bytes in pieces, hash-checked before use."""

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
    """``source``'s ``state``, on every rank that has ``wanted`` it; None on the others.

    Every rank of the group must call it. Costs one broadcast of the encoded state, however many
    ranks want it. Raises CheckpointError if what arrived is not what was sent.
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
    # A rank that wants nothing still passes every piece on to its neighbours.
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
        raise CheckpointError(f"the state from rank {source} arrived damaged")
    return decode(bytes(data))


def gather_states(ctx: DistributedContext, mine: State) -> list[State]:
    """Every rank's own state, in rank order, on every rank; meant for small ones.

    Every rank of the group must call it. Costs two all_gathers: of 8 bytes, and of as many bytes
    per rank as the largest state takes.
    """
    data = np.frombuffer(encode(mine), np.uint8)
    lengths = ctx.all_gather(np.array([len(data)], np.int64)).reshape(-1)
    if lengths.min() < 0 or lengths.max() > MAX_OWN_BYTES:
        raise CheckpointError(f"ranks announce states of {lengths.tolist()} bytes of their own")
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(data)] = data
    rows = ctx.all_gather(padded)
    return [decode(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
