"""The planner's measurements, inside the group that is to train, and the plan file of a script.

``potluck plan train.py`` runs the script with ``POTLUCK_PLAN`` set. Then its ElasticLoop takes a
few steps on each rank alone, measures the links, the methods and the memory of every machine,
reports all that, and ends the script.
"""

from __future__ import annotations

import logging
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

from potluck.compressors import GradientCompressor, Strategy
from potluck.training.plan_file import FACT, VARIABLE, plan_file
from potluck.training.planner import METHODS, Measured, encode, named
from potluck.training.strategies import DataParallel, DiLoCo, LocalSGD

if TYPE_CHECKING:
    from potluck.context import DistributedContext

NUM_STEPS = 5
_WARM_STEPS = 1
_LONG_S = 1.0
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 25
_PINGS, _TRIES = 8, 2
_SAMPLE = (1024, 1024)
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
    ctx: DistributedContext, shapes: tuple[tuple[int, ...], ...], compute_s: float
) -> Measured:
    """The figures of this group. A collective call; takes some seconds, on slow links more."""
    latency_s, rate = _links(ctx) if ctx.world_size > 1 else (0.0, 0.0)
    encoding, decoding = _methods()
    mine = [compute_s, latency_s, rate, _copy_s(), *encoding.values(), *decoding.values()]
    rows = ctx.all_gather(np.array([mine])).reshape(ctx.world_size, -1)
    slowest = rows.max(axis=0)
    count = len(encoding)
    return Measured(
        compute_s=tuple(rows[:, 0].tolist()),
        latency_s=float(slowest[1]),
        bytes_per_s=tuple(rows[:, 2].tolist()) if ctx.world_size > 1 else (),
        nodes=tuple(member.node for member in ctx.members),
        shapes=shapes,
        encode_s=dict(zip(encoding, slowest[4 : 4 + count].tolist(), strict=True)),
        decode_s=dict(zip(decoding, slowest[4 + count :].tolist(), strict=True)),
        copy_s=float(slowest[3]),
    )


def _links(ctx: DistributedContext) -> tuple[float, float]:
    """Latency in seconds, and bytes per second, of this rank's links to its neighbours in the ring:
    all ranks send to the right at the same time, then to the left, and the slower one counts."""
    latencies, rates = [], []
    for step in (1, -1):
        _shift_s(ctx, 8, step, 1)  # the links are made
        latencies.append(_shift_s(ctx, 8, step, _PINGS) / _PINGS)
        nbytes, before, took = _FIRST_BYTES, 0.0, 0.0
        while True:
            before, took = took, min(_shift_s(ctx, nbytes, step, 1) for _ in range(_TRIES))
            longest = np.array([took])
            ctx.all_reduce(longest, "max", timeout=_WAIT_S)
            if longest[0] >= _LONG_S or nbytes >= _MOST_BYTES:
                break
            nbytes *= 2
        # What a burst or the latency gives to both sizes is in neither.
        half_s = took - before if before else took / 2
        rates.append(nbytes / 2 / max(half_s, took / 4))
    return max(latencies), min(rates)


def _shift_s(ctx: DistributedContext, nbytes: int, step: int, times: int) -> float:
    """Seconds until this rank has received ``nbytes`` from its neighbour ``times`` times, each of
    which its neighbour sends when it has what was sent before."""
    out, into = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    to, source = (ctx.rank + step) % ctx.world_size, (ctx.rank - step) % ctx.world_size
    ctx.barrier(timeout=_WAIT_S)
    began = time.perf_counter()
    for _ in range(times):
        sent = ctx.send(out, to, timeout=_WAIT_S, async_op=True)
        ctx.recv(into, source, timeout=_WAIT_S)
        sent.wait()
    return time.perf_counter() - began


def _methods() -> tuple[dict[str, float], dict[str, float]]:
    """Seconds per element to encode, and to decode, by method."""
    source = np.random.default_rng(0).standard_normal(_SAMPLE).astype(np.float32)
    encoding, decoding = {}, {}
    for name, method in METHODS.items():
        encode_s, decode_s = _method(method, source)
        encoding[name], decoding[name] = encode_s / source.size, decode_s / source.size
    return encoding, decoding


def _method(method: Strategy, source: Any) -> tuple[float, float]:
    compressor = GradientCompressor(method)
    small = compressor.compress(source, "sample")
    return (
        _least(lambda: compressor.compress(source, "sample")),
        _least(lambda: compressor.decompress(small)),
    )


def _copy_s() -> float:
    source = np.ones(1 << 22, np.float32)
    target = np.ones_like(source)
    return _least(lambda: np.copyto(target, source)) / source.size


def _least(run: Callable[[], object], times: int = 3) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)
