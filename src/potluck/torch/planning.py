"""The planner's measurements, inside the group that is to train, and the plan file of a script.

``potluck plan train.py`` runs the script with ``POTLUCK_PLAN`` set. Then its ElasticLoop takes a
few steps on each rank alone, measures the links, the methods and the memory of every machine,
reports all that, and ends the script.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from torch import nn

from potluck.checkpoint.state import fingerprint
from potluck.compressors import PowerSGD, TopK
from potluck.compressors.powersgd import LowRankSum
from potluck.system import usable_cpus
from potluck.training.plan_file import FACT, VARIABLE, plan_file
from potluck.training.planner import METHODS, Measured, encode, named
from potluck.training.strategies import DataParallel, DiLoCo, LocalSGD

if TYPE_CHECKING:
    from potluck.context import DistributedContext

NUM_STEPS = 5
_WARM_STEPS = 1
_LONG_S = 0.5
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 25
_PINGS, _TRIES = 8, 3
_ARRAYS, _SAMPLE, _COLUMNS = 2, 6 << 20, 1024
"""Two arrays of a bucket's size, with the memory of a method more than a processor caches."""
_WAIT_S = 300.0
_LOOKED_AT = 5
"""Steps, before anything is suggested."""
_LONG_STEP_S = 0.25

_log = logging.getLogger(__name__)


def is_planning() -> bool:
    """Whether this script is only measured."""
    return bool(os.environ.get(VARIABLE))


