"""The speed of compressors on one core, next to the same operations in torch, in one run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from potluck._core.optional import installed
from potluck.cli.bench.operations import Floats
from potluck.cli.bench.table import show_seconds
from potluck.compressors import BF16, FP16, Compressor, GradientCompressor, Quantize, RandomK, TopK

COUNT = 26_000_000
"""Elements: the gradients of a ResNet-50, 104 MB of float32."""


class Case(NamedTuple):
    """One row: a compressor, with error feedback or without, and what does the same in torch."""

    compressor: Compressor
    error_feedback: bool
    in_torch: str | None = None


CASES = (
    Case(FP16(), False, "fp16"),
    Case(BF16(), False, "bf16"),
    Case(Quantize(8), True, "int8"),
    Case(Quantize(4), True, "int4"),
    Case(Quantize(2), True, "int2"),
    Case(TopK(0.01), False, "chunked"),
    Case(TopK(0.01), True),
    Case(TopK(0.01, chunk=None), False, "topk"),
    Case(TopK(0.01, chunk=None), True),
    Case(RandomK(0.01), True),
    Case(RandomK(0.01, "k"), True),
)


def measure(count: int = COUNT, rounds: int = 7) -> Iterator[dict[str, Any]]:
    """Measure each case in turns with torch, if torch is installed; a row for each case.

    ``compress`` of the whole object is measured: with its check for inf and NaN, its payload's
    memory, and the positions' code. Times are medians of wall time; ``cpu_s`` is the least CPU time
    of a round, which other load on the machine changes less.
    """
    source = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    theirs: dict[str, Callable[[], object]] = {}
    if installed("torch"):
        theirs = _in_torch(source)
    for case in CASES:
        compressor = GradientCompressor(case.compressor, error_feedback=case.error_feedback)
        other = theirs.get(case.in_torch or "")
        mine, its = _in_turns(lambda c=compressor: c.compress(source), other, rounds)  # type: ignore[misc]
        yield {
            "strategy": repr(case.compressor),
            "error_feedback": case.error_feedback,
            "ratio": compressor.compress(source).ratio,
            **mine,
            "torch": its,
        }
        del compressor
        gc.collect()


def head() -> str:
    """The titles of the columns."""
    return f"{'compressor':<46}{'feedback':>9}{'bytes':>8}{'time':>10}{'CPU':>10}{'torch':>20}"


def line(row: dict[str, Any]) -> str:
    """A row as text; "(2.0x)": torch takes 2.0 times as long."""
    text = f"{row['strategy']:<46}{'yes' if row['error_feedback'] else 'no':>9}"
    text += f"{'1/' + format(row['ratio'], '.3g'):>8}"
    text += f"{show_seconds(row['median_s']):>10}{show_seconds(row['cpu_s']):>10}"
    other = row["torch"]
    if other is None:
        return f"{text}{'-':>20}"
    times = other["median_s"] / row["median_s"]
    return f"{text}{show_seconds(other['median_s']) + f' ({times:.2g}x)':>20}"


def _in_turns(
    mine: Callable[[], object], other: Callable[[], object] | None, rounds: int
) -> tuple[dict[str, float], dict[str, float] | None]:
    each = [one for one in (mine, other) if one is not None]
    for one in each:
        one()  # allocates and warms up
    wall: list[list[float]] = [[] for _ in each]
    cpu: list[list[float]] = [[] for _ in each]
    for _ in range(rounds):
        for index, one in enumerate(each):
            began, busy = time.perf_counter(), time.thread_time()
            one()
            wall[index].append(time.perf_counter() - began)
            cpu[index].append(time.thread_time() - busy)
    found = [
        {"median_s": statistics.median(walls), "least_s": min(walls), "cpu_s": min(cpus)}
        for walls, cpus in zip(wall, cpu, strict=True)
    ]
    return found[0], found[1] if other is not None else None


def _in_torch(source: Floats) -> dict[str, Callable[[], object]]:
    """What compressors do, in operations of torch on one thread: functions by name, each for the
    flat array ``source``, without a result."""
    import torch

    torch.set_num_threads(1)
    x = torch.from_numpy(source)
    k = max(1, len(source) // 100)
    whole = x[: len(source) // 4096 * 4096].view(-1, 4096)
    residual = torch.zeros_like(x)

    sent, work = torch.empty_like(x), torch.empty_like(x)

    def integers(bits: int) -> Callable[[], object]:
        levels = (1 << (bits - 1)) - 1
        count = len(source) // 256 * 256
        blocks, places = sent[:count].view(-1, 256), work[:count].view(-1, 256)
        codes = torch.empty(places.shape, dtype=torch.int8)

        def encode() -> object:  # in memory that is there, as few passes as operations allow
            torch.add(x, residual, out=sent)
            scale = torch.abs(blocks, out=places).amax(1, keepdim=True) / levels
            codes.copy_(torch.div(blocks, scale, out=places).round_())
            return torch.addcmul(
                blocks, places, scale, value=-1, out=residual[:count].view(-1, 256)
            )

        return encode

    return {
        "fp16": lambda: x.to(torch.float16),
        "bf16": lambda: x.to(torch.bfloat16),
        "int8": integers(8),
        "int4": integers(4),
        "int2": integers(2),
        "topk": lambda: torch.topk(x.abs(), k, sorted=False),
        "chunked": lambda: torch.topk(whole.abs(), 41, dim=1, sorted=False),
    }
