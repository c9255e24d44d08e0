"""The planner's measurements, inside the group that is to train, and the plan file of a script.

``potluck plan train.py`` runs the script with ``POTLUCK_PLAN`` set. Then its ElasticLoop takes a
few steps on each rank alone, measures the links, the methods and the memory of every machine,
tries the strategies, reports all that, and ends the script.

In a rehearsal the ranks reduce gradients of the model's sizes, by the strategy's own code, all at
the same time, while waits stand for the computation. Nothing of the script's model is touched. What
is timed has in it what no sum of measured parts has: ranks that share processors, the threads of a
step that wait for each other, the congestion control of the links.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from potluck.checkpoint.state import fingerprint
from potluck.compressors import Compressor
from potluck.torch.compression import Compression
from potluck.torch.ddp import DistributedDataParallel
from potluck.torch.outer import outer_of
from potluck.torch.reducer import Reducer
from potluck.torch.structure import device_of, synchronize
from potluck.training.planner import (
    METHODS,
    Candidate,
    Measured,
    Rehearsed,
    encode,
    in_other_buckets,
    named,
    to_rehearse,
)
from potluck.training.planner import parts as parts_of
from potluck.training.planner.candidates import BUCKET_SIZE_MB
from potluck.training.planner.measured import FACT, SUFFIX, VARIABLE, last
from potluck.training.planner.model import BACKWARD_PART, Times
from potluck.training.policy import Policy
from potluck.training.strategies import DataParallel, Strategy
from potluck.training.transfer import gather_numbers

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_LONG_S = 0.5
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 25
_PINGS, _TRIES = 8, 2
_ARRAYS, _SAMPLE, _COLUMNS = 2, 6 << 20, 1024
"""Two arrays of a bucket's size, with the memory of a method more than a processor caches."""
_WAIT_S = 300.0
_WARM_S, _MOST_WARM = 0.5, 3
"""The first tries, in which links and memory are set up, do not count: this many seconds, or this
many tries."""
_ENOUGH_S, _LEAST_TIMES, _MOST_TIMES = 1.2, 3, 8
"""The seconds of the tries that count, and the least and the largest number of them."""
_DENSE_BELOW = 4096
_VOTE, _REPORT = 6, 32  # float64


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
    mine = {
        "compute_s": compute_s,
        "latency_s": latency_s,
        "bytes_per_s": rate,
        "crossing": crossing,
        "copy_s": work.copy_s(),
        "hash_s": work.hash_s(),
        "encode_s": list(encoding.values()),
        "decode_s": list(decoding.values()),
    }
    ranks = gather_numbers(ctx, mine, timeout=_WAIT_S)
    has_links = ctx.world_size > 1
    found = Measured(
        compute_s=tuple(ranks["compute_s"].tolist()),
        latency_s=float(ranks["latency_s"].max()),
        bytes_per_s=tuple(ranks["bytes_per_s"].tolist()) if has_links else (),
        crossing_bytes_per_s=tuple(ranks["crossing"].tolist()) if has_links else (),
        nodes=tuple(member.node for member in ctx.members),
        shapes=shapes,
        encode_s=dict(zip(encoding, ranks["encode_s"].max(axis=0).tolist(), strict=True)),
        decode_s=dict(zip(decoding, ranks["decode_s"].max(axis=0).tolist(), strict=True)),
        copy_s=float(ranks["copy_s"].max()),
        hash_s=float(ranks["hash_s"].max()),
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
        encoders, decode = zip(*(method.halves(*each) for each in arrays), strict=True)
        encode_s = self._each_s(lambda place: encoders[place]())
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
    parameters = dict(stand_in.named_parameters())
    how: Any = {"error_feedback": True, "dense_below": _DENSE_BELOW, "warmup_steps": 0}
    compression = None if method is None else Compression(parameters, method, **how)
    reducer = Reducer(
        parameters,
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


NUM_STEPS, _MOST_STEPS = 5, 25
"""The least and the largest number of steps of a rehearsal."""
_STEPS_S = 0.5
"""Steps take at least so long together: a few short ones would measure other load of the
machine."""
_WARM_STEPS = 1
_NUM_SAMPLED = 5
"""Steps whose times a suggestion is made from."""
_LONG_STEP_S = 0.25

_log = logging.getLogger(__name__)


def is_planning() -> bool:
    """Whether this script is only measured."""
    return bool(os.environ.get(VARIABLE))


class Of(msgspec.Struct, frozen=True):
    """The machines and the model that a plan was measured on."""

    nodes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class _Choice(msgspec.Struct):
    """The fields of a plan file that a training reads."""

    choice: str
    bucket_size_mb: float = BUCKET_SIZE_MB
    every: int | None = None
    measured: Of | None = None


class Planning:
    """What a loop does beside its steps for a plan: by default nothing."""

    def begin(self) -> None:
        """A step begins, with the loading of its samples."""

    def end(self, *, is_last: bool) -> bool:
        """A step has ended; whether the loop is to end. Equal on all ranks."""
        return False

    def timed(self, step_s: float, waited_s: float) -> None:
        """A step of ``step_s`` is committed, of which this rank has waited ``waited_s``."""

    def finish(self) -> None:
        """The loop has ended. A collective call."""


class Planned(Planning):
    """What ``strategy="auto"`` means for the script of this process: the choice in its plan file.

    ValueError, with the command that makes one, if there is none and this is no world of one. A
    plan of other machines, or of another model, is taken with a warning.
    """

    def __init__(self, ctx: DistributedContext, model: nn.Module) -> None:
        self._ctx, self._of = ctx, None
        self._seen: frozenset[str] = frozenset()
        self._warnings: set[str] = set()
        self.strategy: Strategy = DataParallel()
        script = getattr(sys.modules["__main__"], "__file__", None)
        path = None if script is None else Path(script).with_suffix(SUFFIX)
        if path is None or not path.is_file():
            if ctx.world_size == 1 and not ctx.elastic:
                return  # nothing is sent
            spec = sys.modules["__main__"].__spec__
            name = "SCRIPT" if script is None else Path(script).name
            name = name if spec is None else f"-m {spec.name}"
            raise ValueError(
                f'strategy="auto" takes the strategy of a plan, and there is no '
                f"{'plan file' if path is None else path.name}: make one with `potluck plan {name}`"
            )
        try:
            plan = msgspec.json.decode(path.read_bytes(), type=_Choice)
            choice = named(plan.choice).in_buckets(plan.bucket_size_mb).in_rounds_of(plan.every)
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(
                f"{path.name} is no plan ({error}): make it anew with `potluck plan`"
            ) from None
        self.strategy, self._of = choice.strategy, plan.measured
        self._name, self._shapes = path.name, _shapes_of(model)
        ctx.report(strategy=choice.code)
        self.begin()

    def finish(self) -> None:
        """Tell the job's history which algorithm ran most of the all_reduce calls."""
        calls = self._ctx.stats()["operations"].get("all_reduce", {}).get("algorithms", {})
        if calls:
            self._ctx.report(algorithm=max(calls, key=lambda each: calls[each]))

    def begin(self) -> None:
        """Warn, on rank 0, if the plan was measured on other machines than those of the present
        group. Each warning is given once, and none if machines have only left: they may return."""
        nodes = frozenset(member.node for member in self._ctx.members)
        if self._of is None or nodes <= self._seen:
            return
        self._seen |= nodes
        doubt = doubt_of(self._of, nodes, self._shapes)
        if doubt is not None and doubt not in self._warnings and self._ctx.rank == 0:
            self._warnings.add(doubt)
            _log.warning("%s %s: make it anew with `potluck plan`", self._name, doubt)


def doubt_of(
    measured: Of, nodes: Collection[str], shapes: tuple[tuple[int, ...], ...]
) -> str | None:
    """Why a plan from these measurements does not hold for a model of these ``shapes`` on these
    machines; None if it does."""
    if measured.shapes != shapes:
        return "is of another model"
    then, now = set(measured.nodes), set(nodes)
    if now == then or len(now) == 1:  # alone, a worker trains as it will when others join
        return None
    if len(then) == 1:
        return (
            f"was made on one machine, where no strategy is compared; this training has {len(now)}"
        )
    if len(now) != len(then):
        return f"was made on {len(then)} machines; this training has {len(now)}"
    return "was made on other machines"


def _shapes_of(model: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Of the gradients of ``model``, in its order."""
    return tuple(tuple(p.shape) for p in model.parameters() if p.requires_grad)


class Suggestion(Planning):
    """Warns once, on rank 0, that steps wait for the network, where a plan would help.

    The first steps on a set of machines are measured; when machines join or leave, the next ones.
    """

    def __init__(self, ctx: DistributedContext) -> None:
        self._ctx = ctx
        self._steps: list[tuple[float, float]] = []
        self._nodes: frozenset[str] = frozenset()
        self._has_warned = False

    def timed(self, step_s: float, waited_s: float) -> None:
        nodes = frozenset(member.node for member in self._ctx.members)
        if nodes != self._nodes:
            self._nodes, self._steps = nodes, []
        if self._has_warned or len(self._steps) == _NUM_SAMPLED:
            return
        self._steps.append((step_s, waited_s))
        if len(self._steps) < _NUM_SAMPLED or self._ctx.rank != 0:
            return
        step_s, waited_s = (statistics.median(each) for each in zip(*self._steps, strict=True))
        if len(nodes) > 1 and step_s >= _LONG_STEP_S and waited_s > step_s / 2:
            self._has_warned = True
            _log.warning(
                "a step takes %.1f s, and %.0f%% of that is waiting for other machines: "
                "`potluck plan` says which strategy sends less, and what it changes",
                step_s,
                waited_s / step_s * 100,
            )


class Rehearsal(Planning):
    """The steps of a script that is only measured."""

    def __init__(self, ctx: DistributedContext, model: nn.Module, policy: Policy | None) -> None:
        self._ctx, self._model, self._device = ctx, model, device_of(model)
        self._is_proportional = policy is not None and policy.shares is not None
        self._times: list[float] = []
        self._num_steps = NUM_STEPS
        self._began = self._waited_s = 0.0

    def begin(self) -> None:
        if isinstance(self._model, DistributedDataParallel):
            self._model.reduces = False
        synchronize(self._device)
        self._began, self._waited_s = time.perf_counter(), self._ctx.waited_s

    def end(self, *, is_last: bool) -> bool:
        synchronize(self._device)  # a GPU computes what the step has only queued
        waited_s = self._ctx.waited_s - self._waited_s
        self._times.append(max(1e-6, time.perf_counter() - self._began - waited_s))
        if len(self._times) == NUM_STEPS:
            longest = np.array([self._step_s])
            self._ctx.all_reduce(longest, "max")
            self._num_steps = min(_MOST_STEPS, max(NUM_STEPS, round(_STEPS_S / longest[0])))
        return is_last or len(self._times) >= self._num_steps

    @property
    def _step_s(self) -> float:
        return statistics.median(self._times[_WARM_STEPS:] or self._times or [1e-6])

    def finish(self) -> None:
        """Measure all else, report it, and end the script."""
        if self._ctx.is_master:
            steps = f"{len(self._times)} steps of {1e3 * self._step_s:.3g} ms were computed"
            self._ctx.report(event=f"{steps}; measuring links and what compressing costs")
        measured = measure(
            *(self._ctx, _shapes_of(self._model), self._step_s),
            shares="proportional" if self._is_proportional else "equal",
        )
        if self._ctx.rank == 0:
            self._ctx.report(**{FACT: encode(measured)})
        raise SystemExit(0)
