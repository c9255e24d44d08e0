"""A training whose computation is timed waits: the communication is real, and needs all the cores.

Hosts in namespaces share the cores of one machine, so that real arithmetic on each of them would
measure those cores. Here the computation of a step is waits: a third before the loss, and two
thirds layer by layer in backward, where each layer writes a gradient of its own size. What an
optimizer takes for its update is taken off the first wait.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import potluck
import potluck.torch as pt
from potluck.cli.bench.crew import Channel
from potluck.training.planner import CANDIDATES, Candidate, named
from potluck.training.planner.measured import FACT, VARIABLE


@dataclass(frozen=True, slots=True)
class Size:
    """``depth`` square matrices of ``width`` float32, and the computation of a step."""

    name: str
    width: int
    depth: int
    compute_s: float

    @property
    def num_parameters(self) -> int:
        return self.depth * self.width**2


SIZES = {
    "1m": Size("1 M", 512, 4, 0.0083),
    "25m": Size("25 M", 1024, 24, 0.2),
    "110m": Size("110 M", 2048, 26, 0.867),
}
"""1.05, 25.2 and 109 million parameters; the computation is in proportion to them."""
_TIMEOUT_S = 290.0
_MANY = 1 << 24
_WARM_STEPS = 8
"""With fewer, the first cells of a strategy were slower than the later ones: 737, then 470 ms."""

OURS = {each.name: each for each in CANDIDATES}
GLOO = {
    "gloo": "torch's DDP over Gloo, float32",
    "gloo-fp16": "the same with torch's fp16 hook",
    "gloo-powersgd": "the same with torch's PowerSGD hook, rank 4, in one bucket",
}


class _Layer(torch.autograd.Function):
    """The identity, whose backward waits and writes a gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, model: TimedModel) -> Tensor:
        ctx.model = model
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        began = time.perf_counter()
        of_weight = ctx.model.gradient.clone()
        _wait_until(began + ctx.model.compute_s * 2 / 3 / ctx.model.depth)
        return gradient, of_weight, None


def cell_name(candidate: Candidate) -> str:
    """A candidate's name, with the size of its buckets in MiB, or the steps of its rounds, if they
    are not the usual ones."""
    if candidate == named(candidate.name):
        return candidate.name
    return f"{candidate.name}@{candidate.every or candidate.bucket_size_mb:g}"


def candidate_of(name: str) -> Candidate:
    """The candidate of ``cell_name``."""
    base, _, form = name.partition("@")
    usual = named(base)
    if not form:
        return usual
    return usual.in_buckets(float(form)) if usual.every is None else usual.in_rounds_of(int(form))


