"""A training whose computation is timed waits: the communication is real, and needs all the cores.

Hosts in namespaces share the cores of one machine, so that real arithmetic on each of them would
measure those cores. Here a step of ``COMPUTE_S`` is waits: a third before the loss, and two thirds
layer by layer in backward, where each layer writes a gradient of its own size. What an optimizer
takes for its update is taken off the first wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import potluck
import potluck.torch as pt
from potluck.bench.channel import Channel
from potluck.system import usable_cpus
from potluck.torch.planning import measure
from potluck.training.planner import CANDIDATES, encode

COMPUTE_S = 0.2
WIDTH, DEPTH = 1024, 24
NUM_PARAMETERS = DEPTH * WIDTH * WIDTH
"""25.2 million float32, 100.7 MB."""
_TIMEOUT_S = 290.0
_MANY = 1 << 24
_WARM_STEPS = 8
"""With fewer, the first cells of a strategy were slower than the later ones: 737, then 470 ms."""

OURS = {candidate.name: candidate for candidate in CANDIDATES}
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
        _wait_until(began + ctx.model.compute_s * 2 / 3 / DEPTH)
        return gradient, of_weight, None


class TimedModel(nn.Module):
    """``DEPTH`` matrices whose computation is waits. ``compute_s`` is the time of a step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(DEPTH)
        )
        self.gradient = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(rank))
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
            strategy=OURS[name].strategy,
        )
        model.time_updates(optimizer)
        for _ in job:
            with job.step():
                optimizer.zero_grad()
                torch.autograd.backward(parallel(_batch()))
                optimizer.step()
            yield

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
    if name not in OURS:
        return 1
    strategy = OURS[name].strategy
    if isinstance(strategy, pt.DataParallel):
        return 1
    steps = strategy.every // (strategy.fragments if isinstance(strategy, pt.DiLoCo) else 1)
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


def worker(peer: str) -> int:
    """One rank: train as it is told, until it is told to end."""
    torch.set_num_threads(1)
    group: Any = _Gloo() if peer == "gloo" else _Ours()
    channel = Channel.connect(
        os.environ["BENCH_ADDRESS"],
        token=os.environ["BENCH_TOKEN"],
        rank=group.rank,
        world_size=group.world_size,
    )
    model = TimedModel(group.rank)
    training: Iterator[None] = iter(())
    while True:
        match channel.receive():
            case {"do": "alone"}:
                model = TimedModel(group.rank)
                model.compute_s = COMPUTE_S
                channel.send(seconds=alone_s(model))
            case {"do": "plan", "compute_s": float(compute_s)}:
                shapes = ((WIDTH, WIDTH),) * DEPTH
                cores = len(usable_cpus()) / group.world_size  # shared by all hosts
                found = measure(group.ctx, shapes, compute_s, cores)
                channel.send(measured=encode(found))
            case {"do": "make", "strategy": str(name)}:
                model = TimedModel(group.rank)
                training = group.steps(name, model)
                for _ in range(max(_WARM_STEPS, round_steps(name))):
                    next(training)  # buckets, links, memory; without waits
                model.compute_s = COMPUTE_S
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
