"""Strategies that are rehearsed for a plan: the real collectives, in gradients of the model's
sizes."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from potluck._core.context import DistributedContext
from potluck.compressors import BF16
from potluck.testing.world import run_world
from potluck.torch import DDP, DataParallel, ElasticLoop
from potluck.torch.planning import StandIn, measure, rehearse
from potluck.training.planner import Basis, Measured, make_plan, parts, predict, to_rehearse

SHAPES = ((64, 64), (64,), (3, 64, 64), ())
COMPUTE_S = 0.01


def apart(measured: Measured) -> Measured:
    """As if the ranks of one process were on machines of their own."""
    nodes = tuple(f"machine {rank}" for rank in range(measured.world_size))
    return msgspec.structs.replace(measured, nodes=nodes)


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_candidate_is_rehearsed_and_the_plan_is_made_from_that(world_size: int) -> None:
    def work(ctx: DistributedContext) -> Measured:
        return rehearse(ctx, apart(measure(ctx, SHAPES, COMPUTE_S)))

    found = run_world(world_size, work)
    assert found[0] == found[1], "all ranks have the same figures"
    measured = found[0]
    tried = [each.name for each in to_rehearse(measured)]
    assert ("gossip" in tried) == (world_size == 3)
    usual = [each for each in measured.rehearsed if each.bucket_size_mb == 25]
    assert [each.name for each in usual] == [
        each.name for each in to_rehearse(measured) for _ in parts(measured, each)
    ]
    plan = make_plan(measured)
    assert [each.candidate.name for each in plan.predictions] == tried
    for each in plan.predictions:
        assert each.basis is Basis.REHEARSED
        assert each.step_s >= COMPUTE_S
    assert predict(measured, plan.choice) == plan.chosen


def test_on_one_machine_nothing_is_rehearsed() -> None:
    measured, _ = run_world(2, lambda ctx: measure(ctx, SHAPES, COMPUTE_S))
    assert measured.rehearsed == ()
    assert make_plan(measured).choice.name == "plain"


def test_the_gradients_of_a_stand_in_come_last_parameter_first() -> None:
    stand_in = StandIn(SHAPES)
    order: list[tuple[int, ...]] = []
    for weight in stand_in.weights:
        weight.register_post_accumulate_grad_hook(lambda p: order.append(tuple(p.shape)))
    torch.autograd.backward(stand_in())
    assert order == list(reversed(SHAPES))
    for weight in stand_in.weights:
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        assert weight.grad.abs().sum() > 0
    before = [weight.detach().clone() for weight in stand_in.weights]
    stand_in.drift()
    assert all((w != b).any() for w, b in zip(stand_in.weights, before, strict=True))


def test_no_layer_of_a_stand_in_computes_while_a_hook_is_at_work() -> None:
    """As in a real backward: what encodes a gradient is not hidden in the next layer's waits."""
    stand_in = StandIn(SHAPES)
    stand_in.backward_s = 0.05

    def work(_: torch.Tensor) -> None:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass

    for weight in stand_in.weights:
        weight.register_post_accumulate_grad_hook(work)
    began = time.perf_counter()
    torch.autograd.backward(stand_in())
    assert time.perf_counter() - began >= 0.05 + len(SHAPES) * 0.02


def test_a_strategy_sets_the_buckets_and_the_algorithm_of_its_model() -> None:
    """Two layers of 256 KiB: one bucket, until the strategy asks for smaller ones."""

    def work(ctx: DistributedContext) -> tuple[list[int], set[str], Any]:
        torch.manual_seed(0)
        model = DDP(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = (torch.randn(16, 256),)
        strategy = DataParallel(bucket_size_mb=0.25, algorithm="direct")
        job = ElasticLoop(model, optimizer, data, batch_size=8, shuffle=False, strategy=strategy)
        for (x,) in job:
            with job.step():
                optimizer.zero_grad()
                torch.autograd.backward(model(x).square().mean())
                optimizer.step()
        sizes = [bucket.numel for bucket in model._reducer._buckets]
        used = set(ctx.stats()["operations"]["all_reduce"]["algorithms"])
        return sizes, used, [p.detach().numpy().copy() for p in model.parameters()]

    found = run_world(2, work)
    sizes, used, parameters = found[0]
    assert len(sizes) > 1
    assert sum(sizes) == 2 * (256 * 256 + 256)
    assert "direct" in used
    for mine, other in zip(parameters, found[1][2], strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_ddp_keeps_its_own_compression_where_the_strategy_names_none() -> None:
    def work(ctx: DistributedContext) -> tuple[Any, Any]:
        model = DDP(nn.Linear(128, 64), ctx, compression=BF16(), error_feedback=False)
        model.follow(DataParallel(bucket_size_mb=5))
        kept = model.compression.compressors[0]
        model(torch.ones(2, 128)).sum().backward()
        return kept, model.compression.capture()

    assert run_world(2, work) == [(BF16(), {})] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bucket_size_mb": 0}, "bucket_size_mb is 0; it must be positive and finite"),
        ({"bucket_size_mb": math.inf}, "bucket_size_mb is inf"),
        ({"algorithm": "star"}, "algorithm is 'star'; it is one of ring, tree, direct"),
        ({"algorithm": "ring", "compression": BF16()}, "compressed gradients take the algorithm"),
    ],
)
def test_options_of_data_parallelism_that_make_no_sense(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataParallel(**options)