def planned(ctx: DistributedContext) -> DataParallel | LocalSGD | DiLoCo:
    """What ``strategy="auto"`` means for the script of this process: the choice in its plan file.

    ValueError, with the command that makes one, if there is none and this is no world of one.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    path = None if script is None else plan_file(script)
    if path is None or not path.is_file():
        if ctx.world_size == 1 and not ctx.elastic:
            return DataParallel()  # nothing is sent
        name = "SCRIPT" if script is None else Path(script).name
        raise ValueError(
            f'strategy="auto" takes the strategy of a plan, and there is no '
            f"{'plan file' if path is None else path.name}: make one with `potluck plan {name}`"
        )
    try:
        return named(msgspec.json.decode(path.read_bytes())["choice"]).strategy
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path.name} is no plan ({error}): make it anew with `potluck plan`"
        ) from None


class Suggestion:
    """Says once that steps wait for the network, where a plan would help. It changes nothing."""

    def __init__(self, ctx: DistributedContext) -> None:
        self._ctx = ctx
        self._steps: list[tuple[float, float]] = []

    def add(self, step_s: float, waited_s: float) -> None:
        """A step, of which this rank has waited ``waited_s``, is committed."""
        if len(self._steps) == _LOOKED_AT:
            return
        self._steps.append((step_s, waited_s))
        if len(self._steps) < _LOOKED_AT or self._ctx.rank != 0:
            return
        step_s, waited_s = (statistics.median(each) for each in zip(*self._steps, strict=True))
        several = len({member.node for member in self._ctx.members}) > 1
        if several and step_s >= _LONG_STEP_S and waited_s > step_s / 2:
            _log.warning(
                "a step takes %.1f s, and %.0f%% of that is waiting for other machines: "
                "`potluck plan` says which strategy sends less, and what it changes",
                step_s,
                waited_s / step_s * 100,
            )


class Rehearsal:
    """The steps of a script that is only measured."""

    def __init__(self, ctx: DistributedContext, model: nn.Module) -> None:
        self._ctx, self._model = ctx, model
        self._times: list[float] = []
        self._began = self._waited_s = 0.0

    def begin(self) -> None:
        """A step begins, with the loading of its samples."""
        self._began, self._waited_s = time.perf_counter(), self._ctx.waited_s

    def end(self) -> bool:
        """The step has ended; whether these were enough."""
        waited_s = self._ctx.waited_s - self._waited_s
        self._times.append(max(1e-6, time.perf_counter() - self._began - waited_s))
        return len(self._times) >= NUM_STEPS

    def finish(self) -> None:
        """Measure all else, report it, and end the script. A collective call."""
        steps = self._times[_WARM_STEPS:] or self._times or [1e-6]
        shapes = tuple(tuple(p.shape) for p in self._model.parameters() if p.requires_grad)
        measured = measure(self._ctx, shapes, statistics.median(steps))
        if self._ctx.rank == 0:
            self._ctx.report(**{FACT: encode(measured)})
        raise SystemExit(0)


def measure(
    ctx: DistributedContext,
    shapes: tuple[tuple[int, ...], ...],
    compute_s: float,
    processors: float | None = None,
) -> Measured:
    """The figures of this group. A collective call; takes some seconds, on slow links more.

    ``processors`` is how many a rank has to itself, where the default is wrong: those of its node,
    divided among the node's workers.
    """
    if processors is None:
        here = ctx.members[ctx.rank].node
        processors = len(usable_cpus()) / sum(each.node == here for each in ctx.members)
    latency_s, rate, crossing = _links(ctx) if ctx.world_size > 1 else (0.0, 0.0, 0.0)
    work = _Work(min(sum(map(math.prod, shapes)), _SAMPLE), processors)
    encoding, decoding = work.methods()
    mine: dict[Any, float] = {
        "compute_s": compute_s,
        "latency_s": latency_s,
        "bytes_per_s": rate,
        "crossing": crossing,
        "copy_s": work.copy_s(),
        "hash_s": work.hash_s(),
        "processors": processors,
        **{("encode", name): seconds for name, seconds in encoding.items()},
        **{("decode", name): seconds for name, seconds in decoding.items()},
    }
    gathered = ctx.all_gather(np.array([list(mine.values())]), timeout=_WAIT_S)
    of_ranks = dict(zip(mine, gathered.reshape(ctx.world_size, -1).T.tolist(), strict=True))
    has_links = ctx.world_size > 1
    return Measured(
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
        processors=min(of_ranks["processors"]),
    )


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
    """Seconds per float32 that this rank takes for its own work in a step, in arrays as large as
    buckets: a step finds none of its gradients in a cache. By the processor's time, which other
    programs do not change, on this rank's part of the processors."""

    def __init__(self, size: int, processors: float) -> None:
        self._processors = processors
        columns = min(_COLUMNS, max(1, size))
        generator = np.random.default_rng(0)
        shape = (_ARRAYS, max(1, size // columns), columns)
        self._sources = generator.standard_normal(shape, np.float32)
        self._targets = np.zeros_like(self._sources)

    def methods(self) -> tuple[dict[str, float], dict[str, float]]:
        """To encode, and to decode, by method."""
        encoding, decoding = {}, {}
        for name, method in METHODS.items():
            each = self._low_rank if isinstance(method, PowerSGD) else self._method
            encoding[name], decoding[name] = each(method)
        return encoding, decoding

    def copy_s(self) -> float:
        return self._each_s(lambda place: np.copyto(self._targets[place], self._sources[place]))

    def hash_s(self) -> float:
        return self._each_s(lambda place: fingerprint(self._sources[place]))

    def _method(self, method: Any) -> tuple[float, float]:
        residuals = np.zeros_like(self._sources)
        payloads: list[Any] = [None] * _ARRAYS

        def encode(place: int) -> None:
            source, residual = self._sources[place].reshape(-1), residuals[place].reshape(-1)
            payloads[place] = method.compress(source, residual, 0)

        def decode(place: int) -> None:
            target = self._targets[place].reshape(-1)
            if isinstance(method, TopK):
                method.add_to(target, payloads[place], 0)
            else:
                method.decompress(payloads[place], target.shape, 0)

        return self._each_s(encode), self._each_s(decode)

    def _low_rank(self, method: Any) -> tuple[float, float]:
        """One iteration, as in a step, between the sums over the ranks."""
        sums: list[Any] = [None] * _ARRAYS

        def begin(place: int) -> None:
            sums[place] = LowRankSum(method, {}, 0)
            sums[place].add("sample", self._sources[place])
            sums[place].begin()

        def end(place: int) -> None:
            sums[place].turn()
            sums[place].lose()
            sums[place].decode("sample", self._targets[place])

        encode_s, decode_s = self._each_s(begin, 1), self._each_s(end, 1)
        return encode_s, decode_s

    def _each_s(self, run: Callable[[int], object], times: int = 2) -> float:
        """Seconds per element of ``run`` for each array in turn, the mean of ``times``."""
        if times > 1:
            run(0)
        thread_s, all_s = -time.thread_time(), -time.process_time()
        for _ in range(times):
            for place in range(_ARRAYS):
                run(place)
        thread_s, all_s = thread_s + time.thread_time(), all_s + time.process_time()
        return max(thread_s, all_s / self._processors) / (times * self._sources.size)
