"""Frozen parameters that each rank reads itself, and exact evaluation: what fine-tuning needs."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import CheckpointError, Desync
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, ElasticLoop, LocalSGD
from potluck.training.elastic import Policy

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(40, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (40,), generator=GENERATOR)


class Adapted(nn.Module):
    """A frozen base, whose parameters have a second name, with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)
        self.requires_grad_(requires_grad=False)
        self.again = self.base  # the same parameters by a second name
        self.adapter = nn.Linear(5, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.again(torch.tanh(self.base(x))) + self.adapter(x))
        found: Tensor = self.head(F.dropout(x, 0.2, self.training))
        return found


_START = Adapted()  # once: the ranks are threads, which share torch's generator


class Training:
    def __init__(
        self,
        ctx: DistributedContext,
        *,
        on_step: Callable[[Training], None] = lambda training: None,
        shift: float = 0.0,
        **options: Any,
    ) -> None:
        self.ctx = ctx
        self.on_step = on_step
        self.model = DDP(copy.deepcopy(_START), ctx)
        with torch.no_grad():
            self.model.module.base.bias.add_(shift)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        options = {"frozen": "own", "epochs": 2, "policy": Policy(hash_every=1)} | options
        optimizer = torch.optim.Adam(trained, lr=0.01)
        self.job = ElasticLoop(self.model, optimizer, (X, Y), batch_size=8, **options)
        self.optimizer = optimizer

    def run(self) -> Training:
        for x, y in self.job:
            with self.job.step():
                self.on_step(self)
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.job.log(loss=loss)
                self.optimizer.step()
        return self

    def measure(self, samples: tuple[Tensor, Tensor]) -> Mapping[str, tuple[Any, float]]:
        x, y = samples
        scores = self.model(x)
        right = (scores.argmax(1) == y).sum()
        loss = F.cross_entropy(scores, y, reduction="sum")
        return {"loss": (loss, len(x)), "accuracy": (right, len(x))}

    def evaluate(self, num: int = 40) -> dict[str, float]:
        return self.job.evaluate((X[:num], Y[:num]), self.measure, batch_size=3)

    def expected(self, num: int = 40) -> dict[str, float]:
        """Of one process."""
        model = self.model.module.eval()
        with torch.no_grad():
            scores = model(X[:num])
            loss = F.cross_entropy(scores, Y[:num]).item()
        return {"loss": loss, "accuracy": (scores.argmax(1) == Y[:num]).double().mean().item()}


