"""One rank trains on a CUDA GPU, the others on processors. Skipped where there is no GPU.

The ranks are threads of one process, so only one may have a GPU: torch computes all backwards of a
GPU in one thread, in which ranks would wait for each other. ``test_cuda_processes.py`` has more.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import potluck
from potluck import BF16, FP16, PowerSGD, Quantize, RandomK, TopK
from potluck._core.context import DistributedContext
from potluck.parameter_server import SGD, Synchronous
from potluck.testing.elastic import ElasticWorld
from potluck.testing.world import WorldError, run_world
from potluck.torch import (
    DDP,
    DiLoCo,
    ElasticLoop,
    Gossip,
    GradScaler,
    LocalSGD,
    Policy,
    ServerOptimizer,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(192, 20, generator=GENERATOR)
Y = torch.randint(0, 5, (192,), generator=GENERATOR)
_START = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
COMPRESSIONS = [
    None, FP16(), BF16(), Quantize(bits=8), Quantize(bits=4), TopK(0.1), RandomK(0.2),
    PowerSGD(2, start_step=0, min_rate=1),
]  # fmt: skip
STRATEGIES = [
    None, LocalSGD(every=4), DiLoCo(every=6, fragments=2, delay=1),
    DiLoCo(every=6, compression=TopK(0.1, bits=2)), Gossip(),
]  # fmt: skip
DEVICES = ("cuda", "cpu", "cpu")


def train(
    ctx: DistributedContext,
    devices: tuple[str, ...] = DEVICES,
    *,
    compression: Any = None,
    strategy: Any = None,
    half: bool = False,
    checkpoint: Path | None = None,
    epochs: int = 3,
) -> ElasticLoop:
    device = torch.device(devices[ctx.rank % len(devices)])
    inner = copy.deepcopy(_START).to(device)
    model = DDP(inner, ctx, compression=compression, bucket_size_mb=0.004)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = GradScaler(enabled=half)
    job = ElasticLoop(
        model, optimizer, (X, Y), batch_size=24, epochs=epochs, seed=5, strategy=strategy,
        policy=Policy(hash_every=5, save_every=6, recovery_s=30), also={"scaler": scaler},
        checkpoint=checkpoint,
    )  # fmt: skip
    for x, y in job:
        with job.step():
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            job.log(loss=loss)
            scaler.step(optimizer)
            scaler.update()
    return job


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_replicas_end_equal_with_every_compression(compression: Any) -> None:
    found = run_world(2, lambda ctx: train(ctx, compression=compression))
    assert len({job.parameter_hash() for job in found}) == 1
    if compression is None:  # else the losses are others
        serial = run_world(1, lambda ctx: train(ctx, ("cuda",)))[0]
        assert found[0].losses[:6] == pytest.approx(serial.losses[:6], rel=0.05)
    assert found[0].losses[-1] < found[0].losses[0]


@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=repr)
def test_replicas_end_equal_with_every_strategy(strategy: Any) -> None:
    found = run_world(2, lambda ctx: train(ctx, strategy=strategy, epochs=6))
    assert len({job.parameter_hash() for job in found}) == 1
    assert all(math.isfinite(job.losses[-1]) for job in found)


def test_gradients_on_the_gpu_are_those_of_one_process() -> None:
    x, y = X.double(), Y
    whole = copy.deepcopy(_START[0]).double().cuda()
    F.cross_entropy(whole(x.cuda()), y.cuda()).backward()

    def rank(ctx: DistributedContext) -> list[Any]:
        device = DEVICES[ctx.rank]
        model = DDP(copy.deepcopy(_START[0]).double().to(device), ctx, bucket_size_mb=1e-3)
        half = slice(ctx.rank * 96, (ctx.rank + 1) * 96)
        F.cross_entropy(model(x[half].to(device)), y[half].to(device)).backward()
        assert all(each.grad.device.type == device for each in model.parameters())
        return [each.grad.cpu() for each in model.parameters()]

    for gradients in run_world(2, rank):
        for mine, right in zip(gradients, whole.parameters(), strict=True):
            torch.testing.assert_close(mine, right.grad.cpu(), rtol=1e-12, atol=1e-14)


def test_mixed_precision_with_a_loss_scale() -> None:
    found = run_world(2, lambda ctx: train(ctx, half=True))
    assert len({job.parameter_hash() for job in found}) == 1
    assert found[0].losses[-1] < found[0].losses[0]


@pytest.mark.parametrize("strategy", STRATEGIES[:3], ids=repr)
@pytest.mark.parametrize(("victim", "moment"), [("0", 9), ("0", 20), ("0", 31), ("1", 20)])
def test_whoever_dies_the_others_go_on(strategy: Any, victim: str, moment: int) -> None:
    results = ElasticWorld(
        3,
        lambda ctx: train(ctx, strategy=strategy),
        dies=lambda worker, name, number: worker == victim and number == moment,
    ).run()
    assert len(results) == 2
    assert len({job.parameter_hash() for job in results.values()}) == 1


def test_a_checkpoint_of_a_gpu_is_resumed_on_a_processor(tmp_path: Path) -> None:
    first = run_world(2, lambda ctx: train(ctx, checkpoint=tmp_path, epochs=2))[0]
    job = run_world(1, lambda ctx: train(ctx, ("cpu",), checkpoint=tmp_path, epochs=3))[0]
    assert job.step_number == 24
    assert len(job.losses) == 24 - first.step_number


def test_nan_on_the_gpu_is_counted_by_name() -> None:
    def rank(ctx: DistributedContext) -> Any:
        device = DEVICES[ctx.rank]
        model = DDP(nn.Linear(20, 2000).to(device), ctx, compression=Quantize(bits=8))
        x = X.clone()
        if device == "cuda":
            x[0, 0] = torch.nan
        F.cross_entropy(model(x.to(device)), Y.to(device)).backward()
        return dict(model.num_nonfinite)

    found = run_world(2, rank)
    assert all(each["weight"] > 0 for each in found)


def test_a_parameter_server_trains_a_model_on_the_gpu() -> None:
    def rank(ctx: DistributedContext) -> list[Any]:
        model = copy.deepcopy(_START).to(DEVICES[ctx.rank])
        ps = potluck.ParameterServer(ctx, Synchronous(), optimizer=SGD(0.1))
        optimizer = ServerOptimizer(model, ps)
        for _ in range(8):
            optimizer.zero_grad()
            x, y = X.to(DEVICES[ctx.rank]), Y.to(DEVICES[ctx.rank])
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ps.close()
        assert next(model.parameters()).device.type == DEVICES[ctx.rank]
        return [each.detach().cpu() for each in model.parameters()]

    one, other = run_world(2, rank)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_rank_whose_gpu_runs_out_of_memory_names_itself_everywhere() -> None:
    def rank(ctx: DistributedContext) -> None:
        def forward(x: Any) -> Any:
            if ctx.rank == 0:
                torch.empty(1 << 50, device="cuda")
            return x

        device = DEVICES[ctx.rank]
        model = DDP(copy.deepcopy(_START).to(device), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = ElasticLoop(model, optimizer, (X, Y), batch_size=24)
        for x, y in job:
            with job.step():
                loss = F.cross_entropy(model(forward(x.to(device))), y.to(device))
                loss.backward()
                optimizer.step()

    with pytest.raises(WorldError) as caught:
        run_world(2, rank)
    assert "out of memory" in str(caught.value.errors[0]).lower()
    assert "rank 0" in str(caught.value.errors[1])


@pytest.mark.parametrize("strategy", potluck.TrainingStrategy)
def test_a_trainer_computes_on_the_device_that_it_is_told(
    strategy: potluck.TrainingStrategy,
) -> None:
    """By every strategy, with unequal parts; its getters give arrays of the host."""

    def work(ctx: DistributedContext) -> Any:
        device = DEVICES[ctx.rank]
        here = (slice(0, 100), slice(100, 150), slice(150, 192))[ctx.rank]
        sizes = {"input_dim": 20, "hidden_dims": [64, 32], "output_dim": 5}
        with potluck.DistributedNeuralNetTrainer(
            ctx, strategy, device=device, batch_size=24, **sizes
        ) as trainer:
            loss = trainer.train(X[here], Y[here], epochs=8)
            assert {p.device.type for p in trainer.model.parameters()} == {device}
            assert trainer.get_parameters().keys() == {
                f"{layer}.{name}" for layer in (0, 2, 4) for name in ("weight", "bias")
            }
            return loss, trainer.predict(X), trainer.get_parameters()

    found = run_world(3, work)
    for loss, outputs, parameters in found:
        assert loss == found[0][0] < 1.5
        torch.testing.assert_close(outputs, found[0][1], atol=1e-3, rtol=1e-3)
        for name, each in parameters.items():
            torch.testing.assert_close(each, found[0][2][name], atol=1e-5, rtol=1e-4)
