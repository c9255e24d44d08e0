"""The figures that a plan is made from, measured in the group that is to train."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from potluck.checkpoint.state import fingerprint
from potluck.compressors import Compressor
from potluck.torch.rehearsing import rehearse
from potluck.training.planner import METHODS, Measured

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_LONG_S = 0.5
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 25
_PINGS, _TRIES = 8, 2
_ARRAYS, _SAMPLE, _COLUMNS = 2, 6 << 20, 1024
"""Two arrays of a bucket's size, with the memory of a method more than a processor caches."""
_WAIT_S = 300.0


def measure(
    ctx: DistributedContext,
    shapes: tuple[tuple[int, ...], ...],
    compute_s: float,
    *,
    shares: Literal["equal", "proportional"] = "equal",
) -> Measured:
    """The figures of this group, with rehearsals. A collective call; takes half a minute, on slow
    links a minute."""
    latency_s, rate, crossing = _links(ctx) if ctx.world_size > 1 else (0.0, 0.0, 0.0)
    work = _Work(ctx, min(sum(map(math.prod, shapes)), _SAMPLE))
    encoding, decoding = work.methods()
    mine: dict[Any, float] = {
        "compute_s": compute_s,
        "latency_s": latency_s,
        "bytes_per_s": rate,
        "crossing": crossing,
        "copy_s": work.copy_s(),
        "hash_s": work.hash_s(),
        **{("encode", name): seconds for name, seconds in encoding.items()},
        **{("decode", name): seconds for name, seconds in decoding.items()},
    }
    gathered = ctx.all_gather(np.array([list(mine.values())]), timeout=_WAIT_S)
    of_ranks = dict(zip(mine, gathered.reshape(ctx.world_size, -1).T.tolist(), strict=True))
    has_links = ctx.world_size > 1
    found = Measured(
        compute_s=tuple(of_ranks["compute_s"]),
        latency_s=max(of_ranks["latency_s"]),
        bytes_per_s=tuple(of_ranks["bytes_per_s"]) if has_links else (),
        crossing_bytes_per_s=tuple(of_ranks["crossing"]) if has_links else (),
        nodes=tuple(member.node for member in ctx.members),
        shapes=shapes,
        encode_s={name: max(of_ranks["encode", name]) for name in encoding},
        decode_s={name: max(of_ranks["decode", name]) for name in decoding},
        copy_s=max(of_ranks["copy_s"]),
        hash_s=max(of_ranks["hash_s"]),
        shares=shares,
    )
    del work
    return rehearse(ctx, found)


def _links(ctx: DistributedContext) -> tuple[float, float, float]:
    """Latency in seconds, and bytes per second, of this rank's links to its neighbours in the ring:
    all ranks send to the right at the same time, then to the left, and the slower one counts. And
    the bytes per second with which all send to all."""
    right, left, others = (1,), (-1 % ctx.world_size,), tuple(range(1, ctx.world_size))
    latencies = []
    for steps in (right, left):
        _shift_s(ctx, 8, steps, 1)  # the links are made
        latencies.append(_shift_s(ctx, 8, steps, _PINGS) / _PINGS)
    rates = [_rate(ctx, steps) for steps in dict.fromkeys((right, left))]
    crossing = _rate(ctx, others) if len(others) > 1 else min(rates)
    return max(latencies), min(rates), crossing


def _rate(ctx: DistributedContext, steps: tuple[int, ...]) -> float:
    """Bytes per second by ``_shift_s``: of sizes that double until one takes long enough, the
    line through the least times of the largest and of a quarter of it, so that what a burst or the
    latency gives to both is in neither."""
    nbytes, least = _FIRST_BYTES, list[float]()
    while True:
        took = [_shift_s(ctx, nbytes, steps, 1) for _ in range(_TRIES)]
        longest = np.array([min(took)])
        ctx.all_reduce(longest, "max", timeout=_WAIT_S)
        least.append(min(took))
        if longest[0] >= _LONG_S or nbytes >= _MOST_BYTES:
            break
        nbytes *= 2
    if len(least) < 3:
        return nbytes / least[-1]
    return nbytes * 3 / 4 / max(least[-1] - least[-3], least[-1] / 4)


def _shift_s(ctx: DistributedContext, nbytes: int, steps: tuple[int, ...], times: int) -> float:
    """Seconds until this rank has sent ``nbytes``, in equal parts to the ranks that are ``steps``
    to its right, and has received as many, ``times`` times one after the other."""
    rank, world_size = ctx.rank, ctx.world_size
    out = np.zeros(-(-nbytes // len(steps)), np.uint8)
    parts = [(np.empty_like(out), (rank - step) % world_size) for step in steps]
    ctx.barrier(timeout=_WAIT_S)
    began = time.perf_counter()
    for _ in range(times):
        works = [ctx.recv(into, source, timeout=_WAIT_S, async_op=True) for into, source in parts]
        for step in steps:
            to = (rank + step) % world_size
            works.append(ctx.send(out, to, timeout=_WAIT_S, async_op=True))
        for work in works:
            work.wait()
    return time.perf_counter() - began


class _Work:
    """Seconds per float32 that this rank takes for its own work in a step, while all ranks do the
    same: they may share a processor. In arrays as large as buckets, for a step finds none of its
    gradients in a cache."""

    def __init__(self, ctx: DistributedContext, size: int) -> None:
        self._ctx = ctx
        columns = min(_COLUMNS, max(1, size))
        generator = np.random.default_rng(0)
        shape = (_ARRAYS, max(1, size // columns), columns)
        self._sources = generator.standard_normal(shape, np.float32)
        self._targets = np.zeros_like(self._sources)

    def methods(self) -> tuple[dict[str, float], dict[str, float]]:
        """To encode, and to decode, by method."""
        encoding, decoding = {}, {}
        for name, method in METHODS.items():
            encoding[name], decoding[name] = self._method(method)
        return encoding, decoding

    def copy_s(self) -> float:
        return self._each_s(lambda place: np.copyto(self._targets[place], self._sources[place]))

    def hash_s(self) -> float:
        return self._each_s(lambda place: fingerprint(self._sources[place]))

    def _method(self, method: Compressor) -> tuple[float, float]:
        residuals = np.zeros_like(self._sources)
        arrays = zip(self._sources, residuals, self._targets, strict=True)
        encode, decode = zip(*(method.halves(*each) for each in arrays), strict=True)
        encode_s = self._each_s(lambda place: encode[place]())
        return encode_s, self._each_s(lambda place: decode[place]())

    def _each_s(self, run: Callable[[int], object], times: int = 2) -> float:
        """Seconds per element of ``run`` for each array in turn, the least of ``times``."""
        if times > 1:
            run(0)
        least = math.inf
        for _ in range(times):
            self._ctx.barrier(timeout=_WAIT_S)
            began = time.perf_counter()
            for place in range(_ARRAYS):
                run(place)
            least = min(least, time.perf_counter() - began)
        return least / self._sources.size
