"""Half precision with float32 weights: overflows are everybody's, and skipped steps count."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, ElasticLoop, GradScaler, LossScale, Policy, clip_grad_norm_

EVERY_STEP = Policy(hash_every=1, save_every=100)
GENERATOR = torch.Generator().manual_seed(9)
X = torch.randn(48, 8, generator=GENERATOR)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
_START = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


class Training:
    """A network under autocast, whose loss is spoilt on some ranks at some steps."""

    def __init__(
        self,
        ctx: DistributedContext,
        *,
        spoilt: dict[int, int] | None = None,  # step -> rank with an infinite loss
        dtype: torch.dtype = torch.float16,
        rule: LossScale | None = None,
        dies: int = -1,
        together: threading.Barrier | None = None,
        **options: Any,
    ) -> None:
        self.ctx = ctx
        self.spoilt = spoilt or {}
        self.dtype = dtype
        self.dies = dies
        self.together = together or threading.Barrier(1)
        self.model = DDP(copy.deepcopy(_START), ctx)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        self.scaler = GradScaler(
            rule or LossScale(scale=1024.0, interval=4), enabled=dtype == torch.float16
        )
        self.factors: list[float] = []
        self.job = ElasticLoop(
            self.model,
            self.optimizer,
            (X, Y),
            batch_size=12,
            epochs=options.pop("epochs", 3),
            also={"scaler": self.scaler},
            policy=EVERY_STEP,
            **options,
        )

    def run(self) -> Training:
        for x, y in self.job:
            with self.job.step():
                self.factors.append(self.scaler.factor)
                if self.job.step_number == self.dies and self.ctx.world_size == 3:
                    assert isinstance(self.ctx, MortalContext)
                    self.together.wait(30)
                    if self.ctx.rank == 1:
                        self.ctx.die()
                self.optimizer.zero_grad()
                with torch.autocast("cpu", self.dtype):
                    loss = F.cross_entropy(self.model(x).float(), y)
                if self.spoilt.get(self.job.step_number) == self.ctx.rank:
                    loss = loss * torch.inf
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
                clip_grad_norm_(self.model, 1.0)
                self.job.log(loss=loss)
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return self


def test_one_ranks_overflow_skips_the_step_on_all_ranks_and_it_counts() -> None:
    results = run_world(3, lambda ctx: Training(ctx, spoilt={2: 1, 7: 2}).run())
    for training in results:
        assert training.job.step_number == 12
        assert training.job.num_skipped == 2
        assert training.job.num_reruns == 0
        # 4 good ones double, an overflow halves and starts the count again.
        assert training.factors == [
            *(1024.0, 1024.0, 1024.0),
            *(512.0, 512.0, 512.0, 512.0),
            1024.0,
            *(512.0, 512.0, 512.0, 512.0),
        ]
    assert len({training.job.parameter_hash() for training in results}) == 1


def test_a_skipped_step_leaves_parameters_bit_by_bit() -> None:
    def work(ctx: DistributedContext) -> list[str]:
        hashes: list[str] = []

        class Watch:
            def on_step_end(self, step: int, loss: float) -> None:
                hashes.append(training.job.parameter_hash())

        training = Training(ctx, spoilt={1: 0}, epochs=1, callbacks=[Watch()])
        training.run()
        return hashes

    for hashes in run_world(2, work):
        assert hashes[0] == hashes[1]
        assert len(set(hashes)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_trains_float32_weights_equal_on_all_ranks(dtype: torch.dtype) -> None:
    """Against one process in float32: half precision's rounding, and no more, lies between."""

    def plain(ctx: DistributedContext) -> list[float]:
        model = DDP(copy.deepcopy(_START), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        job = ElasticLoop(model, optimizer, (X, Y), batch_size=12, epochs=3)
        for x, y in job:
            with job.step():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                clip_grad_norm_(model, 1.0)
                job.log(loss=loss)
                optimizer.step()
        return job.losses

    with DistributedContext(LocalBackend()) as ctx:
        expected = plain(ctx)
    results = run_world(2, lambda ctx: Training(ctx, dtype=dtype).run())
    for training in results:
        assert all(p.dtype == torch.float32 for p in training.model.parameters())
        assert training.job.num_skipped == 0
        assert training.job.losses == pytest.approx(expected, rel=2e-2)
    assert results[0].job.parameter_hash() == results[1].job.parameter_hash()


def test_the_loss_scale_keeps_gradients_that_float16_would_flush_to_zero() -> None:
    weight = nn.Parameter(torch.ones(1))
    gradients = []
    for scaler in (GradScaler(enabled=False), GradScaler(LossScale(scale=2.0**14))):
        weight.grad = None
        optimizer = torch.optim.SGD([weight], lr=0.0)
        with torch.autocast("cpu", torch.float16):
            loss = (F.linear(torch.full((1, 1), 1e-3), weight[None]) * 1e-5).sum().float()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert weight.grad is not None
        gradients.append(weight.grad.item())
    assert gradients[0] == 0.0
    assert gradients[1] == pytest.approx(1e-8, rel=2e-2)


def test_a_death_before_the_vote_leaves_the_scaler_as_it_was() -> None:
    expected = run_world(1, lambda ctx: Training(ctx, spoilt={3: 0}).run())[0]
    together = threading.Barrier(3)  # nobody still waits for the outcome of the step before
    results = ElasticWorld(
        3, lambda ctx: Training(ctx, spoilt={3: 0}, dies=5, together=together).run()
    ).run()
    assert len(results) == 2
    for training in results.values():
        assert training.job.num_skipped == 1
        assert training.scaler.state_dict() == expected.scaler.state_dict()
        again = [f for i, f in enumerate(training.factors) if i != 5]
        assert again == expected.factors


@pytest.mark.parametrize("moment", range(12, 18))
def test_a_death_at_any_moment_around_an_overflow_leaves_one_skipped_step(moment: int) -> None:
    """12 and 13 are the halves of the all_reduce of the step that overflows, 14 and 15 its vote."""
    results = ElasticWorld(
        3,
        lambda ctx: Training(ctx, spoilt={1: 0}).run(),
        dies=lambda worker, name, number: worker == "1" and number == moment,
    ).run()
    assert sorted(results) == ["0", "2"]
    for training in results.values():
        assert training.job.step_number == 12
        assert training.job.num_skipped == 1
        assert training.scaler.state_dict() == results["0"].scaler.state_dict()
    assert len({training.job.parameter_hash() for training in results.values()}) == 1


def test_the_scaler_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    first = run_world(2, lambda ctx: Training(ctx, spoilt={1: 1}, checkpoint=tmp_path).run())[0]
    longer = run_world(
        1, lambda ctx: Training(ctx, checkpoint=tmp_path, epochs=4, spoilt={13: 0}).run()
    )[0]
    assert longer.factors[0] == first.scaler.factor
    assert longer.job.num_skipped == 2, "the skips of the first run count on"


def test_a_loss_that_is_never_finite_ends_on_all_ranks_alike() -> None:
    spoilt = dict.fromkeys(range(12), 0)
    rule = LossScale(scale=8.0, minimum=1.0)
    with pytest.raises(WorldError) as caught:
        run_world(2, lambda ctx: Training(ctx, spoilt=spoilt, rule=rule).run())
    assert any(isinstance(e, FloatingPointError) for e in caught.value.errors.values())
    assert all("lower the learning rate" in str(e) for e in caught.value.errors.values())


def test_mistakes_with_the_scaler_say_what_to_do() -> None:
    def work(ctx: DistributedContext) -> None:
        training = Training(ctx)
        with pytest.raises(RuntimeError, match=r"scale\(loss\)"):
            training.scaler.unscale_(training.optimizer)
        with pytest.raises(RuntimeError, match=r"comes after scaler\.step"):
            training.scaler.update()
        half = nn.Linear(2, 2).half()
        half.weight.grad = torch.ones(2, 2, dtype=torch.float16)
        training.scaler.scale(torch.ones(()))
        with pytest.raises(ValueError, match="keep parameters in float32"):
            training.scaler.unscale_(torch.optim.SGD(half.parameters(), lr=1.0))
        for x, y in training.job:
            with training.job.step():
                loss = F.cross_entropy(training.model(x), y)
                training.scaler.scale(loss).backward()
                training.optimizer.step()

    with pytest.raises(WorldError, match=r"call scaler.step\(optimizer\) instead"):
        run_world(1, work)


def test_without_a_loop_two_optimizers_step_or_skip() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)
    scaler = GradScaler(LossScale(scale=4.0))
    scaler.scale((a + b * torch.inf).sum()).backward()
    scaler.step(second)
    scaler.step(first)
    scaler.update()
    assert (a.item(), b.item()) == (1.0, 1.0)
    assert scaler.factor == 2.0
    a.grad = b.grad = None
    scaler.scale((2 * a + b).sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (a.item(), b.item()) == (-1.0, 0.0)
