"""Compression beside backward and beside the network, and in units of a loss scale."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck import PowerSGD, RandomK, TopK
from potluck._core.context import DistributedContext
from potluck.compressors import Compressor
from potluck.testing.world import run_world
from potluck.torch import DDP, ElasticLoop, GradScaler, LossScale
from potluck.torch.encoding import Encoder

DEADLINE_S = 30
NUM_LAYERS = 4
BYTES = 4 * 64 * 64
SMALL_BUCKETS = {"bucket_size_mb": BYTES / 2**20, "dense_below": 0}
"""One layer in each."""


def layers() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(NUM_LAYERS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


class Told(TopK):
    """TopK that calls ``before(number)`` when it begins to compress bucket ``number``."""

    def __init__(self, before: Callable[[int], None]) -> None:
        super().__init__(0.5)
        object.__setattr__(self, "before", before)
        object.__setattr__(self, "num", 0)

    def compress(self, source: Any, residual: Any, step: int) -> Any:
        number = self.num
        object.__setattr__(self, "num", number + 1)
        self.before(number)
        return super().compress(source, residual, step)


def test_backward_goes_on_while_buckets_are_encoded() -> None:
    """The first bucket is encoded only when autograd has reached the first layer, the last of
    backward. If autograd's thread encoded, it would never."""

    def work(ctx: DistributedContext) -> list[bool]:
        reached, waited = threading.Event(), []
        strategy = Told(lambda number: waited.append(reached.wait(DEADLINE_S)))
        model = DDP(layers(), ctx, compression=strategy, **SMALL_BUCKETS)
        model.module[0].weight.register_hook(lambda gradient: reached.set())
        model(torch.ones(2, 64)).sum().backward()
        return waited

    assert run_world(2, work) == [[True] * NUM_LAYERS] * 2


class Counted(DistributedContext):
    """A context that keeps the Work of each payload's all_gather."""

    works: list[Any]

    def all_gather(self, array: Any, *, async_op: bool = False, **options: Any) -> Any:
        work = super().all_gather(array, async_op=async_op, **options)
        if async_op:
            self.works.append(work)
        return work


def test_what_is_encoded_is_on_the_wire_while_the_rest_is_not_encoded_yet() -> None:
    """Bucket n + 1 is encoded only when bucket n has crossed the wire: of what is ready to be sent
    nothing waits for an encoder, or for the end of backward."""

    def work(ctx: DistributedContext) -> list[int]:
        ctx.__class__, ctx.works = Counted, []  # type: ignore[attr-defined]
        sent = []

        def before(number: int) -> None:
            if number:
                ctx.works[number - 1].wait(DEADLINE_S)  # type: ignore[attr-defined]
            sent.append(sum(link["bytes_sent"] for link in ctx.stats()["links"].values()))

        model = DDP(layers(), ctx, compression=Told(before), **SMALL_BUCKETS)
        model(torch.ones(2, 64)).sum().backward()
        return sent

    for sent in run_world(2, work):
        payload = TopK(0.5).payload_bytes(64 * 64)
        assert len(sent) == NUM_LAYERS
        assert all(after - before >= payload for before, after in pairwise(sent))


def test_an_error_of_a_strategy_comes_out_of_backward_and_leaves_residuals_as_they_were() -> None:
    def work(ctx: DistributedContext) -> None:
        broken = threading.Event()

        def before(number: int) -> None:
            if broken.is_set() and number % NUM_LAYERS == 2:
                raise ArithmeticError("no way to compress this")

        model = DDP(layers(), ctx, compression=Told(before), **SMALL_BUCKETS)
        x = torch.ones(2, 64)
        model(x).sum().backward()
        kept = model.compression.capture()
        broken.set()
        with pytest.raises(ArithmeticError, match="no way"):
            model(x).sum().backward()
        found = model.compression.capture()
        assert all(np.array_equal(found[name], kept[name]) for name in kept)

    run_world(1 + 1, work)
    gc.collect()  # a traceback of the error may refer to the model, and the thread ends with it
    encoders = [each for each in threading.enumerate() if each.name == "potluck-encode"]
    for each in encoders:
        each.join(DEADLINE_S)
    assert not any(each.is_alive() for each in encoders)


class Late(Encoder):
    """An encoder that begins nothing before it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Callable[[], None]] = []

    def add(self, task: Callable[[], None]) -> None:
        self.late.append(task)

    def drain(self) -> None:
        for task in self.late:
            super().add(task)
        self.late = []
        super().drain()

    def drop(self) -> None:
        self.late = []
        super().drop()


def test_a_backward_that_raised_is_forgotten_alike_by_ranks_of_unlike_speed() -> None:
    """When the script's error comes, a rank has sent three buckets, and the other one none."""

    def fails(_: torch.Tensor) -> None:
        raise ArithmeticError("of the script")

    def work(ctx: DistributedContext) -> torch.Tensor:
        model = DDP(layers(), ctx, compression=TopK(0.1), **SMALL_BUCKETS)
        if ctx.rank == 1:
            model.compression.encoder = Late()
        hook = model.module[0].weight.register_hook(fails)
        with pytest.raises(ArithmeticError, match="of the script"):
            model(torch.ones(2, 64)).sum().backward()
        hook.remove()
        model.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        found = model.module[0].weight.grad
        assert found is not None
        return found

    one, two = run_world(2, work)
    assert torch.equal(one, two)
    assert one.any()


