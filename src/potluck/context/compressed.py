"""The sum of compressed gradients over all ranks: the network's half of each strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from potluck.codecs.codec import Floats
from potluck.compressors import Random, Strategy
from potluck.compressors.encoded import Encoded

if TYPE_CHECKING:
    from potluck.context.context import DistributedContext


def start_compressed(
    ctx: DistributedContext,
    array: Floats,
    strategy: Strategy,
    residual: Floats | None,
    step: int,
) -> Callable[[], object]:
    """Start the sum of ``array`` over all ranks, in place; returns the function that waits for it.

    ``array`` and ``residual`` are flat, contiguous and of one length. All ranks end with the same
    bits. Cost: a codec's strategy is one all_reduce of encoded bytes; ``Random`` one all_reduce of
    the values that are sent; any other strategy one all_gather of the payload, whose size must
    follow from the number of elements.
    """
    if isinstance(strategy, Encoded):
        codec = strategy.codec.name
        coded = ctx.all_reduce(array, "sum", codec=codec, residual=residual, async_op=True)
        return lambda: coded.wait()
    if isinstance(strategy, Random):
        values = strategy.take(array, residual, step)
        work = ctx.all_reduce(values, "sum", async_op=True)
        return lambda: strategy.put(array, work.wait(), step)
    work = ctx.all_gather(strategy.compress(array, residual, step), async_op=True)
    return lambda: sum_payloads(array, work.wait().reshape(ctx.world_size, -1), strategy, step)


def sum_payloads(
    target: Floats, payloads: np.ndarray[tuple[int, int], np.dtype[np.uint8]], strategy: Strategy,
    step: int,
) -> None:  # fmt: skip
    """Set ``target`` to the sum of what the payloads of all ranks stand for, in rank order."""
    target[:] = 0
    for payload in payloads:
        strategy.add_to(target, payload, step)
