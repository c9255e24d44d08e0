"""Compressed gradients of DDP: accounted for over all ranks, undone with a step, kept on disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import potluck.compressors
from potluck import BF16, FP16, PowerSGD, Quantize, RandomK, TopK
from potluck._core.context import DistributedContext
from potluck.compressors import Compressor
from potluck.errors import CheckpointError, Desync
from potluck.testing.elastic import ElasticWorld
from potluck.testing.world import run_world
from potluck.torch import DDP, CompressionState, ElasticLoop, Policy, compression_hook
from potluck.training.sampler import Schedule
from support.process_groups import process_group

COMPRESSORS: list[Compressor] = [
    *(
        FP16(),
        BF16(),
        Quantize(8),
        Quantize(4),
        Quantize(2),
        TopK(0.1, chunk=64),
        TopK(0.05, None, bits=4),
    ),
    *(RandomK(0.3), RandomK(0.3, "k"), PowerSGD(2)),
]


def test_the_tests_here_have_all_public_compressors() -> None:
    public = {getattr(potluck.compressors, name) for name in potluck.compressors.__all__}
    kinds = {each for each in public if isinstance(each, type) and issubclass(each, Compressor)}
    assert kinds - {Compressor} == {type(each) for each in COMPRESSORS}


DTYPED = (Quantize(8), TopK(0.1, chunk=64), RandomK(0.3), PowerSGD(2))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 20), nn.Linear(20, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 12, generator=generator)
    return x.to(dtype), torch.randn(8, 3, generator=generator).to(dtype)


def backward(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    return {
        name.removeprefix("module."): parameter.grad.double().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strategy", COMPRESSORS, ids=repr)
def test_the_ranks_gradients_are_what_is_applied_and_what_is_kept(
    strategy: Compressor, dtype: torch.dtype
) -> None:
    """sum over steps of the reduced gradient = sum over ranks of their gradients - residuals."""
    steps, size = 4, 3
    if dtype != torch.float32 and strategy not in DTYPED:
        pytest.skip("the path through another dtype is the same for all")

    def work(ctx: DistributedContext) -> tuple[dict[str, Tensor], dict[str, Any], bytes]:
        model = DDP(network(dtype), ctx, compression=strategy, dense_below=50)
        came: dict[str, Tensor] = {}
        for step in range(steps):
            reduced = backward(model, *batch(ctx.rank, step, dtype))
            for name, gradient in reduced.items():
                came[name] = came.get(name, 0) + gradient
        bits = b"".join(each.numpy().tobytes() for each in came.values())
        return came, model.compression.capture(), bits

    results = run_world(size, work)
    assert len({bits for _, _, bits in results}) == 1, "the ranks ended with different bits"
    went: dict[str, Tensor] = {}
    for rank in range(size):
        for step in range(steps):
            for name, gradient in backward(network(dtype), *batch(rank, step, dtype)).items():
                went[name] = went.get(name, 0) + gradient / size
    rounding = 2e-5 if dtype.itemsize > 2 else 2e-2  # the sum is rounded to 16 bits at the end
    if dtype == torch.float64 and not isinstance(strategy, Quantize):
        rounding = 1e-13  # codecs encode float32; all else stays float64
    for name, wanted in went.items():
        total = results[0][0][name].clone()
        for _, state, _ in results:
            if name in state:
                total += torch.as_tensor(state[name]).view(wanted.shape)
        torch.testing.assert_close(total, wanted, rtol=rounding, atol=rounding)
        is_sent_small = wanted.numel() >= 50 and strategy.applies_to(tuple(wanted.shape))
        assert (name in results[0][1]) == is_sent_small, "other tensors are dense"


def test_a_policy_and_a_warm_up_choose_what_is_compressed() -> None:
    def only_first(name: str, parameter: nn.Parameter) -> Compressor | None:
        return TopK(0.01) if name == "0.weight" else None

    def work(ctx: DistributedContext) -> list[dict[str, Tensor]]:
        plain = DDP(network(), ctx)
        model = DDP(network(), ctx, compression=only_first, dense_below=0, warmup_steps=2)
        late = []
        for step in range(4):
            wanted = backward(plain, *batch(ctx.rank, step))
            found = backward(model, *batch(ctx.rank, step))
            late.append({n: (found[n] - wanted[n]).abs().max() for n in wanted})
        return late

    for late in run_world(2, work):
        for step, errors in enumerate(late):
            assert {n for n, error in errors.items() if error > 1e-6} == (
                {"0.weight"} if step >= 2 else set()
            )


def test_a_parameter_that_no_rank_used_keeps_its_gradient_and_one_that_some_used_is_reduced() -> (
    None
):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))
            self.chosen = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[self.chosen](x)

    def work(ctx: DistributedContext) -> list[bool]:
        model = DDP(Branches(), ctx, compression=TopK(0.5), dense_below=0)
        model.module.chosen = ctx.rank
        model(torch.ones(2, 12)).sum().backward()
        return [p.grad is not None for p in model.parameters()]

    assert run_world(2, work) == [[True, True, False]] * 2


@pytest.mark.parametrize("name", ["2.weight", "2.bias"], ids=["compressed", "dense"])
@pytest.mark.parametrize(
    "strategy",
    [
        *(Quantize(8), TopK(0.1, chunk=64), RandomK(0.3), BF16()),
        *(PowerSGD(2, start_step=0), PowerSGD(2, start_step=9)),
    ],
    ids=repr,
)
def test_a_gradient_that_is_not_finite_is_counted_where_it_is_and_gone_with_its_step(
    strategy: Compressor, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Exactly, on the rank that has it; the other one sees what the sum has."""

    def work(ctx: DistributedContext) -> tuple[dict[str, int], bool]:
        model = DDP(network(), ctx, compression=strategy, dense_below=50)
        x, y = batch(ctx.rank, 0)
        parameter = model.module.get_parameter(name)
        handle = parameter.register_hook(
            lambda gradient: gradient.index_fill(0, torch.tensor([3]), torch.nan)
        )
        if ctx.rank == 0:
            handle.remove()
        bad = backward(model, x, y)
        counts = dict(model.num_nonfinite)
        assert not bad[name].isfinite().all()
        handle.remove()
        good = backward(model, *batch(ctx.rank, 1))
        assert dict(model.num_nonfinite) == counts
        return counts, all(bool(each.isfinite().all()) for each in good.values())

    with caplog.at_level(logging.WARNING):
        (others, is_good), (own, is_good_too) = run_world(2, work)
    assert is_good
    assert is_good_too
    num = network().get_parameter(name)[3].numel()
    assert own == {name: num}
    if name == "2.weight" and strategy.start_step == 0:
        assert others[name] >= 1
    assert f"the gradient of {name}: {num} of" in caplog.text


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_a_gradient_beyond_the_range_is_the_largest_number_and_counted_or_shown_to_a_scaler(
    loss_scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank's element is beyond fp16's range, and the sum of two others that are not. What a
    loss scale has multiplied must be infinite on all ranks, or the scale would stay too large."""

    def work(ctx: DistributedContext) -> tuple[Tensor, dict[str, int]]:
        model = DDP(network(), ctx, compression=FP16(), dense_below=0, error_feedback=False)
        model.loss_scale = loss_scale
        x, y = batch(ctx.rank, 0)
        spoilt = torch.zeros(20, 40)
        spoilt[0, 0] = 3e5 if ctx.rank else 0  # half of it is this rank's part of the mean
        model.module[2].weight.register_hook(lambda gradient: gradient + spoilt)
        spoilt_sum = torch.zeros(20)
        spoilt_sum[7] = 1e5  # on both ranks: the mean is as large, each part is not
        model.module[2].bias.register_hook(lambda gradient: gradient + spoilt_sum)
        bad = backward(model, x, y)
        found = torch.stack([bad["2.weight"][0, 0], bad["2.bias"][7]])
        assert bad["2.weight"].flatten()[1:].isfinite().all()
        return found, dict(model.num_nonfinite)

    with caplog.at_level(logging.WARNING):
        (first, others), (second, own) = run_world(2, work)
    expected = 65504.0 if loss_scale == 1 else torch.inf
    assert first.tolist() == second.tolist() == [expected, expected]
    assert own == {"2.weight": 1}
    assert others == {"2.weight": 1, "2.bias": 1}
    assert "1 of 800 elements are beyond the range of the codec at step 0, on this" in caplog.text


class Weight(nn.Module):
    """A parameter of 16 bits, whose gradient is that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))

    def forward(self) -> Tensor:
        return self.weight.clone()


