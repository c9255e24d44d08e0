"""Sums in fewer bytes over a context: the collectives that compressors take, and all_reduce with a
registered codec."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from potluck._core.checks import Duration
from potluck._core.codecs import Codec, check_dtype, digest_of
from potluck._core.codecs.codec import Bytes, Floats
from potluck._core.engine.arrays.layout import bounds
from potluck._core.engine.arrays.reduction import divide, scale_of
from potluck._core.engine.work import Work, finished
from potluck._core.types import ReduceOp
from potluck.compressors.base import Array, Coded, Pending
from potluck.errors import Desync

_HEAD = 8


class OverContext:
    """The collectives of a DistributedContext, as compressors take them
    (``compressors.base.Collectives``). ``timeout``: seconds for each, None for the context's."""

    divisor = 1

    def __init__(self, ctx: Any, timeout: float | None = None) -> None:
        self._ctx = ctx
        self._how: dict[str, Any] = {"timeout": timeout, "async_op": True}
        self.world_size: int = ctx.world_size

    def all_reduce(self, array: Array) -> Pending:
        work: Pending = self._ctx.all_reduce(array, "sum", **self._how)
        return work

    def all_reduce_encoded(
        self, array: Array, compressor: Coded, residual: Array | None
    ) -> Pending:
        codec = compressor.codec.name
        how = self._how | {"codec": codec, "residual": residual}
        work: Pending = self._ctx.all_reduce(array, "sum", **how)
        return work

    def all_gather(self, payload: Array) -> Pending:
        work: Pending = self._ctx.all_gather(payload, **self._how)
        return work


class Bytewise(Protocol):
    """What is needed of a context."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_to_all(
        self, array: Any, *, timeout: Duration | None = None, async_op: bool = False
    ) -> Any: ...

    def all_gather(self, array: Any, *, timeout: Duration | None = None) -> Any: ...


def start_own(
    ctx: Bytewise,
    array: NDArray[Any],
    op: ReduceOp,
    codec: Codec,
    residual: NDArray[Any] | None,
    timeout: Duration | None,
) -> Work:
    """Begin the all_reduce of ``array``, in place, by a registered codec, in Python and from
    collectives of bytes. The second half starts when it is waited for, so all ranks must wait for
    such calls in the same order.

    The plan is the direct one of ``engine/arrays/coding.py``: each rank sends every other rank its
    part of the array encoded (all_to_all), adds the parts that come in rank order to its own, and
    sends the sum encoded to all (all_gather); of a mean, the mean. A value is encoded twice
    whatever the world size, and all ranks decode the same bytes. A digest of the codec stands
    before the bytes of a part.

    Desync if ranks have other codecs of this name. TypeError unless ``array`` is float32,
    ValueError for another op than sum and mean, or a residual of another size or dtype.
    """
    check_dtype(codec, array.dtype)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"codec={codec.name!r} adds what it decodes: op must be sum or mean, not {op}"
        )
    if residual is not None and (residual.dtype != np.float32 or residual.size != array.size):
        raise ValueError(
            f"all_reduce: the residual holds one float32 for each of the {array.size} elements, "
            f"not {residual.size} of {residual.dtype}"
        )
    world, rank = ctx.world_size, ctx.rank
    if world == 1:
        return finished(f"all_reduce(codec {codec.name})", array)
    flat: Floats = array.reshape(-1)
    edges = [bounds(flat.size, world, part) for part in range(world)]
    parts = [flat[begin:end] for begin, end in edges]
    owed = [None if residual is None else residual.reshape(-1)[a:b] for a, b in edges]
    width = _HEAD + max(codec.encoded_bytes(part.size) for part in parts)
    head = np.frombuffer(digest_of(codec), np.uint8)

    is_mean = op is ReduceOp.MEAN
    scale = scale_of(np.dtype(np.float32), world) if is_mean else 1.0
    """What the terms of a mean are divided by, so that no sum overflows."""

    def encode(into: Bytes, part: Floats, lost: Floats | None) -> None:
        into[:_HEAD] = head
        encoded = into[_HEAD : _HEAD + codec.encoded_bytes(part.size)]
        if lost is None:
            codec.encode(encoded, part)
        else:
            codec.encode_with_residual(encoded, lost, part)

    def decoded(row: Bytes, sender: int, target: Floats) -> Bytes:
        if not np.array_equal(row[:_HEAD], head):
            raise Desync(
                f"rank {sender} has another codec {codec.name!r} than rank {rank}: register the "
                "same one on all ranks",
                rank=sender,
                operation=f"all_reduce(codec {codec.name})",
            )
        return row[_HEAD : _HEAD + codec.encoded_bytes(target.size)]

    sent = np.zeros((world, width), np.uint8)
    sent[:, :_HEAD] = head
    for peer in range(world):
        if peer != rank:
            encode(sent[peer], parts[peer], owed[peer])
    work: Work = ctx.all_to_all(sent, timeout=timeout, async_op=True)

    def finish(received: NDArray[np.uint8]) -> NDArray[Any]:
        own, lost = parts[rank], owed[rank]
        divide(own, scale)
        for peer in range(world):
            if peer == rank:
                continue
            row = decoded(received[peer], peer, own)
            if is_mean:
                term = np.empty_like(own)
                codec.decode(term, row)
                divide(term, scale)
                np.add(own, term, out=own)
            else:
                codec.decode_accumulate(own, row)
        mine = np.zeros(width, np.uint8)
        if is_mean:
            divide(own, world / scale)
            if lost is not None:  # in the units of the mean, while it is encoded
                divide(lost, world)
        encode(mine, own, lost)
        if is_mean and lost is not None:
            divide(lost, 1 / world)
        rows = ctx.all_gather(mine, timeout=timeout)
        for peer, part in enumerate(parts):
            codec.decode(part, decoded(rows[peer], peer, part))
        return array

    return work.then(finish)
