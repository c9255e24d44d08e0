"""Steps that are computed in parts: the same gradient, exactly, as of the whole batch at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, ElasticLoop, GradScaler, NoiseBatching, Policy, clip_grad_norm_

GENERATOR = torch.Generator().manual_seed(8)
X = torch.randn(52, 6, generator=GENERATOR, dtype=torch.float64)
Y = X @ torch.randn(6, 2, generator=GENERATOR, dtype=torch.float64)


class Net(nn.Module):
    """``side`` is used for samples of one kind only: by some parts, and not by others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.side = nn.Linear(6, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found = self.body(x)
        if self.training and (x[:, 0] > 0.8).any():
            found = found + self.side(x) * (x[:, :1] > 0.8)
        return found


torch.manual_seed(2)
_START = Net().double()


class Training:
    """A regression under Adam. ``most``: what the worker computes at once, 0 for everything."""

    def __init__(self, ctx: DistributedContext, most: int, *, is_ddp: bool = True, **options: Any):
        self.ctx = ctx
        self.inner = copy.deepcopy(_START)
        compression = options.pop("compression", None)
        self.model: nn.Module = self.inner
        if is_ddp:
            self.model = DDP(self.inner, ctx, compression=compression, dense_below=0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.03)
        self.scaler = GradScaler(enabled=options.pop("scales", False))
        self.clip = options.pop("clip", None)
        self.means: list[float] = []
        self.sizes: list[int] = []
        data = X, Y, torch.arange(len(X))
        if "samples" in options:
            data = X[ctx.rank :: 2], Y[ctx.rank :: 2], torch.arange(len(X))[ctx.rank :: 2]
        self.job = ElasticLoop(
            self.model,
            self.optimizer,
            data,
            batch_size=20,
            epochs=3,
            ctx=ctx,
            also={"scaler": self.scaler},
            policy=options.pop("policy", Policy(hash_every=1, recovery_s=100)),
            **options,
        )
        self.job._training.cap.most = most
        self.seen = np.zeros(len(X), np.int64)
        self.before_backward: Callable[[int], None] = lambda size: None

    def run(self) -> Training:
        for x, y, index in self.job:
            with self.job.step():
                self.optimizer.zero_grad()
                loss = F.mse_loss(self.model(x), y)
                self.before_backward(len(x))
                self.scaler.scale(loss).backward()
                mean = self.job.average(target=y.mean())["target"]
                self.job.log(loss=loss)
                if self.clip is not None:
                    self.scaler.unscale_(self.optimizer)
                    self.clip(self.model.parameters(), 0.3)
                self.sizes.append(len(x))
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.means.append(mean)
            self.seen[index] += 1
        return self

    def parameters(self) -> torch.Tensor:
        return torch.cat([each.detach().reshape(-1) for each in self.inner.parameters()])


def whole(**options: Any) -> Training:
    with DistributedContext(LocalBackend()) as ctx:
        return Training(ctx, 0, **options).run()


def check(training: Training, expected: Training) -> None:
    torch.testing.assert_close(training.parameters(), expected.parameters(), rtol=0, atol=1e-10)
    assert training.job.losses == pytest.approx(expected.job.losses, abs=1e-10)
    assert training.means == pytest.approx(expected.means, abs=1e-10)


@pytest.mark.parametrize("is_ddp", [True, False])
@pytest.mark.parametrize("most", [1, 7, 19])
def test_one_worker_in_parts_trains_as_with_the_whole_batch(most: int, is_ddp: bool) -> None:
    with DistributedContext(LocalBackend()) as ctx:
        training = Training(ctx, most, is_ddp=is_ddp).run()
    check(training, whole())
    assert (training.seen == 3).all()
    assert max(training.sizes) <= most
    assert training.job.step_number == 9


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": clip_grad_norm_},
        {"clip": torch.nn.utils.clip_grad_norm_},
        {"scales": True},
        {"scales": True, "clip": clip_grad_norm_},
        {"num_workers": 1},
    ],
    ids=["plain", "clip", "torch-clip", "scales", "scales-clip", "loader"],
)
def test_unlike_workers_train_as_one_with_the_whole_batch(options: dict[str, Any]) -> None:
    """Of 20 samples they hold 2 + 3 + 4 at once: three parts of at most so many."""
    results = run_world(3, lambda ctx: Training(ctx, (2, 3, 4)[ctx.rank], **options).run())
    expected = whole(**{k: v for k, v in options.items() if k != "num_workers"})
    for rank, training in enumerate(results):
        check(training, expected)
        assert max(training.sizes) <= (2, 3, 4)[rank]
        assert training.job.shares == (6, 7, 7)
    assert (sum(training.seen for training in results) == 3).all()


def test_a_worker_without_a_bound_computes_the_rest_at_once() -> None:
    results = run_world(2, lambda ctx: Training(ctx, (4, 0)[ctx.rank]).run())
    expected = whole()
    for training in results:
        check(training, expected)
        assert training.job.shares == (4, 16)
    assert results[1].sizes == [16, 16, 8] * 3


