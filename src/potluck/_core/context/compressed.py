"""The sum of compressed gradients over all ranks: the network's half of each compressor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from potluck.compressors import Compressor, Random
from potluck.compressors.base import Array, compress_any
from potluck.compressors.encoded import Encoded
from potluck.compressors.powersgd import LowRankSum

if TYPE_CHECKING:
    from potluck._core.context.context import DistributedContext


def start_compressed(
    ctx: DistributedContext,
    array: Array,
    compressor: Compressor,
    residual: Array | None,
    step: int,
    *,
    timeout: float | None = None,
) -> Callable[[], object]:
    """Start the sum of ``array`` over all ranks, in place; returns the function that waits for it.

    ``array`` and ``residual`` are flat, contiguous, of one length and one dtype: float32, or
    float64 for compressors without a codec. All ranks end with the same bits. Cost: a codec's
    compressor is one all_reduce of encoded bytes; ``Random`` one all_reduce of the values that are
    sent; any other compressor one all_gather of the payload, whose size must follow from the number
    of elements.
    """
    if isinstance(compressor, Encoded):
        codec = compressor.codec.name
        coded = ctx.all_reduce(
            array, "sum", codec=codec, residual=residual, timeout=timeout, async_op=True
        )
        return lambda: coded.wait()
    if isinstance(compressor, Random):
        values = compressor.take(array, residual, step)
        work = ctx.all_reduce(values, "sum", timeout=timeout, async_op=True)
        return lambda: compressor.put(array, work.wait(), step)
    payload, _ = compress_any(compressor, array, residual, step)
    work = ctx.all_gather(payload, timeout=timeout, async_op=True)
    return lambda: sum_payloads(array, work.wait().reshape(ctx.world_size, -1), compressor, step)


def sum_payloads(
    target: Array,
    payloads: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    compressor: Compressor,
    step: int,
) -> None:
    """Set ``target`` to the sum of what the payloads of all ranks stand for, in rank order."""
    target[:] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for payload in payloads:
            compressor.add_to(target, payload, step)


def start_low_rank(
    ctx: DistributedContext, sums: Sequence[LowRankSum], *, error_feedback: bool
) -> Callable[[], None]:
    """Start the sums over all ranks of PowerSGD's matrices; returns the function that waits, after
    which they can be decoded, and with ``error_feedback`` their matrices hold the residuals.

    Cost: for each of ``sums`` two all_reduces, the second while the residuals are computed. Ranks
    must wait in the same place of their order of calls, for that is where the second starts.
    """
    first = [ctx.all_reduce(each.begin(), "sum", async_op=True) for each in sums]

    def finish() -> None:
        second = []
        for each, work in zip(sums, first, strict=True):
            work.wait()
            second.append(ctx.all_reduce(each.turn(), "sum", async_op=True))
        for each in sums if error_feedback else ():
            each.lose()
        for work in second:
            work.wait()

    return finish
