"""Strategies tried out for a plan, before a training: the ranks reduce gradients of the model's
sizes, by the strategy's own code, all at the same time, while waits stand for the computation.

Nothing of the script's model is touched. What is timed has in it what no sum of measured parts has:
ranks that share processors, the threads of a step that wait for each other, the congestion control
of the links.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from potluck.torch.compression import Compression
from potluck.torch.gossip import outer_of
from potluck.torch.reducer import Reducer
from potluck.training.planner import Candidate, Measured, Rehearsed, in_other_buckets, to_rehearse
from potluck.training.planner import parts as parts_of
from potluck.training.planner.measured import last
from potluck.training.planner.model import BACKWARD_PART, Times
from potluck.training.strategies import Strategy

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_WARM_S, _MOST_WARM = 0.5, 3
"""The first tries, in which links and memory are set up, do not count: this many seconds, or this
many tries."""
_ENOUGH_S, _LEAST_TIMES, _MOST_TIMES = 1.2, 3, 8
"""The seconds of the tries that count, and the least and the largest number of them."""
_DENSE_BELOW = 4096
_VOTE, _REPORT = 6, 32  # float64
_WAIT_S = 300.0


def rehearse(ctx: DistributedContext, measured: Measured) -> Measured:
    """``measured`` with the rehearsals of what a plan compares. A collective call; takes some
    seconds for each candidate, and needs memory as a training does for gradients and what it
    sends."""
    for candidates in (to_rehearse, in_other_buckets):
        due = list(candidates(measured))
        found = []
        for number, candidate in enumerate(due, 1):
            if ctx.is_master:
                ctx.report(event=f"rehearsing {candidate.code} ({number} of {len(due)})")
            for elements in parts_of(measured, candidate):
                found.append(_rehearsed(ctx, measured, candidate, elements))
        measured = msgspec.structs.replace(measured, rehearsed=(*measured.rehearsed, *found))
    return measured


def _rehearsed(
    ctx: DistributedContext, measured: Measured, candidate: Candidate, elements: int
) -> Rehearsed:
    stand_in = StandIn(last(measured.shapes, elements))
    if not candidate.strategy.in_rounds:
        share = elements / measured.num_elements
        backward_s = measured.compute_s_of(ctx.rank) * share * BACKWARD_PART
        times = _timed(ctx, _steps(ctx, stand_in, candidate, backward_s))
        hidden_s = measured.step_compute_s * share * BACKWARD_PART
        times = Times(max(0.0, times.own_s - hidden_s), 0.0)
    else:
        times = _timed(ctx, _exchanges(ctx, stand_in, candidate.strategy))
    gc.collect()  # what a rehearsal leaves in cycles is as large as the model, several times
    return Rehearsed(
        name=candidate.name,
        bucket_size_mb=candidate.bucket_size_mb,
        elements=elements,
        own_s=times.own_s,
        way_s=times.way_s,
    )


def _timed(ctx: DistributedContext, tries: Iterator[Times]) -> Times:
    """The medians of several tries."""
    _tried(ctx, tries, 1, _MOST_WARM, _WARM_S)
    own, way = zip(*_tried(ctx, tries, _LEAST_TIMES, _MOST_TIMES, _ENOUGH_S), strict=True)
    return Times(statistics.median(own), statistics.median(way))


def _tried(
    ctx: DistributedContext, tries: Iterator[Times], least: int, most: int, enough_s: float
) -> list[Times]:
    """The times of each try, of which there are enough after ``enough_s``: the mean of the ranks.

    They end together, but begin apart, by the latency of a barrier's last message, as steps do that
    follow each other: a rank that begins early waits for the others as much longer.
    """
    found: list[Times] = []
    began = time.perf_counter()
    passed_s = 0.0
    while len(found) < least or (len(found) < most and passed_s < enough_s):
        mine = [*next(tries), time.perf_counter() - began]
        gathered = ctx.all_gather(np.array([mine]), timeout=_WAIT_S).reshape(ctx.world_size, -1)
        found.append(Times(*gathered[:, :2].mean(axis=0).tolist()))
        passed_s = float(gathered[:, 2].max())
    return found


def _steps(
    ctx: DistributedContext, stand_in: StandIn, candidate: Candidate, backward_s: float
) -> Iterator[Times]:
    """Backwards with their reduction and the vote, and the seconds that each took."""
    strategy = candidate.strategy
    method = strategy.compression
    named = dict(stand_in.named_parameters())
    how: Any = {"error_feedback": True, "dense_below": _DENSE_BELOW, "warmup_steps": 0}
    compression = None if method is None else Compression(named, method, **how)
    reducer = Reducer(
        named,
        ctx,
        candidate.bucket_size_mb,
        compression,
        algorithm=strategy.algorithm,
    )
    stand_in.backward_s = backward_s
    first = 0 if method is None else method.start_step  # the steps before it send all
    for step in itertools.count(first):
        if compression is not None:
            compression.begin(step)
        stand_in.zero_grad()
        loss = stand_in()
        ctx.barrier(timeout=_WAIT_S)
        began = time.perf_counter()
        torch.autograd.backward(loss)
        _vote(ctx)
        yield Times(time.perf_counter() - began, 0.0)
    assert reducer.enabled  # it lives as long as its steps


def _exchanges(ctx: DistributedContext, stand_in: StandIn, strategy: Strategy) -> Iterator[Times]:
    """The ends of rounds that exchange all parameters of the stand-in."""
    outer = outer_of(strategy.undivided(), stand_in, [], {})
    for number in itertools.count():
        outer.begin(number)
        stand_in.drift()
        ctx.barrier(timeout=_WAIT_S)
        began = time.perf_counter()
        outer.close(number, whole=False)
        reports = ctx.all_gather(np.zeros(_REPORT), timeout=_WAIT_S, async_op=True)
        wait = outer.start(ctx, number, 1 / ctx.world_size, _WAIT_S)
        started = time.perf_counter()
        reports.wait()
        wait()
        arrived = time.perf_counter()
        _vote(ctx)
        outer.apply(number, 1.0, delayed=outer.delay > 0)
        way_s = arrived - started
        yield Times(time.perf_counter() - began - way_s, way_s)


def _vote(ctx: DistributedContext) -> None:
    """As long as the vote of a step or a round."""
    ctx.all_gather(np.zeros(_VOTE), timeout=_WAIT_S)


class StandIn(nn.Module):
    """Parameters of these shapes, float32, whose gradients come one after the other, last ones
    first, each after its part of the backward's waits."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.backward_s = 0.0
        """Seconds that all waits of a backward take together."""
        self._late_s = 0.0
        self._source = torch.randn(max(map(math.prod, shapes)))

    def forward(self) -> Tensor:
        x, total = torch.ones(1, requires_grad=True), sum(p.numel() for p in self.weights)
        for weight in self.weights:
            part = weight.numel() / max(1, total)
            x = _Layer.apply(x, weight, self.gradient, part)  # type: ignore[no-untyped-call]
        return x.sum()

    def gradient(self, weight: Tensor, part: float) -> Tensor:
        """The gradient of ``weight``, after ``part`` of the backward's waits.

        Not at a moment that is set before: no layer computes while hooks on the gradient before it
        are at work. A wait that took longer than it should shortens the next one.
        """
        began = time.perf_counter()
        made = self._source[: weight.numel()].view(weight.shape).clone()
        due_s = self.backward_s * part - self._late_s
        time.sleep(max(0.0, due_s - (time.perf_counter() - began)))
        self._late_s = time.perf_counter() - began - due_s
        return made

    @torch.no_grad()
    def drift(self) -> None:
        """Change the parameters, as the steps of a round do."""
        for weight in self.weights:
            weight.add_(self._source[: weight.numel()].view(weight.shape), alpha=1e-3)


class _Layer(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gradient: Callable[[Tensor, float], Tensor],
        part: float,
    ) -> Tensor:
        ctx.weight, ctx.gradient, ctx.part = weight, gradient, part
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradient, ctx.gradient(ctx.weight, ctx.part), None, None
