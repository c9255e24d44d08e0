"""Functional collectives, and torch.compile of code and models that communicate."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import alone, check, close, mlp, same_parameters
from harness import together as train
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


@check(2, 4)
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


@check(2)
def compiled_ddp(run):
    model = mlp()
    parallel = torch.compile(
        DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1), backend=EAGERLY
    )
    train(run, parallel)
    same_parameters(parallel._orig_mod.module, alone(model))


@check(2)
def compiled_fsdp2(run):
    model = mlp()
    parallel = copy.deepcopy(model)
    for layer in parallel[::2]:
        layer.compile(backend=EAGERLY)
        fully_shard(layer)
    fully_shard(parallel)
    train(run, parallel)
    same_parameters(parallel, alone(model))
