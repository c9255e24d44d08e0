"""``DistributedSampler`` in torch's DataLoader, as a loop that was written for torch's uses it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from potluck.torch import DDP, DistributedSampler

SAMPLES = list(range(21))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_without_commits_each_epoch_is_whole_and_in_another_order(world_size: int) -> None:
    def rank(ctx: DistributedContext) -> list[list[list[int]]]:
        sampler = DistributedSampler(SAMPLES, batch_size=4, ctx=ctx)
        loader = DataLoader(SAMPLES, batch_sampler=sampler)
        epochs = []
        for _ in range(3):
            epochs.append([batch.tolist() for batch in loader])
        return epochs

    found = run_world(world_size, rank)
    orders = []
    for epoch in range(3):
        batches = [found[rank][epoch] for rank in range(world_size)]
        assert len({len(each) for each in batches}) == 1, "ranks take equally many steps"
        whole = Counter(each for rank in batches for batch in rank[:-1] for each in batch)
        last = {each for rank in batches for each in rank[-1]}
        assert set(whole.values()) == {1}
        assert whole.keys() | last == set(SAMPLES)
        assert not whole.keys() & last
        orders.append(batches)
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_by_weight_each_sample_counts_once(world_size: int) -> None:
    data = torch.arange(21.0).reshape(21, 1)

    def rank(ctx: DistributedContext) -> list[float]:
        model = DDP(nn.Linear(1, 1, bias=False), ctx)
        sampler = DistributedSampler(data, batch_size=4, ctx=ctx)
        means = []
        for x in DataLoader(data, batch_sampler=sampler):
            model.weight = sampler.weight
            model.zero_grad()
            model(x).mean().backward()  # the gradient is the mean of the samples
            means.append(model.module.weight.grad.item())
            sampler.commit()
        assert sampler.epoch == 1
        return means

    for means in run_world(world_size, rank):
        total = sum(mean * size for mean, size in zip(means, [4, 4, 4, 4, 4, 1], strict=True))
        assert total == pytest.approx(sum(range(21)))


def test_with_commits_or_set_epoch_nothing_is_skipped() -> None:
    def rank(ctx: DistributedContext) -> None:
        sampler = DistributedSampler(SAMPLES, batch_size=4, ctx=ctx)
        first = list(sampler)
        sampler.set_epoch(0)
        assert list(sampler) == first
        sampler.set_epoch(1)
        second = list(sampler)
        assert second != first
        sampler.set_epoch(1)
        iterator = iter(sampler)
        next(iterator)  # interrupted
        assert list(sampler) == second
        sampler.set_epoch(0)
        for _ in sampler:
            sampler.commit()
        assert sampler.epoch == 1
        assert list(sampler) == second

    run_world(1, rank)


def test_a_loaded_position_is_where_the_next_iterator_begins() -> None:
    def rank(ctx: DistributedContext) -> None:
        sampler = DistributedSampler(SAMPLES, batch_size=4, ctx=ctx)
        kept = sampler.state_dict()
        first = list(sampler)  # it has gone through the epoch, and commits nothing
        sampler.load_state_dict(kept)
        assert list(sampler) == first

    run_world(1, rank)
