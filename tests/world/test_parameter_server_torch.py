"""An ordinary torch loop with a parameter server in place of the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from potluck._core.context import DistributedContext
from potluck.parameter_server import SGD, Asynchronous, ElasticAveraging, ParameterServer
from potluck.testing.world import run_world
from potluck.torch import ServerOptimizer

NUM_STEPS = 8


def batches(num_workers: int) -> list[list[torch.Tensor]]:
    """By step, by worker."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_STEPS, num_workers, 16, 4)
    return [list(step) for step in torch.randn(shape, generator=generator, dtype=torch.float64)]


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    # Not by torch's generator, which the ranks of this process share.
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    with torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.copy_(torch.linspace(-1, 1, each.numel()).reshape(each.shape) + number / 10)
    return model


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x)[:, 0] - x.sum(1)).square().mean()


@pytest.mark.parametrize("servers", [1, 2])
def test_synchronous_training_is_that_of_one_process_on_the_whole_batch(servers: int) -> None:
    data = batches(2)

    def run(ctx: DistributedContext) -> list[torch.Tensor]:
        model = small()
        with ParameterServer(ctx, optimizer=SGD(0.1, momentum=0.9), servers=servers) as ps:
            optimizer = ServerOptimizer(model, ps)
            for step in data:
                optimizer.zero_grad()
                loss_of(model, step[ctx.rank]).backward()
                assert optimizer.step()
            assert optimizer.version == NUM_STEPS
        return [each.detach() for each in model.parameters()]

    whole = small()
    optimizer = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    for step in data:
        optimizer.zero_grad()
        (sum(loss_of(whole, part) for part in step) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    for found in run_world(2, run):
        for mine, theirs in zip(found, whole.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "servers"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 3)]
)
def test_asynchronous_training_lowers_the_loss_in_the_models_own_dtype(
    dtype: torch.dtype, servers: int
) -> None:
    data = batches(3)

    def run(ctx: DistributedContext) -> tuple[float, float]:
        model = small(dtype)
        x = torch.cat([each[ctx.rank] for each in data]).to(dtype)
        before = loss_of(model, x).item()
        with ParameterServer(ctx, Asynchronous(), optimizer=SGD(0.05), servers=servers) as ps:
            optimizer = ServerOptimizer(model, ps)
            for _ in range(3):
                for step in data:
                    optimizer.zero_grad()
                    loss_of(model, step[ctx.rank].to(dtype)).backward()
                    optimizer.step()
        return before, loss_of(model, x).item()

    for before, after in run_world(3, run):
        assert after < before / 2


@pytest.mark.parametrize("servers", [1, 2])
def test_elastic_averaging_trains_with_the_workers_own_optimizers(servers: int) -> None:
    data = batches(2)

    def run(ctx: DistributedContext) -> tuple[float, float]:
        model = small()
        x = torch.cat([each[ctx.rank] for each in data])
        before = loss_of(model, x).item()
        mode = ElasticAveraging(alpha=0.4, of="parameters")
        with ParameterServer(ctx, mode, servers=servers) as ps:
            own = torch.optim.SGD(model.parameters(), 0.05)
            optimizer = ServerOptimizer(model, ps, optimizer=own, every=2)
            for _ in range(4):
                for step in data:
                    optimizer.zero_grad()
                    loss_of(model, step[ctx.rank]).backward()
                    optimizer.step()
            assert ps.stats()["model"]["counted"] >= 16
        return before, loss_of(model, x).item()

    for before, after in run_world(2, run):
        assert after < before / 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_learned_temperature_is_trained(world_size: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x

    def run(ctx: DistributedContext) -> torch.Tensor:
        model = Scaled()
        with ParameterServer(ctx, optimizer=SGD(0.5)) as ps:
            optimizer = ServerOptimizer(model, ps)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.tensor(1.0)).backward()
                optimizer.step()
        return model.scale.detach()

    assert run_world(world_size, run) == [torch.tensor(-1.0)] * world_size


def test_a_parameter_without_a_gradient_here_counts_as_zeros() -> None:
    def run(ctx: DistributedContext) -> float:
        model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(1)), "b": torch.zeros(1)})
        model["b"].requires_grad_(True)
        with ParameterServer(ctx, optimizer=SGD(1.0)) as ps:
            optimizer = ServerOptimizer(model, ps)
            model["a" if ctx.rank else "b"].sum().backward()
            optimizer.step()
        return float(model["a"].item())

    assert run_world(2, run) == [-0.5, -0.5]


def test_what_does_not_fit_the_mode_is_an_error() -> None:
    def run(ctx: DistributedContext) -> None:
        model = small()
        own = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(TypeError, match=r"must be a potluck\.ParameterServer"):
            ServerOptimizer(model, ctx)  # type: ignore[arg-type]
        with ParameterServer(ctx) as ps:
            with pytest.raises(TypeError, match="must be a module, not its parameters"):
                ServerOptimizer(model.parameters(), ps)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="the update is made on the server"):
                ServerOptimizer(model, ps, optimizer=own)
            with pytest.raises(ValueError, match="no parameter of the model requires"):
                ServerOptimizer(nn.ReLU(), ps)
            with pytest.raises(ValueError, match="every is 0"):
                ServerOptimizer(model, ps, every=0)
        mode = ElasticAveraging(of="parameters")
        ps = ParameterServer(ctx, mode, name="other")
        with pytest.raises(ValueError, match="needs an optimizer of its own"):
            ServerOptimizer(model, ps)
        ps.close()

    run_world(1, run)


def test_a_model_of_another_dtype_than_the_servers_is_refused_by_name() -> None:
    def run(ctx: DistributedContext) -> None:
        with ParameterServer(ctx) as ps:
            ServerOptimizer(small(torch.float64), ps)
            for dtype in (torch.float32, torch.bfloat16):
                with pytest.raises(ValueError, match=r"'0\.weight' is \w+ here and float64 on"):
                    ServerOptimizer(small(dtype), ps)

    run_world(1, run)
