"""Gradients between backward and the optimizer: intercepted, accumulated, recomputed, clipped."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, ElasticLoop, GradientInterceptor, Policy, clip_grad_norm_
from potluck.torch.intercept import Capture

EVERY_STEP = Policy(hash_every=1)
GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(24, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (24,), generator=GENERATOR)
_START = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
_START.double()


def model_of(ctx: DistributedContext, inner: nn.Module = _START, **options: Any) -> DDP:
    return DDP(copy.deepcopy(inner), ctx, **options)


def part(ctx: DistributedContext) -> slice:
    size = len(X) // ctx.world_size
    return slice(ctx.rank * size, (ctx.rank + 1) * size)


def serial_gradients(samples: slice = slice(None)) -> dict[str, Tensor]:
    model = copy.deepcopy(_START)
    F.cross_entropy(model(X[samples]), Y[samples]).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------- interception


@pytest.mark.parametrize("bucket_size_mb", [25, 1e-4])
def test_local_is_what_this_rank_made_and_reduced_what_the_optimizer_sees(
    bucket_size_mb: float,
) -> None:
    def work(ctx: DistributedContext) -> Capture:
        model = model_of(ctx, bucket_size_mb=bucket_size_mb)
        with GradientInterceptor(model) as interceptor:
            F.cross_entropy(model(X[part(ctx)]), Y[part(ctx)]).backward()
            assert interceptor.last is not None
            own = serial_gradients(part(ctx))
            for name, parameter in model.module.named_parameters():
                found = interceptor.last.gradients[name]
                assert torch.equal(found.local, own[name])
                assert torch.equal(found.reduced, parameter.grad)
        return interceptor.last

    captures = run_world(3, work)
    whole = serial_gradients()
    for name, right in whole.items():
        for capture in captures:
            reduced = capture.gradients[name].reduced
            torch.testing.assert_close(reduced, right, rtol=1e-12, atol=1e-14)
            assert torch.equal(reduced, captures[0].gradients[name].reduced)


def test_an_interceptor_that_was_there_before_the_ddp_module_sees_the_reduced_ones_too() -> None:
    def work(ctx: DistributedContext) -> None:
        inner = copy.deepcopy(_START)
        interceptor = GradientInterceptor(inner)
        model = DDP(inner, ctx)
        F.cross_entropy(model(X[part(ctx)]), Y[part(ctx)]).backward()
        assert interceptor.last is not None
        for name, right in serial_gradients().items():
            torch.testing.assert_close(interceptor.last.gradients[name].reduced, right)

    run_world(2, work)


def test_inside_no_sync_nothing_is_reduced_and_the_next_backward_has_the_sum() -> None:
    def work(ctx: DistributedContext) -> None:
        model = model_of(ctx)
        seen: list[Capture] = []
        interceptor = GradientInterceptor(model, on_capture=seen.append)
        with model.no_sync():
            F.cross_entropy(model(X[part(ctx)]), Y[part(ctx)]).backward()
        F.cross_entropy(model(X[part(ctx)]), Y[part(ctx)]).backward()
        interceptor.close()
        model.zero_grad()
        F.cross_entropy(model(X[part(ctx)]), Y[part(ctx)]).backward()
        assert [capture.number for capture in seen] == [0, 1], "nothing after close"
        for first, second in zip(*(capture.gradients.values() for capture in seen), strict=True):
            assert first.reduced is None
            torch.testing.assert_close(second.local, 2 * first.local)
            assert second.reduced is not None

    run_world(2, work)


def test_what_is_kept_may_be_a_number_and_a_mistake_in_it_names_the_parameter() -> None:
    def broken(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("oh")

    with DistributedContext(LocalBackend()) as ctx:
        model = model_of(ctx)
        norms = GradientInterceptor(model, keep=torch.linalg.vector_norm)
        F.cross_entropy(model(X), Y).backward()
        assert norms.last is not None
        assert norms.last.gradients["4.bias"].local.shape == ()
        norms.close()
        GradientInterceptor(model, keep=broken)
        with pytest.raises(RuntimeError, match=r"gradient of 4.(bias|weight): ZeroDivisionError"):
            F.cross_entropy(model(X), Y).backward()


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
def test_the_clipped_gradient_of_many_ranks_is_that_of_one(norm_type: float) -> None:
    reference = copy.deepcopy(_START)
    F.cross_entropy(reference(X), Y).backward()
    right = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)

    def work(ctx: DistributedContext) -> tuple[Tensor, list[Tensor]]:
        model = model_of(ctx)
        F.cross_entropy(model(X[part(ctx)]), Y[part(ctx)]).backward()
        before = ctx.stats()["operations"]
        norm = clip_grad_norm_(model, 0.05, norm_type)
        assert ctx.stats()["operations"] == before, "nothing may be communicated"
        return norm, [p.grad for p in model.parameters() if p.grad is not None]

    results = run_world(3, work)
    for norm, gradients in results:
        torch.testing.assert_close(norm, right, rtol=1e-12, atol=0)
        assert torch.equal(norm, results[0][0])
        for mine, parameter in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-11, atol=1e-14)


def test_clipping_own_gradients_inside_no_sync_is_a_mistake() -> None:
    with DistributedContext(LocalBackend()) as ctx:
        model = model_of(ctx)
        with model.no_sync():
            F.cross_entropy(model(X), Y).backward()
            with pytest.raises(RuntimeError, match="clip after the backward outside"):
                clip_grad_norm_(model, 1.0)
        with pytest.raises(ValueError, match="max_norm"):
            clip_grad_norm_(model, 0.0)


# ---------------------------------------------------------------- in the elastic loop


class Recomputed(nn.Module):
    """The same network, whose middle is computed again during backward."""

    def __init__(self, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.body = copy.deepcopy(_START)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.body[1](self.body[0](x))
        x = checkpoint(self.body[2:4], x, use_reentrant=self.use_reentrant)
        return self.body[4](x)


def train(ctx: DistributedContext, inner: nn.Module, num_pieces: int) -> list[float]:
    """Clipped and accumulated over pieces of the share, as a script would write it."""
    model = DDP(inner, ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    # 11, 11 and 2 samples: shares of 4, 4 and 3, then of 1, 1 and none.
    job = ElasticLoop(model, optimizer, (X, Y), batch_size=11, epochs=4, policy=EVERY_STEP)
    for x, y in job:
        with job.step():
            optimizer.zero_grad()
            total = 0.0
            pieces = list(zip(x.chunk(num_pieces), y.chunk(num_pieces), strict=True))
            for a, b in pieces[:-1]:
                with model.no_sync():
                    loss = F.cross_entropy(model(a), b, reduction="sum") / len(x)
                    loss.backward()
                    total += loss.item()
            a, b = pieces[-1]
            loss = F.cross_entropy(model(a), b, reduction="sum") / len(x)
            loss.backward()
            clip_grad_norm_(model, 0.1)
            job.log(loss=total + loss.item())
            optimizer.step()
    return job.losses


def test_accumulation_clipping_and_recomputation_leave_the_losses_of_one_process() -> None:
    with DistributedContext(LocalBackend()) as ctx:
        expected = train(ctx, copy.deepcopy(_START), 1)
    assert sum(expected[-3:-1]) < sum(expected[:2])
    for inner, num_pieces in [(_START, 3), (Recomputed(), 2)]:
        results = run_world(3, lambda ctx, m=inner, n=num_pieces: train(ctx, copy.deepcopy(m), n))
        for losses in results:
            assert losses == pytest.approx(expected, rel=1e-9)


def test_recomputation_keeps_less_for_backward_and_computes_again() -> None:
    """What autograd keeps is counted by its own hooks; results are those without recomputation."""

    def work(ctx: DistributedContext) -> None:
        kept: list[int] = []
        forwards: list[int] = []
        found: list[list[Tensor]] = []

        def keep(tensor: Tensor) -> Tensor:
            kept[-1] += tensor.nbytes
            return tensor

        def count(*_: Any) -> None:
            forwards[-1] += 1

        for inner in (_START, Recomputed()):
            model = model_of(ctx, inner)
            body = model.module.body if isinstance(model.module, Recomputed) else model.module
            body[2].register_forward_hook(count)
            kept.append(0)
            forwards.append(0)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = F.cross_entropy(model(X[part(ctx)]), Y[part(ctx)])
            loss.backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        assert kept[1] < 0.8 * kept[0]
        assert forwards == [1, 2]
        for mine, right in zip(*found, strict=True):
            assert torch.equal(mine, right)

    run_world(2, work)


def test_reentrant_recomputation_is_refused_with_the_remedy() -> None:
    with pytest.raises(WorldError, match="use_reentrant=False"):
        run_world(2, lambda ctx: train(ctx, Recomputed(use_reentrant=True), 1))
