"""One rank of ``time_to_loss.py``: trains a task by a strategy, in pieces that it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import potluck
import potluck.torch as pt
from common.loss_tasks import TASKS, Task, whole
from potluck.cli.bench.crew import Channel
from potluck.compressors import Quantize, TopK

_TIMEOUT_S = 290.0
LOOK_EVERY = 20
"""Steps between two looks at the validation loss: whole rounds."""


class Choice(NamedTuple):
    """A strategy, and how a script says it."""

    code: str
    strategy: pt.DataParallel | pt.LocalSGD | pt.DiLoCo


OURS = {
    "int4": Choice("DataParallel(compression=Quantize(4))", pt.DataParallel(Quantize(4))),
    "local-sgd": Choice("LocalSGD(every=10)", pt.LocalSGD(every=10)),
    "local-topk": Choice(
        "DiLoCo(every=10, outer=OuterSGD(1.0), compression=TopK(0.1, bits=2))",
        pt.DiLoCo(every=10, outer=pt.OuterSGD(1.0), compression=TopK(0.1, bits=2)),
    ),
}
SERIAL, GLOO = "serial", "gloo"


class _Ours:
    """This rank's part in potluck's group."""

    def __init__(self) -> None:
        self.ctx = potluck.init(timeout_s=_TIMEOUT_S)
        self.rank, self.world_size = self.ctx.rank, self.ctx.world_size

    def send(self, nbytes: int) -> None:
        self.ctx.all_reduce(np.zeros(nbytes // 4, np.float32))

    def train(self, task: Task, name: str, seed: int, model: nn.Module) -> Iterator[None]:
        optimizer = task.optimizer(model)
        scheduler = task.scheduler(optimizer)
        if name == SERIAL:
            data = task.data(seed)
            for step in range(task.steps):
                first = step * task.batch_size
                batch = data.__getitems__(range(first, first + task.batch_size))
                yield
                _step(model, optimizer, *batch)
                scheduler.step()
            return
        parallel = pt.DDP(model, self.ctx)
        job = pt.ElasticLoop(
            *(parallel, optimizer, task.data(seed)),
            batch_size=task.batch_size,
            shuffle=False,
            collate=whole,
            strategy=OURS[name].strategy,
            also={"scheduler": scheduler},
        )
        for inputs, labels in job:  # which exchanges before the first step of the next round
            yield
            with job.step():
                _step(parallel, optimizer, inputs, labels)
            scheduler.step()

    def close(self) -> None:
        self.ctx.close()


class _Gloo:
    """This rank's part in torch's group over Gloo."""

    def __init__(self) -> None:
        from datetime import timedelta

        dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def send(self, nbytes: int) -> None:
        dist.all_reduce(torch.zeros(nbytes // 4))

    def train(self, task: Task, _: str, seed: int, model: nn.Module) -> Iterator[None]:
        from torch.nn.parallel import DistributedDataParallel

        parallel = DistributedDataParallel(model)
        optimizer = task.optimizer(model)
        scheduler = task.scheduler(optimizer)
        data = task.data(seed)
        share = task.batch_size // self.world_size
        for step in range(task.steps):
            first = step * task.batch_size + self.rank * share
            batch = data.__getitems__(range(first, first + share))
            yield
            _step(parallel, optimizer, *batch)
            scheduler.step()

    def close(self) -> None:
        dist.destroy_process_group()


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()))
    optimizer.step()


def worker(peer: str) -> int:
    """Train as it is told, until it is told to end."""
    torch.set_num_threads(1)
    group: Any = _Gloo() if peer == GLOO else _Ours()
    channel = Channel.to_crew(group.rank, group.world_size)
    training: Iterator[None] = iter(())
    while True:
        match channel.receive():
            case {"do": "make", "task": str(name), "strategy": str(strategy), "seed": int(seed)}:
                task = TASKS[name]
                model = task.model(seed)
                training = group.train(task, strategy, seed, model)
                next(training)  # to the begin of the first step
                channel.send(parameters=sum(each.numel() for each in model.parameters()))
            case {"do": "time", "steps": int(count)}:
                began = time.perf_counter()
                done = sum(1 for _, _ in zip(range(count), training, strict=False))
                channel.send(seconds=time.perf_counter() - began, steps=done)
            case {"do": "validate"}:
                loss, accuracy = task.validate(model, seed)
                channel.send(loss=loss, accuracy=accuracy)
            case {"do": "send", "nbytes": int(nbytes), "times": int(times)}:
                for _ in range(times):
                    group.send(nbytes)
                channel.send()
            case {"do": "end"}:
                break
    group.close()
    return 0
