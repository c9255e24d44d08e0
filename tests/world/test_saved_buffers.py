"""Writes of the framework into tensors that autograd has saved: backward still runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from potluck.torch import DDP, clip_grad_norm_
from potluck.torch.structure import broadcast_tensors
from support.worlds import open_world


class Scaled(nn.Module):
    """A layer whose graph saves a buffer that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, float("nan"), float("inf")]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.scale * x)[:, :2]


with torch.random.fork_rng():
    torch.manual_seed(1)
    NORMED = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def normed() -> nn.Module:
    """A copy: ranks are threads, which share torch's random numbers."""
    return copy.deepcopy(NORMED)


def data(rank: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("kind", ["inproc", "shm"])
def test_two_forwards_before_a_backward_run_on_every_rank(kind: str) -> None:
    """As GANs and siamese nets have; the gradient is that of the two losses."""

    def rank(ctx: DistributedContext) -> list[Tensor]:
        model = DDP(normed(), ctx)
        for _ in range(3):
            model.zero_grad()
            first, second = model(data(ctx.rank)), model(data(10 + ctx.rank))
            (first.square().mean() - second.mean()).backward()
        return [each.grad for each in model.parameters()]

    def alone(rank: int) -> list[Tensor]:
        model = normed()
        first, second = model(data(rank)), model(data(10 + rank))
        (first.square().mean() - second.mean()).backward()
        return [each.grad for each in model.parameters()]

    with open_world(kind, 3) as world:
        found = world.run(rank)
    each = [alone(rank) for rank in range(3)]
    for grads in found:
        for mine, *parts in zip(grads, *each, strict=True):
            torch.testing.assert_close(mine, sum(parts) / 3)


def test_a_gradient_penalty_and_a_constant_buffer() -> None:
    def rank(ctx: DistributedContext) -> None:
        model = DDP(Scaled(), ctx)
        x = torch.ones(2, 4, requires_grad=True)
        out = model(x).sum()
        model(x)  # another forward broadcasts the buffers again
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        model.synchronize()
        (slope[:, :2].square().sum() + out).backward()
        assert model.module.weight.grad[:2].isfinite().all()

    run_world(3, rank)


def test_only_what_differs_is_written_and_no_version_changes() -> None:
    def rank(ctx: DistributedContext) -> None:
        tensors = {"same": torch.tensor([1.0, float("nan")]), "own": torch.full((3,), ctx.rank)}
        versions = [each._version for each in tensors.values()]
        broadcast_tensors(ctx, tensors)
        assert [each._version for each in tensors.values()] == versions
        assert tensors["own"].tolist() == [0, 0, 0]

    run_world(3, rank)


@pytest.mark.parametrize("max_norm", [5.0, 4.9, 5.1])
def test_clipping_writes_nothing_where_nothing_is_clipped(max_norm: float) -> None:
    model, plain = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    for each in (model, plain):
        each.weight.grad = torch.tensor([[3.0, 4.0]])
    version = model.weight.grad._version
    norm = clip_grad_norm_(model, max_norm)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), max_norm))
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert (model.weight.grad._version == version) == (max_norm == 5.1)