def test_workers_with_samples_of_their_own_compute_these_in_parts() -> None:
    def work(ctx: DistributedContext, most: int) -> Training:
        return Training(ctx, most, samples="own").run()

    plain = run_world(2, lambda ctx: work(ctx, 0))
    for training, expected in zip(run_world(2, lambda ctx: work(ctx, 3)), plain, strict=True):
        check(training, expected)
        assert max(training.sizes) == 3


def test_compressed_gradients_are_those_of_the_whole_share() -> None:
    from potluck.compressors import TopK

    def work(ctx: DistributedContext, most: int) -> Training:
        return Training(ctx, most, compression=TopK(0.2)).run()

    plain = run_world(2, lambda ctx: work(ctx, 0))
    for training, expected in zip(run_world(2, lambda ctx: work(ctx, 3)), plain, strict=True):
        check(training, expected)


def test_the_noise_of_a_step_in_parts_is_not_measured() -> None:
    """Only that of its last part could be."""
    batching = NoiseBatching(min_batch=4, max_batch=40)
    policy = Policy(hash_every=1, adapt_every=2, batching=batching)

    def work(ctx: DistributedContext) -> Training:
        return Training(ctx, 3, policy=policy).run()

    for training in run_world(2, work):
        assert np.isnan(training.job.noise_scale)


def test_two_backwards_in_the_last_part_are_an_error_that_says_what_to_do() -> None:
    def work(ctx: DistributedContext) -> None:
        training = Training(ctx, 3)
        for x, y, _ in training.job:
            with training.job.step():
                F.mse_loss(training.model(x), y).backward()
                F.l1_loss(training.model(x), y).backward()
                training.optimizer.step()

    with pytest.raises(WorldError, match="add the losses up first"):
        run_world(2, work)


# ---------------------------------------------------------------- memory that runs out


def short_of_memory(fits: int) -> Callable[[int], None]:
    """Before a backward: the graph of more samples than so many does not fit."""

    def look(size: int) -> None:
        if size > fits:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ...")

    return look


def test_a_batch_that_fits_into_no_memory_is_trained_all_the_same() -> None:
    """Before, the job ended. The workers find out what fits, and train as one does."""

    def work(ctx: MortalContext) -> Training:
        training = Training(ctx, 0)
        training.before_backward = short_of_memory({"0": 3, "1": 2, "2": 1}[ctx.backend.worker])
        return training.run()

    results = ElasticWorld(3, work).run()
    expected = whole()
    for worker, training in results.items():
        torch.testing.assert_close(training.parameters(), expected.parameters(), rtol=0, atol=1e-10)
        assert training.job.losses == pytest.approx(expected.job.losses, abs=1e-10)
        assert training.job.most_at_once <= {"0": 3, "1": 2, "2": 1}[worker]


@pytest.mark.parametrize("is_ddp", [True, False])
def test_one_worker_runs_a_step_again_in_parts(is_ddp: bool) -> None:
    with DistributedContext(LocalBackend()) as ctx:
        training = Training(ctx, 0, is_ddp=is_ddp)
        training.before_backward = short_of_memory(6)
        training.run()
    torch.testing.assert_close(training.parameters(), whole().parameters(), rtol=0, atol=1e-10)
    assert training.job.num_reruns == 2, "20, 10, 5"
    assert training.inner.calls.item() == 3 * (4 + 4 + 3), (
        "those of steps that ran again are undone"
    )


def test_memory_that_runs_out_in_a_later_part_drops_the_parts_before() -> None:
    sizes: list[int] = []

    def look(size: int) -> None:
        sizes.append(size)
        if len(sizes) == 6:  # the second part of the second step
            raise MemoryError

    with DistributedContext(LocalBackend()) as ctx:
        training = Training(ctx, 5)
        training.before_backward = look
        training.run()
    torch.testing.assert_close(training.parameters(), whole().parameters(), rtol=0, atol=1e-10)
    assert sizes[:10] == [5, 5, 5, 5, 5, 5, 2, 2, 2, 2]
    assert training.job.num_reruns == 1


def test_the_graph_of_the_failed_step_does_not_stay_in_the_variables_of_the_script() -> None:
    held: list[bool] = []
    with DistributedContext(LocalBackend()) as ctx:
        training = Training(ctx, 0)
        job, loss, others = training.job, None, {}
        for x, y, _ in job:
            held.append(loss is not None and loss.grad_fn is not None)
            with job.step():
                training.optimizer.zero_grad()
                loss = F.mse_loss(training.model(x), y)
                others = {"loss": loss * 2}
                if len(x) == 20:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
                loss.backward()
                training.optimizer.step()
            loss = None if job.step_number else loss
    assert held[:2] == [False, False]
    assert others["loss"].grad_fn is not None, "that of the last step"
