"""Complex and sparse gradients: right, or refused by the parameter's name before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import (
    DistributedNeuralNetTrainer,
    ParameterServer,
    Quantize,
    TopK,
    TrainingStrategy,
)
from potluck._core.context import DistributedContext
from potluck.parameter_server import Adam
from potluck.testing.world import run_world
from potluck.torch import DDP, DiLoCo, ElasticLoop, Gossip, LocalSGD, ServerOptimizer

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
WORDS = torch.arange(32) % 5
Y = torch.randn(32, 1, generator=torch.Generator().manual_seed(2))


class Waves(nn.Module):
    """A complex parameter, and a complex buffer that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 0.5 - 1j, 0.3j]))
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.mean() * (1 - 2j)
        return self.gain * (x * self.phase).sum(1, keepdim=True).abs()


class Words(nn.Module):
    """A table whose gradients are sparse, which shows only in backward if it is ``hidden``."""

    def __init__(self, *, is_hidden: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Embedding(5, 1, sparse=not is_hidden)
        self.is_hidden = is_hidden
        with torch.no_grad():
            self.table.weight.copy_(torch.randn(5, 1, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table.weight, sparse=True) if self.is_hidden else self.table(x)


def hidden() -> Words:
    return Words(is_hidden=True)


Batch = tuple[Tensor, Tensor]


def train(
    ctx: DistributedContext, make: Callable[[], nn.Module], strategy: Any
) -> tuple[nn.Module, list[Batch]]:
    """The model after training, and this rank's batches."""
    net, taken = make(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    data = X if isinstance(net, Waves) else WORDS
    job = ElasticLoop(net, optimizer, (data, Y), batch_size=8, epochs=2, strategy=strategy, ctx=ctx)
    for x, y in job:
        with job.step():
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
        taken.append((x, y))
    return net, taken


def by_hand(make: Callable[[], nn.Module], batches: list[list[Batch]], every: int) -> nn.Module:
    """Each rank alone, and after ``every`` steps the mean of all parameters and buffers."""
    nets = [make() for _ in batches]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
    for step in range(len(batches[0])):
        for net, optimizer, mine in zip(nets, optimizers, batches, strict=True):
            optimizer.zero_grad()
            F.mse_loss(net(mine[step][0]), mine[step][1]).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            for parts in zip(*(net.state_dict().values() for net in nets), strict=True):
                mean = torch.stack([part.detach() for part in parts]).mean(0)
                for part in parts:
                    part.copy_(mean)
    return nets[0]


@pytest.mark.parametrize("make", [Waves, Words, hidden])
@pytest.mark.parametrize("strategy", [LocalSGD(every=2), Gossip(every=1)], ids=repr)
def test_rounds_are_right(make: Callable[[], nn.Module], strategy: Any) -> None:
    found = run_world(2, lambda ctx: train(ctx, make, strategy))
    expected = by_hand(make, [batches for _, batches in found], strategy.every)
    for net, _ in found:
        for name, mine in net.state_dict().items():
            torch.testing.assert_close(mine, expected.state_dict()[name], msg=name)


@pytest.mark.parametrize("compression", [Quantize(8), TopK(1.0)], ids=repr)
def test_compressed_rounds_send_complex_numbers_as_they_are(compression: Any) -> None:
    def run(ctx: DistributedContext) -> list[nn.Module]:
        return [
            train(ctx, Waves, DiLoCo(every=2, compression=each))[0] for each in (None, compression)
        ]

    for plain, compressed in run_world(2, run):
        assert (plain.phase.imag - Waves().phase.imag).abs().max() > 0.05, "it is trained"
        torch.testing.assert_close(compressed.phase, plain.phase, rtol=0.01, atol=0.01)
        torch.testing.assert_close(compressed.seen, plain.seen)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Waves, r"phase is torch.complex64; only floats can be averaged"),
        (Words, r"table.weight gets sparse gradients.*make the Embedding with sparse=False"),
    ],
)
def test_ddp_and_trainers_that_reduce_gradients_refuse_them(
    make: Callable[[], nn.Module], text: str
) -> None:
    def run(ctx: DistributedContext) -> None:
        for compression in (None, Quantize(8)):
            with pytest.raises(TypeError, match=text):
                DDP(make(), ctx, compression=compression)
        data = X if make is Waves else WORDS
        for strategy in (
            TrainingStrategy.DATA_PARALLEL,
            TrainingStrategy.DECENTRALIZED,
            TrainingStrategy.FEDERATED,
        ):
            trainer = DistributedNeuralNetTrainer
            with pytest.raises(TypeError, match=text):
                trainer(ctx, strategy, model=make(), loss=F.mse_loss).train_epoch(data, Y)
        ctx.barrier()

    run_world(2, run)


def test_ddp_names_a_parameter_whose_gradient_is_sparse_in_backward() -> None:
    def run(ctx: DistributedContext) -> None:
        model = DDP(hidden(), ctx)
        with pytest.raises(
            TypeError, match=r"'table.weight' has a gradient of layout torch.sparse"
        ):
            F.mse_loss(model(WORDS), Y).backward()

    run_world(2, run)


@pytest.mark.parametrize("make", [Waves, Words, hidden])
def test_a_parameter_server_moves_as_torch_does(make: Callable[[], nn.Module]) -> None:
    """Adam takes real and imaginary parts as numbers of their own, and sparse gradients whole."""
    data = X if make is Waves else WORDS

    def run(ctx: DistributedContext) -> nn.Module:
        net = make()
        with ParameterServer(ctx, optimizer=Adam(0.05)) as ps:
            server = ServerOptimizer(net, ps)
            for _ in range(4):
                server.zero_grad()
                F.mse_loss(net(data), Y).backward()
                server.step()
        return net

    alone = make()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        F.mse_loss(alone(data), Y).backward()
        for each in alone.parameters():
            each.grad = each.grad.to_dense()
        optimizer.step()
    for net in run_world(2, run):
        for mine, expected in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_aggregated_gradients() -> None:
    def run(ctx: DistributedContext) -> None:
        trainer = DistributedNeuralNetTrainer(ctx, input_dim=3, hidden_dims=[2], output_dim=1)
        given = {"w": np.array([1 + 1j * ctx.rank, 3e38 - 3e38j], np.complex64)}
        assert trainer.aggregate_gradients(given)["w"][0] == 1 + 0.5j
        assert np.isfinite(trainer.aggregate_gradients(given)["w"]).all()

    run_world(2, run)
