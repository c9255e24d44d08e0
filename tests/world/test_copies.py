"""Copies and pickles of what wraps a model or holds a group: they work, or say what to copy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from potluck import (
    BF16,
    FP16,
    DistributedContext,
    DistributedKMeansTrainer,
    DistributedNeuralNetTrainer,
    GradientCompressor,
    ParameterServer,
    PowerSGD,
    Quantize,
    RandomK,
    TopK,
    WorkQueue,
)
from potluck.testing.world import run_world
from potluck.torch import (
    DDP,
    CheckpointStore,
    CompressionState,
    DistributedSampler,
    ElasticLoop,
    GradScaler,
    ServerOptimizer,
)


def pickled(each: Any) -> Any:
    return pickle.loads(pickle.dumps(each))  # noqa: S301 (its own bytes)


WAYS: list[Callable[[Any], Any]] = [copy.deepcopy, pickled]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def step(model: nn.Module, seed: int) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.1 * each.grad
            each.grad = None


def test_weights_are_averaged_as_of_the_module_itself() -> None:
    def rank(ctx: DistributedContext) -> None:
        model = DDP(normed(), ctx)
        model.synchronize()
        plain = copy.deepcopy(model)
        mine, right = AveragedModel(model), AveragedModel(plain)
        for seed in range(3):  # equal samples on all ranks: DDP's mean is the gradient of one
            step(model, seed)
            step(plain, seed)
            mine.update_parameters(model)
            right.update_parameters(plain)
        x = torch.ones(2, 3)
        mine.eval(), right.eval()
        torch.testing.assert_close(mine(x), right(x))
        assert not isinstance(mine.module, DDP)
        for name, value in mine.module.named_parameters():
            torch.testing.assert_close(value, right.module.get_parameter(name))

    run_world(2, rank)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_the_wrapper_is_the_module_and_does_not_communicate(
    way: Callable[[Any], Any],
) -> None:
    def rank(ctx: DistributedContext) -> None:
        model = DDP(normed(), ctx, compression=TopK(0.5))
        step(model, 1)
        copied = way(model)
        assert type(copied) is nn.Sequential
        assert copied.state_dict().keys() == model.state_dict().keys()
        if ctx.rank == 0:
            step(copied, 2)  # alone: the others are not called
        assert not torch.equal(copied[0].weight, model.module[0].weight) or ctx.rank
        step(model, 3)  # the wrapper works as before
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        assert type(torch.load(stored, weights_only=False)) is nn.Sequential

    run_world(2, rank)


@pytest.mark.parametrize("way", WAYS)
def test_what_holds_a_group_says_what_to_take(way: Callable[[Any], Any], tmp_path: Path) -> None:
    def rank(ctx: DistributedContext) -> None:
        model = DDP(nn.Linear(2, 2), ctx)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = (torch.ones(4, 2), torch.ones(4, 2))
        server = ParameterServer(ctx)
        queue = WorkQueue(ctx, [1, 2])
        held: list[tuple[Any, str]] = [
            (ElasticLoop(model, optimizer, data, batch_size=2), "an ElasticLoop .*model.module"),
            (
                DistributedNeuralNetTrainer(ctx, input_dim=2, hidden_dims=[3], output_dim=1),
                "DistributedNeuralNetTrainer .*get_parameters.*trainer.model.module",
            ),
            (server, "ParameterServer .*get_parameters"),
            (ServerOptimizer(nn.Linear(2, 2), server), "ParameterServer .*get_parameters"),
            (CompressionState(Quantize(8), model=model), "CompressionState .*state_dict"),
            (queue, "WorkQueue .*can't be copied"),
        ]
        if way is not copy.deepcopy:
            held += [(ctx, "Context .*potluck.init"), (ctx.new_group([0]), "SubGroup .*init")]
        for each, text in held:
            with pytest.raises(TypeError, match=text):
                way(each)
        server.close()
        queue.close()

    run_world(1, rank)


def test_a_copy_of_what_holds_a_context_works_in_the_same_group() -> None:
    def rank(ctx: DistributedContext) -> Any:
        group = ctx.new_group([0, 1])
        assert copy.deepcopy(ctx) is ctx
        assert copy.copy(group) is group
        assert copy.deepcopy(group) is group
        trainer = copy.deepcopy(DistributedKMeansTrainer(ctx, 2))
        trainer.train_epoch(np.arange(8.0).reshape(4, 2) + 100 * ctx.rank)
        sampler = copy.deepcopy(DistributedSampler([1, 2, 3], batch_size=2, ctx=ctx))
        assert list(sampler)
        return trainer.get_centroids()

    np.testing.assert_array_equal(*run_world(2, rank))


@pytest.mark.parametrize("way", [*WAYS, copy.copy])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_copied_store_has_the_directory_and_the_options(
    way: Callable[[Any], Any], asynchronous: bool, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, 2, asynchronous=asynchronous, parts_timeout_s=7)
    store.save({"w": np.ones(3)}, 1)
    store.wait()
    copied = way(store)
    assert copied.load_latest().step == 1
    assert (copied.keep, copied.asynchronous, copied.directory) == (2, asynchronous, tmp_path)
    copied.save({"w": np.ones(3)}, 2)
    copied.wait()
    assert store.load_latest().step == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "strategy", [TopK(0.1), Quantize(8), RandomK(0.1, "k"), PowerSGD(2), FP16(), BF16()], ids=repr
)
def test_a_copied_compressor_goes_on_with_the_residual(
    way: Callable[[Any], Any], strategy: Any
) -> None:
    random = np.random.default_rng(0)
    gradients = random.normal(size=(3, 64, 8)).astype(np.float32)
    compressor = GradientCompressor(strategy)
    compressor.compress(gradients[0])
    copied = way(compressor)
    for each in gradients[1:]:
        mine, theirs = compressor.compress(each), copied.compress(each)
        assert np.array_equal(compressor.decompress(mine), copied.decompress(theirs))
    assert way(GradScaler()).state_dict() == GradScaler().state_dict()
