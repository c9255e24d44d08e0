"""What the checks share: their list, the model and the data, and how results are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

TOLERANCE = 1e-10


class Run(NamedTuple):
    """What a check is told: who it is, and a folder that all ranks (and all worlds) share."""

    rank: int
    world_size: int
    folder: Path


CHECKS: dict[str, Callable[[Run], None]] = {}


def check(*world_sizes: int) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a check; the test file reads the world sizes from the source."""

    def register(function: Callable[[Run], None]) -> Callable[[Run], None]:
        assert world_sizes
        CHECKS[function.__name__] = function
        return function

    return register


def mlp(*, width: int = 24, depth: int = 3) -> nn.Sequential:
    """The same small network on every rank."""
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(8, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def batches(num_batches: int = 3, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """The same random batches on every rank, in the default dtype."""
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(size, 8, generator=generator),
            torch.randint(4, (size,), generator=generator),
        )
        for _ in range(num_batches)
    ]


def mine(run: Run, *tensors: Tensor) -> list[Tensor]:
    """This rank's equal part of each tensor."""
    return [tensor.chunk(run.world_size)[run.rank] for tensor in tensors]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def alone(model: nn.Module, data: list[tuple[Tensor, Tensor]] | None = None) -> nn.Module:
    """A copy of ``model``, trained in this process alone on whole batches."""
    model = copy.deepcopy(model)
    optimizer = adam(model)
    for x, y in batches() if data is None else data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def together(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Train ``model`` (already made parallel) on this rank's part of each batch."""
    optimizer = optimizer or adam(model)
    for x, y in batches():
        optimizer.zero_grad()
        x, y = mine(run, x, y)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's full value; any other tensor as it is."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach()


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def same_parameters(actual: nn.Module, expected: nn.Module, tolerance: float = TOLERANCE) -> None:
    found = dict(actual.named_parameters())
    wanted = dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        close(whole(found[name]), parameter.detach(), tolerance)


def moved(before: nn.Module, after: nn.Module) -> None:
    """The training did something: a comparison of untrained models would prove nothing."""
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in pairs)


def same_bits(tensor: Tensor) -> None:
    """All ranks hold exactly this tensor."""
    lowest, highest = tensor.detach().clone(), tensor.detach().clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest)