class Eager(Encoder):
    """An encoder that is always done."""

    def add(self, task: Callable[[], None]) -> None:
        super().add(task)
        super().drain()


class Sparse(nn.Module):
    """Layers, and an embedding before them whose gradient no reducer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 64))
        self.layers = layers()

    def forward(self, x: torch.Tensor, is_looked_up: bool) -> torch.Tensor:
        found = F.embedding(x, self.table, sparse=True) if is_looked_up else torch.ones(2, 64)
        out: torch.Tensor = self.layers(found)
        return out


def test_a_gradient_that_is_refused_leaves_ranks_of_unlike_speed_at_the_same_call() -> None:
    """When it is refused a rank has sent four buckets, and the other one none."""

    def work(ctx: DistributedContext) -> list[torch.Tensor | None]:
        model = DDP(Sparse(), ctx, compression=TopK(0.1), **SMALL_BUCKETS)
        model.compression.encoder = Late() if ctx.rank else Eager()
        with pytest.raises(TypeError, match="which can't be reduced: make the layer"):
            model(torch.tensor([1, 2]), True).sum().backward()
        model.zero_grad()
        model(torch.tensor([1, 2]), False).sum().backward()
        return [each.weight.grad for each in model.module.layers]

    one, two = run_world(2, work)
    for mine, other in zip(one, two, strict=True):
        assert mine.any()
        assert torch.equal(mine, other)


@pytest.mark.parametrize("strategy", [TopK(0.1), PowerSGD(2, start_step=0)], ids=repr)
def test_a_backward_that_raised_half_way_counts_for_nothing(strategy: Compressor) -> None:
    """The script's own error, of which the reducer is not told, and which the script survives."""

    def fails(_: torch.Tensor) -> None:
        raise ArithmeticError("of the script")

    def work(ctx: DistributedContext) -> None:
        found = []
        for disturbed in (False, True):
            model = DDP(layers(), ctx, compression=strategy, **SMALL_BUCKETS)
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(ctx.rank))
            model(x).pow(2).mean().backward()
            model.zero_grad()
            if disturbed:
                hook = model.module[0].weight.register_hook(fails)
                with pytest.raises(ArithmeticError, match="of the script"):
                    model(x).pow(2).mean().backward()
                hook.remove()
                model.zero_grad()
            model(x).pow(2).mean().backward()
            kept = model.compression.capture()
            found.append(
                [p.grad for p in model.parameters()] + list(map(torch.tensor, kept.values()))
            )
        assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))

    run_world(2, work)


@pytest.mark.parametrize("strategy", [TopK(0.1), RandomK(0.3), PowerSGD(2, start_step=0)], ids=repr)
def test_residuals_follow_the_loss_scale(strategy: Compressor) -> None:
    """Scales that are powers of two change no bit of what is decoded."""

    def trained(ctx: DistributedContext, scales: list[float]) -> list[torch.Tensor]:
        model = DDP(layers(), ctx, compression=strategy, dense_below=0)
        generator = torch.Generator().manual_seed(ctx.rank)
        found = []
        for scale in scales:
            model.zero_grad()
            model.loss_scale = scale
            x = torch.randn(4, 64, generator=generator)
            (model(x).pow(2).mean() * scale).backward()
            found += [p.grad / scale for p in model.parameters()]
        return found

    def work(ctx: DistributedContext) -> None:
        pairs = zip(trained(ctx, [1, 1, 1, 1]), trained(ctx, [1, 1024, 2, 512]), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)

    run_world(2, work)


def test_a_skipped_step_leaves_residuals_as_they_were_and_the_scale_counts() -> None:
    """An elastic training whose scaler skips a step ends with the bits of one without it."""

    def trained(ctx: DistributedContext, spoilt: int | None) -> list[torch.Tensor]:
        model = DDP(layers(), ctx, compression=TopK(0.1), dense_below=0)
        scaler = GradScaler(LossScale(scale=1024.0))
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        epochs = 4 if spoilt is None else 5
        job = ElasticLoop(
            model, optimizer, (x,), batch_size=4, shuffle=False, epochs=epochs,
            also={"scaler": scaler},
        )  # fmt: skip
        for (batch,) in job:
            with job.step():
                optimizer.zero_grad()
                loss = model(batch).pow(2).mean()
                if job.step_number == spoilt:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert job.num_skipped == (0 if spoilt is None else 1)
        assert scaler.factor == (1024 if spoilt is None else 512)
        kept = model.compression.capture()
        return [*model.parameters(), *(torch.tensor(kept[name]) for name in sorted(kept))]

    def work(ctx: DistributedContext) -> list[torch.Tensor]:
        return trained(ctx, None)

    plain = run_world(2, work)
    skipped = run_world(2, lambda ctx: trained(ctx, 2))
    for without, with_one in zip(plain, skipped, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(without, with_one, strict=True))


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan")])
def test_a_loss_scale_that_is_none(scale: float) -> None:
    def work(ctx: DistributedContext) -> None:
        model = DDP(layers(), ctx, compression=TopK(0.1))
        with pytest.raises(ValueError, match=r"the loss scale is .*; it must be positive"):
            model.loss_scale = scale

    run_world(1, work)