def test_a_newcomer_gets_what_is_trained_and_the_buffers() -> None:
    """It has read the same base, and gets neither that nor its second name."""
    world: ElasticWorld[Training]
    states: list[Any] = []

    def work(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if training.job.step_number == 3 and ctx.backend.worker == "0":
                states.append(training.job._replica.capture())
                world.join()

        return Training(ctx, on_step=on_step, epochs=8).run()

    world = ElasticWorld(2, work)
    results = world.run()
    assert set(states[0]["model"]) == {
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
        *("adapter.weight", "adapter.bias"),
    }
    assert len(results["2"].job.losses) < len(results["0"].job.losses) == 40
    for training in results.values():
        pairs = zip(training.model.parameters(), results["0"].model.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_another_base_is_named_on_all_ranks() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(2, lambda ctx: Training(ctx, shift=float(ctx.rank)).run())
    assert {type(each) for each in caught.value.errors.values()} == {Desync}
    assert all("the values of module.base.bias" in str(e) for e in caught.value.errors.values())


def test_checkpoints_have_no_base_and_go_on_with_the_same_only(tmp_path: Path) -> None:
    def stop(training: Training) -> None:
        if training.job.step_number == 5:
            raise KeyError

    with DistributedContext(LocalBackend()) as ctx, pytest.raises(KeyError):
        Training(ctx, on_step=stop, checkpoint=tmp_path, policy=Policy(save_every=4)).run()
    found = CheckpointStore(tmp_path).load_latest()
    assert found is not None
    assert "base.weight" not in found.state["replica"]["model"]
    with DistributedContext(LocalBackend()) as ctx:
        assert Training(ctx, checkpoint=tmp_path).run().job.step_number == 10
    for options, text in (
        ({"shift": 1.0}, "frozen 'module.base.bias' has other values"),
        ({"frozen": "sent"}, "give both the same frozen="),
    ):
        with DistributedContext(LocalBackend()) as ctx, pytest.raises(CheckpointError, match=text):
            Training(ctx, checkpoint=tmp_path, **options).run()


def test_rounds_leave_the_base_where_it_is() -> None:
    results = run_world(2, lambda ctx: Training(ctx, strategy=LocalSGD(every=2), policy=None).run())
    assert len({each.job.parameter_hash() for each in results}) == 1


@pytest.mark.parametrize("num", [40, 7, 2])
def test_each_sample_counts_once(num: int) -> None:
    """In a step and after the last; two samples are fewer than ranks."""

    def work(ctx: DistributedContext) -> Training:
        inside: list[tuple[dict[str, float], dict[str, float]]] = []

        def on_step(training: Training) -> None:
            if training.job.step_number % 5 == 0:
                training.model.module.norm.eval()
                found = training.evaluate(num)
                assert training.model.module.training
                assert not training.model.module.norm.training, "each module's mode is kept"
                copied = copy.deepcopy(training.model.module)
                inside.append((found, training.expected(num)))
                training.model.module.train()
                assert copied.training

        training = Training(ctx, on_step=on_step).run()
        inside.append((training.evaluate(num), training.expected(num)))
        assert len(inside) == 3
        for found, expected in inside:
            assert found == pytest.approx(expected, rel=1e-12)
        return training

    results = run_world(3, work)
    assert len({each.job.parameter_hash() for each in results}) == 1


@pytest.mark.parametrize("moment", ["before", "start", "after"])
def test_after_the_loop_those_that_are_left_evaluate_again(moment: str) -> None:
    is_last = threading.Event()

    def dies(worker: str, name: str, number: int) -> bool:
        return worker == "1" and is_last.is_set() and (number % 2 == 1) == (moment == "after")

    def work(ctx: MortalContext) -> Training:
        training = Training(ctx).run()
        measure = training.measure

        def measured(samples: Any) -> Any:
            if ctx.backend.worker == "1":
                is_last.set()
                if moment == "before":
                    ctx.die()
            return measure(samples)

        training.measure = measured  # type: ignore[method-assign]
        found = training.evaluate()
        assert found == pytest.approx(training.expected(), rel=1e-12)
        return training

    assert sorted(ElasticWorld(3, work, dies=dies).run()) == ["0", "2"]


def test_a_loss_that_is_no_number_is_told() -> None:
    def work(ctx: DistributedContext) -> float:
        job = Training(ctx).run().job
        found = job.evaluate((X,), lambda x: {"loss": (math.nan if ctx.rank else 0.0, len(x[0]))})
        return found["loss"]

    assert all(map(math.isnan, run_world(2, work)))


def test_mistakes_of_an_evaluation() -> None:
    with DistributedContext(LocalBackend()) as ctx:
        job = Training(ctx).run().job
        with pytest.raises(ValueError, match="has no samples"):
            job.evaluate((X[:0],), lambda x: {})
        with pytest.raises(ValueError, match="batch_size"):
            job.evaluate((X,), lambda x: {}, batch_size=0)
        with pytest.raises(ValueError, match='must be "sent" or "own"'):
            Training(ctx, frozen="mine")


def test_a_step_in_parts_is_evaluated_once() -> None:
    """Ranks have unlike numbers of parts; each part gets the result of the first."""

    def work(ctx: DistributedContext) -> Training:
        found: list[dict[str, float]] = []

        def on_step(training: Training) -> None:
            number = training.job._parts.number
            found.append(training.evaluate(7 + training.job.step_number))
            found.append(training.evaluate(3))
            assert found[-2:] == found[-2 * number - 2 :][:2]

        training = Training(ctx, on_step=on_step, epochs=1)
        training.job._training.cap.most = 2 if ctx.rank else 5
        training.run()
        assert len(found) == 2 * (10 if ctx.rank else 5)
        return training

    results = run_world(2, work)
    assert len({each.job.parameter_hash() for each in results}) == 1