class TimedModel(nn.Module):
    """Matrices whose computation is waits. ``compute_s`` is the time of a step."""

    def __init__(self, rank: int, size: Size) -> None:
        super().__init__()
        width = size.width
        self.depth = size.depth
        self.layers = nn.ParameterList(
            nn.Parameter(torch.zeros(width, width)) for _ in range(size.depth)
        )
        self.gradient = torch.randn(width, width, generator=torch.Generator().manual_seed(rank))
        self.compute_s = 0.0
        self.update_s = 0.0
        """What the last update of the optimizer took."""

    def forward(self, x: Tensor) -> Tensor:
        _wait_until(time.perf_counter() + self.compute_s / 3 - self.update_s)
        for weight in self.layers:
            x = _Layer.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return x.sum()

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def time_updates(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's time off the waits. After a loop has its own hook on it, which
        votes."""
        began = 0.0

        def before(*_: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def after(*_: Any) -> None:
            self.update_s = time.perf_counter() - began

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def _batch() -> Tensor:
    return torch.ones(1, requires_grad=True)


class _Ours:
    """This rank's part in potluck's group."""

    def __init__(self) -> None:
        self.ctx = potluck.init(timeout_s=_TIMEOUT_S)
        self.rank, self.world_size = self.ctx.rank, self.ctx.world_size

    def barrier(self) -> None:
        self.ctx.barrier()

    def send(self, nbytes: int) -> None:
        self.ctx.all_reduce(np.zeros(nbytes // 4, np.float32))

    def steps(self, name: str, model: TimedModel) -> Iterator[None]:
        parallel = pt.DDP(model, self.ctx)
        optimizer = model.optimizer()
        dataset = (torch.zeros(_MANY, dtype=torch.uint8),)
        job = pt.ElasticLoop(
            *(parallel, optimizer, dataset),
            batch_size=self.world_size,
            shuffle=False,
            strategy=candidate_of(name).strategy,
        )
        model.time_updates(optimizer)
        for _ in job:
            with job.step():
                optimizer.zero_grad()
                torch.autograd.backward(parallel(_batch()))
                optimizer.step()
            yield

    def plan(self, model: TimedModel) -> str | None:
        """What ``potluck plan`` measures for a script of this model; on rank 0, else None."""
        reported: dict[str, Any] = {}
        self.ctx.report = lambda **facts: reported.update(facts)  # type: ignore[method-assign]
        os.environ[VARIABLE] = "1"
        try:
            for _ in self.steps("plain", model):
                pass
        except SystemExit:
            return reported.get(FACT)
        finally:
            del os.environ[VARIABLE], self.ctx.report
        raise AssertionError("a script that is only measured trained to its end")

    def close(self) -> None:
        self.ctx.close()


class _Gloo:
    """This rank's part in torch's group over Gloo."""

    def __init__(self) -> None:
        from datetime import timedelta

        dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier()

    def send(self, nbytes: int) -> None:
        dist.all_reduce(torch.zeros(nbytes // 4))

    def steps(self, name: str, model: TimedModel) -> Iterator[None]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        # In several buckets torch's PowerSGD hook hangs over Gloo: it begins a bucket's second
        # reduction when the first has ended, and the order of these differs between ranks.
        bucket_mb = 1024 if name == "gloo-powersgd" else None
        parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        if name == "gloo-fp16":
            parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "gloo-powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = model.optimizer()
        model.time_updates(optimizer)
        while True:
            optimizer.zero_grad()
            torch.autograd.backward(parallel(_batch()))
            optimizer.step()
            yield

    def close(self) -> None:
        dist.destroy_process_group()


def round_steps(name: str) -> int:
    """The number of steps that are timed together: those between two exchanges; of long rounds as
    many as it takes for parameters to be compared once."""
    if name in GLOO:
        return 1
    candidate = candidate_of(name)
    if isinstance(candidate.strategy, pt.DataParallel):
        return 1
    steps = round(candidate.strategy.round_steps)
    compared = pt.Policy().hash_every
    return compared if compared // 2 <= steps <= compared and compared % steps == 0 else steps


def alone_s(model: TimedModel, steps: int = 5) -> float:
    """Seconds of a step that communicates nothing, the optimizer's update included: the least of
    several, for what other programs add to it would make all efficiencies look better."""
    optimizer = model.optimizer()
    model.time_updates(optimizer)
    took = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(model(_batch()))
        optimizer.step()
        took.append(time.perf_counter() - began)
    return min(took[1:])


def _give_back() -> None:
    """Free what is in cycles, gigabytes of a strategy's arrays, and give the memory back to the
    system: ranks of one machine share it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def worker(peer: str) -> int:
    """One rank: train as it is told, until it is told to end."""
    torch.set_num_threads(1)
    group: Any = _Gloo() if peer == "gloo" else _Ours()
    channel = Channel.to_crew(group.rank, group.world_size)
    model: TimedModel | None = None
    training: Iterator[None] = iter(())
    while True:
        match channel.receive():
            case {"do": "alone", "size": str(size)}:
                model = TimedModel(group.rank, SIZES[size])
                model.compute_s = SIZES[size].compute_s
                channel.send(seconds=alone_s(model))
            case {"do": "plan", "size": str(size)}:
                training = iter(())
                model = TimedModel(group.rank, SIZES[size])
                model.compute_s = SIZES[size].compute_s
                channel.send(measured=group.plan(model))
                model = None
                _give_back()
            case {"do": "make", "size": str(size), "strategy": str(name)}:
                training, model = iter(()), None
                _give_back()
                model = TimedModel(group.rank, SIZES[size])
                training = group.steps(name, model)
                for _ in range(max(_WARM_STEPS, round_steps(name))):
                    next(training)  # buckets, links, memory; without waits
                model.compute_s = SIZES[size].compute_s
                channel.send()
            case {"do": "send", "nbytes": int(nbytes), "times": int(times)}:
                for _ in range(times):
                    group.send(nbytes)
                channel.send()
            case {"do": "time", "steps": int(count)}:
                group.barrier()
                took = []
                began, busy_s = time.perf_counter(), -time.process_time()
                for _ in range(count):
                    next(training)
                    now = time.perf_counter()
                    took.append(now - began)
                    began = now
                channel.send(seconds=took, busy_s=busy_s + time.process_time())
            case {"do": "end"}:
                break
    group.close()
    return 0
