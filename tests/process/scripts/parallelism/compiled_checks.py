"""Functional collectives, and torch.compile of code and models that communicate."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import alone, check, close, same_parameters
from harness import together as train
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

EAGERLY = "aot_eager"  # traced as for inductor, but needs no C++ compiler


def all_kinds(x, group, size):
    total = functional.all_reduce(x, "sum", group)
    gathered = functional.all_gather_tensor(x, 0, group)
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    exchanged = functional.all_to_all_single(gathered, None, None, group)
    return total * 2, gathered + 1, scattered / size, exchanged, functional.broadcast(x, 1, group)


def expect(run, results):
    size = run.world_size
    ranks = [torch.arange(6.0) + rank for rank in range(size)]
    total, gathered, scattered, exchanged, sent = results
    close(total, sum(ranks) * 2)
    close(gathered, torch.cat(ranks) + 1)
    close(scattered, ranks[run.rank])
    close(exchanged, torch.cat([ranks[run.rank]] * size))
    close(sent, ranks[1])


@check(4)
def functional_collectives(run):
    expect(run, all_kinds(torch.arange(6.0) + run.rank, dist.group.WORLD, run.world_size))


@check(2)
def compiled_functional_collectives(run):
    compiled = torch.compile(all_kinds, backend=EAGERLY, fullgraph=True)
    expect(run, compiled(torch.arange(6.0) + run.rank, dist.group.WORLD, run.world_size))


@check(2)
def compiled_all_reduce_in_place(run):
    def step(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    compiled = torch.compile(step, backend=EAGERLY)
    close(compiled(torch.ones(4) * (run.rank + 1)), torch.full((4,), 7.0))


class Net(nn.Module):
    """A forward pass of one's own: of torch's own modules under DDP, torch compiles none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@check(2)
def compiled_ddp(run):
    counters.clear()
    model = Net()
    parallel = torch.compile(
        DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1), backend=EAGERLY
    )
    train(run, parallel)
    same_parameters(parallel._orig_mod.module, alone(model))
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


@check(2)
def compiled_fsdp2(run):
    counters.clear()
    model = Net()
    parallel = fully_shard(copy.deepcopy(model))
    parallel.compile(backend=EAGERLY)
    train(run, parallel)
    same_parameters(parallel, alone(model))
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