def reduced_by_ddp(ctx: DistributedContext, given: list[Tensor]) -> tuple[Tensor, dict[str, int]]:
    model = DDP(Weight(), ctx, compression=TopK(0.25, None), dense_below=0)
    for each in given:
        model.zero_grad()
        model().backward(each)
    assert model.module.weight.grad is not None
    return model.module.weight.grad, dict(model.num_nonfinite)


def reduced_by_hook(ctx: DistributedContext, given: list[Tensor]) -> tuple[Tensor, dict[str, int]]:
    model = Weight()
    with process_group(ctx) as group:
        state = CompressionState(TopK(0.25, None), process_group=group, model=model)
        for each in given:
            flat = each.clone()
            bucket: Any = SimpleNamespace(
                index=lambda: 0,
                buffer=lambda flat=flat: flat,
                gradients=lambda flat=flat: [flat],
                parameters=lambda: [model.weight],
                is_last=lambda: True,
            )
            reduced = compression_hook(state, bucket).wait()
    return reduced, dict(state.num_nonfinite)


@pytest.mark.parametrize("route", [reduced_by_ddp, reduced_by_hook])
def test_what_a_gradient_of_16_bits_cannot_hold_is_the_largest_number_and_counted(
    route: Callable[[DistributedContext, list[Tensor]], tuple[Tensor, dict[str, int]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each gradient is within the range of its dtype; with what the first step has left to send,
    the second is not."""
    given = [torch.tensor([64992.0, 60000, 0, 0], dtype=torch.float16)] * 2
    with caplog.at_level(logging.WARNING):
        found = run_world(2, lambda ctx: route(ctx, given))
    for reduced, counts in found:
        assert reduced.tolist() == [0, 65504, 0, 0]
        assert counts == {"weight": 1}
    assert "1 of 4 elements are beyond the range of the codec at step 1, in the" in caplog.text


@pytest.mark.parametrize("name", ["2.weight", "2.bias"], ids=["compressed", "dense"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_rank_alone_counts_what_is_not_finite_too(
    name: str, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose gradients are not compressed. Each backward counts once, and so does an accumulated
    gradient; one that raised counts for nothing."""

    def work(ctx: DistributedContext) -> None:
        model = DDP(network(), ctx, compression=Quantize(8), dense_below=50)
        parameter = model.module.get_parameter(name)
        num = parameter[3].numel()

        def spoilt(gradient: Tensor) -> Tensor:
            return gradient.index_fill(0, torch.tensor([3]), bad)

        handle = parameter.register_hook(spoilt)
        assert not backward(model, *batch(0, 0))[name].isfinite().all()
        assert dict(model.num_nonfinite) == {name: num}
        backward(model, *batch(0, 1))
        assert dict(model.num_nonfinite) == {name: 2 * num}
        handle.remove()
        with model.no_sync():
            backward(model, *batch(0, 2))
        assert all(bool(each.isfinite().all()) for each in backward(model, *batch(0, 3)).values())
        first = model.module.get_parameter("0.weight")
        handle = first.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model, *batch(0, 4))
        handle.remove()
        backward(model, *batch(0, 5))
        assert dict(model.num_nonfinite) == {name: 2 * num}

    run_world(1, work)
    num = network().get_parameter(name)[3].numel()
    assert f"the gradient of {name}: {num} of" in caplog.text
    assert "are inf or NaN at step 1, on this rank" in caplog.text


def test_a_loop_of_one_rank_says_which_gradient_is_not_finite() -> None:
    def work(ctx: DistributedContext) -> None:
        training = Training(ctx, Quantize(4))
        parameter = training.model.module.get_parameter("0.bias")
        parameter.register_hook(
            lambda gradient: gradient.index_fill(0, torch.tensor([3]), torch.nan)
        )
        training.run()
        # A step later all gradients are NaN, for the parameter is.
        assert training.job.num_nonfinite["0.bias"] == 1 + 2 * 40

    run_world(1, work)


@pytest.mark.parametrize("strategy", [None, Quantize(8), PowerSGD(2, start_step=0)], ids=repr)
def test_a_parameter_whose_shape_changed_is_refused(strategy: Compressor | None) -> None:
    def work(ctx: DistributedContext) -> None:
        model = DDP(network(), ctx, compression=strategy, dense_below=50)
        layer = model.module[2]
        layer.weight.data, layer.bias.data = torch.ones(30, 40), torch.ones(30)
        with pytest.raises(ValueError, match=r"'2.(weight|bias)' has shape \(30.*\), and had \(20"):
            layer(torch.ones(6, 40)).sum().backward()

    run_world(2, work)


class Training:
    """A small elastic training with compressed gradients."""

    def __init__(
        self,
        ctx: DistributedContext,
        strategy: Compressor,
        *,
        on_step: Callable[[Training], None] = lambda training: None,
        error_feedback: bool = True,
        dense_below: int = 50,
        **options: Any,
    ) -> None:
        self.ctx, self.on_step = ctx, on_step
        self.model = DDP(
            *(network(), ctx),
            compression=strategy,
            dense_below=dense_below,
            error_feedback=error_feedback,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        x, y = batch(0, 0)
        self.job = ElasticLoop(
            self.model, self.optimizer, (x.repeat(2, 1), y.repeat(2, 1)), batch_size=6, seed=5,
            policy=Policy(hash_every=1, save_every=1, recovery_s=30), **options,
        )  # fmt: skip
        self.alone_at: int | None = None

    def run(self) -> Training:
        for x, y in self.job:
            with self.job.step():
                self.on_step(self)
                if self.ctx.world_size == 2 and self.alone_at is None:
                    self.alone_at = self.job.step_number
                self.optimizer.zero_grad()
                (self.model(x) - y).pow(2).mean().backward()
                self.optimizer.step()
        return self


def kept_by(model: DDP) -> dict[str, Any]:
    """The bits of all that a rank has: parameters, residuals, matrices of PowerSGD."""
    found = {name: p.detach().numpy() for name, p in model.named_parameters()}
    found |= {f"residual {name}": each for name, each in model.compression.capture().items()}
    found |= {f"Q {name}": each for name, each in model.compression.capture_shared().items()}
    return {name: each.tobytes() for name, each in found.items()}


class ByHand:
    """The same training without a loop, one step at a time, in worlds in which nobody dies."""

    def __init__(self, strategy: Compressor) -> None:
        self.strategy = strategy
        self.network = network()
        self.kept: tuple[dict[str, Any], dict[str, Any]] | None = None

    def run(self, ctx: DistributedContext, steps: range) -> dict[str, Any]:
        model = DDP(self.network, ctx, compression=self.strategy, dense_below=50)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if self.kept is not None:
            model.compression.restore([self.kept[0]])
            model.compression.restore_shared(self.kept[1])
        x, y = (each.repeat(2, 1) for each in batch(0, 0))
        schedule = Schedule(len(x), 6, seed=5)
        for step in steps:
            share = schedule.share(schedule.batch(6 * step), ctx.rank, ctx.world_size)
            model.compression.begin(step)
            model.weight = share.weight
            mine = torch.as_tensor(share.indices.copy())
            backward(model, x[mine], y[mine])
            optimizer.step()
        self.kept = model.compression.capture(), model.compression.capture_shared()
        return kept_by(model)


def undisturbed(strategy: Compressor, with_all: int) -> list[dict[str, Any]]:
    """What ranks 0 and 2 have after ``with_all`` steps of three ranks, and the others of these
    two."""
    ranks = [ByHand(strategy) for _ in range(3)]
    run_world(3, lambda ctx: ranks[ctx.rank].run(ctx, range(with_all)))
    del ranks[1]
    return run_world(2, lambda ctx: ranks[ctx.rank].run(ctx, range(with_all, 3)))


@pytest.mark.parametrize(
    "strategy",
    [TopK(0.1, chunk=64), Quantize(4), RandomK(0.3), PowerSGD(2, start_step=1)],
    ids=repr,
)
def test_a_kill_at_every_half_of_an_operation_leaves_what_an_undisturbed_run_leaves(
    strategy: Compressor,
) -> None:
    """Parameters and residuals, bit by bit: as if three had trained to the last step that counted
    with the lost one, and two from then on."""
    right: dict[int, list[dict[str, Any]]] = {}
    for moment in range(1000):
        results = ElasticWorld(
            3,
            lambda ctx: Training(ctx, strategy).run(),
            dies=lambda worker, _, number, at=moment: worker == "1" and number == at,
        ).run()
        alone_at = results["0"].alone_at
        step = 3 if alone_at is None else alone_at
        if step not in right:
            right[step] = undisturbed(strategy, step)
        for worker, wanted in zip(("0", "2"), right[step], strict=True):
            found = kept_by(results[worker].model)
            assert found.keys() == wanted.keys()
            for name, each in found.items():
                assert each == wanted[name], f"{name}, killed at moment {moment} of step {step}"
        if "1" in results:
            break
    assert right.keys() == {0, 1, 2, 3}


def test_a_newcomer_gets_the_matrices_of_powersgd() -> None:
    seen: dict[int, dict[str, dict[str, Any]]] = {}

    def on_step(training: Training) -> None:
        ctx: Any = training.ctx
        step = training.job.step_number
        at_step = seen.setdefault(step, {})
        at_step[ctx.backend.worker] = training.model.compression.capture_shared()
        if step == 1 and ctx.backend.worker == "0" and ctx.world_size == 2:
            world.join()

    strategy = PowerSGD(2, start_step=0)
    world = ElasticWorld(2, lambda ctx: Training(ctx, strategy, on_step=on_step, epochs=3).run())
    results = world.run()
    assert len(results) == 3
    with_newcomer = [step for step, states in seen.items() if len(states) == 3]
    assert with_newcomer
    for states in seen.values():
        for name, q in states["0"].items():
            assert all(np.array_equal(state[name], q) for state in states.values())
    assert seen[with_newcomer[0]]["0"].keys() == {"0.weight", "2.weight"}


@pytest.mark.parametrize(
    "strategy", [TopK(0.1, chunk=64), PowerSGD(2, start_step=0)], ids=["TopK", "PowerSGD"]
)
@pytest.mark.parametrize(("first", "then"), [(3, 2), (2, 3), (3, 3)])
def test_a_checkpoint_keeps_what_all_ranks_owe_in_a_world_of_any_size(
    tmp_path: Path, first: int, then: int, strategy: Compressor, caplog: pytest.LogCaptureFixture
) -> None:
    def owed(trainings: list[Training]) -> dict[str, Any]:
        states = [each.model.compression.capture() for each in trainings]
        names = {name for state in states for name in state}
        return {n: sum(state[n] for state in states if n in state) for n in sorted(names)}

    before = run_world(first, lambda ctx: Training(ctx, strategy, checkpoint=str(tmp_path)).run())

    def resume(ctx: DistributedContext) -> Training:
        training = Training(ctx, strategy, checkpoint=str(tmp_path))
        assert list(training.job) == [], "all of it was trained"
        return training

    after = run_world(then, resume)
    assert ("goes on with the residuals of 2 ranks, added up" in caplog.text) == (then < first)
    for (name, kept), (_, again) in zip(owed(before).items(), owed(after).items(), strict=True):
        np.testing.assert_allclose(again, kept, rtol=1e-5, atol=1e-6, err_msg=name)
        assert np.abs(kept).max() > 0
    shared = before[0].model.compression.capture_shared()
    assert bool(shared) == isinstance(strategy, PowerSGD)
    for each in after:
        found = each.model.compression.capture_shared()
        assert found.keys() == shared.keys()
        assert all(np.array_equal(q, shared[name]) for name, q in found.items())
    assert {each.job.parameter_hash() for each in after} == {before[0].job.parameter_hash()}


def test_residuals_that_nothing_pays_are_said_to_be_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, kept = TopK(0.1, chunk=64), str(tmp_path)
    [owed, _] = run_world(
        2,
        lambda ctx: set(Training(ctx, strategy, checkpoint=kept).run().model.compression.capture()),
    )

    def resume(ctx: DistributedContext, **options: Any) -> set[str]:
        training = Training(ctx, strategy, checkpoint=kept, **options)
        assert list(training.job) == [], "all of it was trained"
        return set(training.model.compression.capture())

    assert run_world(2, lambda ctx: resume(ctx, error_feedback=False)) == [set(), set()]
    first, others = min(owed), len(owed) - 1
    assert f"residuals of {first} and {others} others are dropped: no error" in caplog.text
    caplog.clear()
    [still, _] = run_world(2, lambda ctx: resume(ctx, dense_below=100))
    [dropped] = owed - still
    assert f"residuals of {dropped} are dropped: no error feedback keeps them" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compression": "int8"}, TypeError, "compression is 'int8'; it must be one such as TopK"),
        ({"compression": lambda n, p: 3}, TypeError, "compression chose 3 for 0.weight"),
        ({"compression": TopK}, TypeError, "it must be one such as TopK"),
        ({"compression": Quantize(8), "dense_below": -1}, ValueError, "dense_below is -1"),
        ({"compression": Quantize(8), "warmup_steps": -1}, ValueError, "warmup_steps -1"),
        (
            {"compression": Quantize(8), "warmup_steps": 0.5},
            TypeError,
            "warmup_steps must be an int",
        ),
        (
            {"compression": Quantize(8), "dense_below": "4k"},
            TypeError,
            "dense_below must be an int",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    def work(ctx: DistributedContext) -> None:
        with pytest.raises(error, match=message):
            DDP(network(), ctx, **({"dense_below": 0} | options))

    run_world(1, work)


class Signs(Compressor):
    """A strategy of one's own, with something that has another address on each rank."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.lock = threading.Lock()

    def compress(self, source: Any, residual: Any, step: int) -> Any:
        return (source > 0).astype(np.uint8)

    def decompress(self, payload: Any, shape: tuple[int, ...], step: int) -> Any:
        return np.float32(self.scale) * (2 * payload.astype(np.float32) - 1).reshape(shape)

    def looks_finite(self, payload: Any, source: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"compression": RandomK(0.3, "k", seed=1)}, {"compression": RandomK(0.3, "k", seed=2)}),
        ({"compression": Signs(0.1)}, {"compression": Signs(0.2)}),
        ({"compression": Quantize(8)}, {"compression": Quantize(8), "error_feedback": False}),
        ({"compression": Quantize(8)}, {"compression": Quantize(8), "dense_below": 500}),
        ({"compression": Quantize(8)}, {"compression": Quantize(8), "warmup_steps": 1}),
    ],
    ids=["seed", "own", "feedback", "dense", "warm-up"],
)
def test_ranks_that_compress_in_unlike_ways_are_told(first: Any, second: Any) -> None:
    """Payloads of one size would be taken for each other."""

    def work(ctx: DistributedContext) -> None:
        options = {"dense_below": 0} | (second if ctx.rank == 2 else first)
        model = DDP(network(), ctx, **options)
        text = r"rank 0 .* has '(?P<first>\w+.*)' \(.*\) and rank 2 .* has '(?P=first)' \("
        with pytest.raises(Desync, match=text):
            backward(model, *batch(ctx.rank, 0))

    run_world(3, work)


def test_a_strategy_of_ones_own_is_the_same_on_all_ranks() -> None:
    def work(ctx: DistributedContext) -> bytes:
        model = DDP(network(), ctx, compression=Signs(0.1), error_feedback=False, dense_below=0)
        return b"".join(g.numpy().tobytes() for g in backward(model, *batch(ctx.rank, 0)).values())

    first, second = run_world(2, work)
    assert first == second


def test_a_state_of_another_strategy_rank_or_model() -> None:
    """Residuals fit every strategy with error feedback; a Q of another rank is drawn anew."""

    def made(ctx: DistributedContext, strategy: Compressor, **options: Any) -> Any:
        return DDP(network(), ctx, compression=strategy, dense_below=50, **options)

    def work(ctx: DistributedContext) -> None:
        first = made(ctx, PowerSGD(2, start_step=0))
        backward(first, *batch(ctx.rank, 0))
        own, shared = first.compression.capture(), first.compression.capture_shared()
        assert set(shared) == {"0.weight", "2.weight"}
        second = made(ctx, TopK(0.1, chunk=64))
        second.compression.restore([own])
        assert all(np.array_equal(second.compression.capture()[n], own[n]) for n in own)
        without = made(ctx, TopK(0.1, chunk=64), error_feedback=False)
        without.compression.restore([own])
        assert without.compression.capture() == {}
        third = made(ctx, PowerSGD(3, start_step=0))
        third.compression.restore_shared(shared)
        backward(third, *batch(ctx.rank, 1))
        assert third.compression.capture_shared()["0.weight"].shape == (12, 3)
        for wrong in (np.zeros(1, np.float32), np.zeros(479, np.float32)):
            with pytest.raises(CheckpointError, match=r"residual '0.weight' of \d+ elements, this"):
                second.compression.restore([own | {"0.weight": wrong}])

    run_world(2, work)


def test_powersgd_sums_the_matrices_of_all_buckets_in_one_reduction() -> None:
    def work(ctx: DistributedContext) -> tuple[int, int, int]:
        strategy = PowerSGD(2, start_step=0)
        model = DDP(*(network(), ctx), compression=strategy, dense_below=100, bucket_size_mb=1e-3)
        backward(model, *batch(ctx.rank, 0))
        calls: list[int] = []
        begin = ctx.all_reduce

        def counted(array: Any, *args: Any, **options: Any) -> Any:
            calls.append(len(array.reshape(-1)))
            return begin(array, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ctx, "all_reduce", counted)
            backward(model, *batch(ctx.rank, 1))
        p, q = 2 * (40 + 20), 2 * (12 + 40)  # of both matrices together
        return len(model.compression._buckets), calls.count(p), calls.count(q)

    [(num_buckets, num_p, num_q), _] = run_world(2, work)
    assert num_buckets > 2
    assert (num_p, num_q) == (1, 1)
