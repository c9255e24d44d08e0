"""Local OuterSGD and DiLoCo in the elastic loop: the mathematics, losses, joins, checkpoints."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import PowerSGD, Quantize, RandomK, TopK
from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import CheckpointError, Diverged
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import (
    DDP,
    DataParallel,
    DiLoCo,
    ElasticLoop,
    GradScaler,
    LocalSGD,
    LossScale,
    NoiseBatching,
    OuterSGD,
    Policy,
)
from potluck.training.sampler import Schedule

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(48, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 4, (48,), generator=GENERATOR)
_START = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
EVERY_ROUND = Policy(hash_every=1, save_every=4, recovery_s=30)


class Training:
    """A small network, as a script would train it."""

    def __init__(
        self,
        ctx: DistributedContext,
        strategy: Any,
        *,
        on_step: Callable[[Training], None] = lambda training: None,
        inner: nn.Module = _START,
        adam: bool = False,
        lr: float = 0.1,
        **options: Any,
    ) -> None:
        self.ctx, self.on_step = ctx, on_step
        self.model = DDP(copy.deepcopy(inner), ctx)
        kind = torch.optim.Adam if adam else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.8)
        self.job = ElasticLoop(
            self.model, self.optimizer, (X, Y), batch_size=8, epochs=options.pop("epochs", 2),
            seed=5, also={"scheduler": self.scheduler} if options.pop("schedules", True) else None,
            policy=options.pop("policy", EVERY_ROUND), strategy=strategy, **options,
        )  # fmt: skip
        self.num_steps = 0

    def run(self) -> Training:
        for x, y in self.job:
            with self.job.step():
                self.on_step(self)
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.job.log(loss=loss)
                self.optimizer.step()
                self.scheduler.step()
                self.num_steps += 1
        return self

    def parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "strategy", [LocalSGD(every=1), DiLoCo(every=1, outer=OuterSGD(1.0))], ids=repr
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rounds_of_one_step_are_data_parallelism(strategy: Any, world_size: int) -> None:
    """With the sign of the pseudo-gradient wrong the loss would rise."""
    expected = run_world(world_size, lambda ctx: Training(ctx, DataParallel()).run())
    found = run_world(world_size, lambda ctx: Training(ctx, strategy).run())
    for training, right in zip(found, expected, strict=True):
        close(training.parameters(), right.parameters())
        assert training.job.losses == pytest.approx(right.job.losses, rel=1e-10)
    assert len({training.job.parameter_hash() for training in found}) == 1


def by_hand(every: int, sgd: OuterSGD, num_ranks: int) -> list[Tensor]:
    """DiLoCo in plain torch, with torch's own SGD as the outer optimizer."""
    anchor = copy.deepcopy(_START)
    optimizer = torch.optim.SGD(
        anchor.parameters(), sgd.learning_rate, momentum=sgd.momentum, nesterov=sgd.nesterov
    )
    schedule = Schedule(48, 8, 2, seed=5)
    rates, committed = [0.1 * 0.8 ** (step // 5) for step in range(100)], 0
    while committed < schedule.total:
        batch = schedule.batch(committed, 8 * every)
        indices = torch.as_tensor(schedule.indices(batch).copy())
        moved = [torch.zeros_like(p) for p in anchor.parameters()]
        for part in indices.chunk(num_ranks):
            model = copy.deepcopy(anchor)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            num_steps = -(-len(indices) // 8)
            for number, mine in enumerate(part.tensor_split(num_steps)):
                inner.param_groups[0]["lr"] = rates[committed // 8 + number]
                inner.zero_grad()
                F.cross_entropy(model(X[mine]), Y[mine]).backward()
                inner.step()
            for total, old, new in zip(moved, anchor.parameters(), model.parameters(), strict=True):
                total += (old - new).detach() * len(part) / len(indices)
        for parameter, gradient in zip(anchor.parameters(), moved, strict=True):
            parameter.grad = gradient
        optimizer.step()
        committed += batch.size
    return [parameter.detach() for parameter in anchor.parameters()]


@pytest.mark.parametrize(
    ("strategy", "sgd"),
    [
        (LocalSGD(every=3), OuterSGD(1.0)),
        (DiLoCo(every=2), OuterSGD(0.7, momentum=0.9, nesterov=True)),
        (DiLoCo(every=6, outer=OuterSGD(0.5, momentum=0.5)), OuterSGD(0.5, momentum=0.5)),
    ],
    ids=repr,
)
def test_the_outer_optimizer_is_torchs_on_the_mean_of_what_changed(
    strategy: Any, sgd: OuterSGD
) -> None:
    expected = by_hand(strategy.every, sgd, 2)
    for training in run_world(2, lambda ctx: Training(ctx, strategy).run()):
        close(training.parameters(), expected)
        assert training.job.step_number == training.num_steps == 12


def streaming_by_hand(strategy: DiLoCo) -> list[Tensor]:
    """Streaming DiLoCo on two ranks, in plain torch: rounds of ``every / fragments`` steps, whose
    fragment arrives ``delay`` steps into the next round, but for the last round of an epoch."""
    sgd, num = strategy.outer, strategy.every // strategy.fragments
    anchors = [p.detach().clone() for p in _START.parameters()]
    models = [copy.deepcopy(_START) for _ in range(2)]
    inner = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    momenta: list[Tensor | None] = [None] * len(anchors)
    fragments: list[tuple[int, ...]] = [(0,), (1, 2, 3)]  # 48 and 8 + 32 + 4 elements

    def difference(chosen: tuple[int, ...]) -> dict[int, Tensor]:
        parameters = [list(model.parameters()) for model in models]
        return {i: anchors[i] - sum(each[i].detach() for each in parameters) / 2 for i in chosen}

    def apply(moved: dict[int, Tensor], mixing: float) -> None:
        for i, gradient in moved.items():
            known = momenta[i]
            momentum = gradient if known is None else known * sgd.momentum + gradient
            momenta[i] = momentum
            step = gradient + sgd.momentum * momentum if sgd.nesterov else momentum
            anchors[i] = anchors[i] - sgd.learning_rate * step
            for model in models:
                parameter = list(model.parameters())[i]
                parameter.data = mixing * parameter.data + (1 - mixing) * anchors[i]

    schedule, committed, number = Schedule(48, 8, 2, seed=5), 0, 0
    waiting: dict[int, Tensor] | None = None
    while committed < schedule.total:
        batch = schedule.batch(committed, 8 * num)
        indices = torch.as_tensor(schedule.indices(batch).copy())
        parts = [part.tensor_split(num) for part in indices.chunk(2)]
        for step in range(num):
            if waiting is not None and step == strategy.delay:
                apply(waiting, strategy.mixing)
                waiting = None
            for model, optimizer, part in zip(models, inner, parts, strict=True):
                optimizer.param_groups[0]["lr"] = 0.1 * 0.8 ** ((committed // 8 + step) // 5)
                optimizer.zero_grad()
                F.cross_entropy(model(X[part[step]]), Y[part[step]]).backward()
                optimizer.step()
        committed += batch.size
        waiting = difference(fragments[number % 2])
        number += 1
        if not strategy.delay or committed % 48 == 0:
            apply(waiting, 0)
            waiting = None
    apply(difference((0, 1, 2, 3)), 0)
    return anchors


@pytest.mark.parametrize("delay", [0, 1])
def test_fragments_and_delay_are_those_of_streaming_diloco(delay: int) -> None:
    strategy = DiLoCo(every=4, fragments=2, delay=delay, mixing=0.4)
    expected = streaming_by_hand(strategy)
    for training in run_world(2, lambda ctx: Training(ctx, strategy).run()):
        close(training.parameters(), expected)
        assert training.job.step_number == training.num_steps == 12


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("num_fragments", [2, 3])
def test_when_all_fragments_are_reduced_each_rank_counts_with_its_samples(
    world_size: int, num_fragments: int
) -> None:
    """One sample a step: the other ranks have computed nothing, as one that has just joined."""
    strategy = DiLoCo(every=num_fragments, fragments=num_fragments, outer=OuterSGD(1.0))

    def run(ctx: DistributedContext) -> list[Tensor]:
        model = copy.deepcopy(_START)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        data = X[:1], Y[:1]
        job = ElasticLoop(
            model,
            optimizer,
            data,
            batch_size=1,
            epochs=num_fragments,
            strategy=strategy,
            ctx=ctx,
        )
        for x, y in job:
            with job.step():
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return [each.detach() for each in model.parameters()]

    alone = run_world(1, run)[0]
    for found in run_world(world_size, run):
        close(found, alone)


@pytest.mark.parametrize(
    "compression", [TopK(0.1, chunk=16), TopK(0.2, bits=2), Quantize(8), RandomK(0.3)], ids=repr
)
def test_what_is_applied_and_what_is_kept_is_what_changed(
    compression: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sum over rounds of the applied = sum over ranks and rounds of what changed - residuals."""
    went: dict[int, float] = {0: 0.0, 1: 0.0}

    exchange = type(compression).exchange

    def noting(self: Any, comm: Any, array: Any, *rest: Any) -> Any:
        went[comm._ctx.rank] = went[comm._ctx.rank] + array.astype("float64")
        return exchange(self, comm, array, *rest)

    monkeypatch.setattr(type(compression), "exchange", noting)
    strategy = DiLoCo(every=2, outer=OuterSGD(1.0), compression=compression)
    results = run_world(2, lambda ctx: Training(ctx, strategy, schedules=False).run())
    first, second = (training.job._outer for training in results)
    kept = sum(
        each.capture_residuals()[name].astype("float64").sum()
        for each in (first, second)
        for name in each.capture_residuals()
    )
    start = sum(p.detach().sum().item() for p in _START.parameters())
    end = sum(p.sum().item() for p in results[0].parameters())
    total = sum(float(each.sum()) for each in went.values())
    exact = 1e-6 if isinstance(compression, Quantize) else 1e-12  # codecs encode float32
    assert start - end == pytest.approx(total - kept, abs=exact)
    assert abs(kept) > 1e-6, "something must have been lost on the way"
    assert len({training.job.parameter_hash() for training in results}) == 1


def test_residuals_of_another_shape_are_refused_and_change_nothing() -> None:
    """Of a checkpoint of another model, or of one that another program wrote."""

    def work(ctx: DistributedContext) -> None:
        strategy = DiLoCo(every=2, compression=TopK(0.1, chunk=16))
        outer = Training(ctx, strategy).run().job._outer
        assert outer is not None
        own = outer.capture_residuals()
        assert own["0.weight"].any()
        for wrong in (np.zeros(1), np.zeros(47), np.zeros((8, 6))):
            states = [own, own | {"0.weight": wrong}]
            with pytest.raises(CheckpointError, match=r"residual '0.weight' of \d+ elements, this"):
                outer.restore_residuals(states)
        after = outer.capture_residuals()
        assert after.keys() == own.keys()
        assert all(np.array_equal(after[name], own[name]) for name in own)
        assert outer.restore_residuals([own]) == own.keys()

    run_world(2, work)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("deadline", [None, 0.0])
def test_what_is_kept_is_paid_once_also_when_a_part_of_a_round_is_missing(
    delay: int, deadline: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies inside a round, or ends its rounds early: the others' weights add up to 1, and
    what was applied is what changed, less what is still kept."""
    went: dict[tuple[str, int], float] = {}

    exchange = TopK.exchange

    def noting(self: TopK, comm: Any, array: Any, residual: Any, call: int) -> Any:
        sent = float(array.astype("float64").sum())
        went[comm._ctx.backend.worker, call] = sent  # the last try counts
        return exchange(self, comm, array, residual, call)

    def kept(training: Training) -> float:
        residuals = training.job._outer.capture_residuals().values()
        return sum(float(each.astype("float64").sum()) for each in residuals)

    monkeypatch.setattr(TopK, "exchange", noting)
    lost: list[float] = []

    def work(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if ctx.backend.worker == "2" and training.num_steps == 5:
                lost.append(kept(training))
                ctx.die()

        return Training(ctx, strategy, on_step=on_step).run()

    strategy = DiLoCo(
        every=3, outer=OuterSGD(1.0), compression=TopK(0.2, bits=2), delay=delay, mixing=0.0,
        deadline=deadline,
    )  # fmt: skip
    results = ElasticWorld(3, work).run()
    assert sorted(results) == ["0", "1"]
    start = sum(p.detach().sum().item() for p in _START.parameters())
    ends = [sum(p.sum().item() for p in each.parameters()) for each in results.values()]
    total = sum(went.values()) - sum(kept(each) for each in results.values()) - lost[0]
    assert ends[0] == ends[1]
    assert start - ends[0] == pytest.approx(total, abs=1e-6)
    assert len(lost) == 1


@pytest.mark.parametrize("adam", [False, True])
def test_alone_local_sgd_is_plain_training(adam: bool) -> None:
    with DistributedContext(LocalBackend()) as ctx:
        plain = Training(ctx, None, adam=adam).run()
        rounds = Training(ctx, LocalSGD(every=4), adam=adam).run()
    close(rounds.parameters(), plain.parameters())


@pytest.mark.parametrize(
    "strategy", [LocalSGD(every=3), DiLoCo(every=4, delay=1, fragments=2)], ids=repr
)
def test_a_step_that_overflows_changes_nothing_on_its_own_rank_alone(strategy: Any) -> None:
    def train(ctx: DistributedContext) -> tuple[list[float], str]:
        model = DDP(copy.deepcopy(_START).float(), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler(LossScale(scale=64.0))
        job = ElasticLoop(
            model, optimizer, (X.float(), Y), batch_size=8, seed=5,
            also={"scaler": scaler}, policy=EVERY_ROUND, strategy=strategy,
        )  # fmt: skip
        factors: list[float] = []
        for x, y in job:
            with job.step():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                overflows = ctx.rank == 1 and len(factors) == 1
                scaler.scale(loss * torch.inf if overflows else loss).backward()
                before = copy.deepcopy(model.state_dict())
                scaler.step(optimizer)
                scaler.update()
                is_same = [torch.equal(old, model.state_dict()[n]) for n, old in before.items()]
                assert is_same == [overflows] * len(is_same)
            factors.append(scaler.factor)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return factors, job.parameter_hash()

    (factors, mine), (others, theirs) = run_world(2, train)
    assert (factors, others) == ([64.0] * 6, [64.0] + [32.0] * 5)
    assert mine == theirs


def test_a_model_in_bfloat16_keeps_its_global_parameters_in_float32() -> None:
    inner = copy.deepcopy(_START).bfloat16()

    def work(ctx: DistributedContext) -> str:
        model = DDP(copy.deepcopy(inner), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = ElasticLoop(
            model, optimizer, (X.bfloat16(), Y), batch_size=8, strategy=DiLoCo(every=2), ctx=ctx
        )
        for x, y in job:
            with job.step():
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert model.module[0].weight.dtype == torch.bfloat16
        return job.parameter_hash()

    assert len(set(run_world(2, work))) == 1


def test_buffers_are_averaged_and_gradients_are_reduced_again_after_the_loop() -> None:
    inner = nn.Sequential(nn.BatchNorm1d(6), copy.deepcopy(_START)).double()

    def work(ctx: DistributedContext) -> tuple[Tensor, bool]:
        training = Training(ctx, LocalSGD(every=2), inner=inner).run()
        return training.model.module[0].running_mean, training.model.reduces

    (first, reduces), (second, _) = run_world(2, work)
    assert torch.equal(first, second)
    assert first.abs().sum() > 0
    assert reduces


class Counting(nn.Module):
    """A buffer that is in no state_dict, and that each rank changes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = copy.deepcopy(_START)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum().double()
        out: Tensor = self.inner(x)
        return out


def test_a_buffer_that_does_not_travel_with_the_state_is_each_ranks_own() -> None:
    def work(ctx: DistributedContext) -> Tensor:
        return Training(ctx, LocalSGD(every=2), inner=Counting().double()).run().model.module.seen

    first, second = run_world(2, work)
    assert not torch.equal(first, second)


class Tied(nn.Module):
    """Two names of one parameter, and a submodule with the name that a wrapper gives."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.module.weight
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.again(self.module(x)))
        return out


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_newcomer_gets_the_global_parameters_of_shared_ones_too(wrapped: bool) -> None:
    joined = threading.Event()
    start = Tied().double()
    world: ElasticWorld[str]

    def work(ctx: MortalContext) -> str:
        model: nn.Module = copy.deepcopy(start)
        model = DDP(model, ctx) if wrapped else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = ElasticLoop(
            model, optimizer, (X, Y), batch_size=4, epochs=6, strategy=LocalSGD(every=3), ctx=ctx,
            policy=EVERY_ROUND,
        )  # fmt: skip
        num_steps = 0
        for x, y in job:
            with job.step():
                num_steps += 1
                if ctx.backend.worker == "0" and num_steps == 4:
                    joined.set()
                    world.join()
                if ctx.backend.worker == "1" and num_steps == 5:
                    joined.wait(30)
                    ctx.die()  # in the middle of a round, into which the newcomer comes
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return job.parameter_hash()

    world = ElasticWorld(2, work)
    results = world.run()
    assert sorted(results) == ["0", "2"]
    assert len(set(results.values())) == 1


STRATEGY = DiLoCo(every=3, outer=OuterSGD(0.7, momentum=0.9, nesterov=True))


STREAMING = DiLoCo(
    every=4, outer=OuterSGD(1.0), fragments=2, delay=1, compression=TopK(0.2, chunk=16, bits=4)
)


@pytest.mark.parametrize("moment", range(3, 36, 2))
def test_a_death_anywhere_leaves_the_survivors_equal(moment: int) -> None:
    """Also in the reduction of the pseudo-gradients, and in the vote. (With compression:
    ``test_kills_in_rounds.py``.)"""
    results = ElasticWorld(
        3,
        lambda ctx: Training(ctx, STRATEGY, epochs=1).run(),
        dies=lambda worker, name, number: worker == "2" and number == moment,
    ).run()
    assert {"0", "1"} <= results.keys()
    assert len({training.job.parameter_hash() for training in results.values()}) == 1
    assert all(training.job.committed == 48 for training in results.values())


@pytest.mark.parametrize("strategy", [STRATEGY, STREAMING], ids=["dense", "streaming"])
def test_a_newcomer_gets_the_outer_momentum_and_all_end_equal(strategy: DiLoCo) -> None:
    joined = threading.Event()
    world: ElasticWorld[Training]

    def work(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if training.num_steps == 7 and ctx.backend.worker == "0" and not joined.is_set():
                joined.set()
                world.join()
            if ctx.backend.worker == "1" and training.num_steps == 16:
                ctx.die()  # inside a round of three workers

        return Training(ctx, strategy, epochs=6, on_step=on_step, adam=True).run()

    world = ElasticWorld(2, work)
    results = world.run()
    assert sorted(results) == ["0", "2"]
    assert len({training.job.parameter_hash() for training in results.values()}) == 1
    assert len({repr(training.scheduler.state_dict()) for training in results.values()}) == 1
    assert results["0"].job.num_reruns == 0


@pytest.mark.parametrize("strategy", [DataParallel(), STRATEGY], ids=repr)
def test_a_newcomer_with_a_stale_learning_rate_is_found(strategy: Any) -> None:
    joined = threading.Event()
    world: ElasticWorld[Training]

    def work(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if training.num_steps == 4 and ctx.backend.worker == "0" and not joined.is_set():
                joined.set()
                world.join()
            # A script with a schedule of its own, that counts the steps of its process.
            training.optimizer.param_groups[0]["lr"] = 0.1 / (1 + training.num_steps)

        return Training(ctx, strategy, epochs=9, on_step=on_step, schedules=False).run()

    world = ElasticWorld(2, work)
    with pytest.raises(Diverged):
        world.run()


@pytest.mark.parametrize("strategy", [STRATEGY, STREAMING], ids=["dense", "streaming"])
def test_a_resumed_training_ends_as_an_uninterrupted_one(strategy: DiLoCo, tmp_path: Path) -> None:
    """With residuals and outer momentum. A checkpoint reduces all fragments, so both write them."""

    def run(**options: Any) -> list[Training]:
        return run_world(2, lambda ctx: Training(ctx, strategy, epochs=4, **options).run())

    expected = run(checkpoint=CheckpointStore(tmp_path / "undisturbed"))

    def doomed(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if training.num_steps == 14:
                ctx.die()

        store = CheckpointStore(tmp_path / ctx.backend.worker)
        return Training(ctx, strategy, epochs=4, on_step=on_step, checkpoint=store).run()

    assert ElasticWorld(2, doomed).run() == {}
    resumed = run(checkpoint=CheckpointStore(tmp_path / "0"))
    assert resumed[0].num_steps == 24 - 12
    for training in resumed:
        assert training.job.parameter_hash() == expected[0].job.parameter_hash()


def test_another_strategy_on_resume_is_refused(tmp_path: Path) -> None:
    def run(strategy: Any) -> None:
        with DistributedContext(LocalBackend()) as ctx:
            Training(ctx, strategy, checkpoint=tmp_path).run()

    run(LocalSGD(every=4))
    for other in (LocalSGD(every=2), DiLoCo(every=4), DataParallel(), None):
        with pytest.raises(CheckpointError, match=r"strategy=LocalSGD\(every=4"):
            run(other)


def test_data_parallel_sets_the_compression_of_its_model() -> None:
    def work(ctx: DistributedContext) -> None:
        strategy = DataParallel(compression=TopK(0.5))
        training = Training(ctx, strategy)
        assert training.model.compression is None, "all below dense_below"
        training.run()

    run_world(2, work)


def test_data_parallel_keeps_the_other_options_of_the_model() -> None:
    with DistributedContext(LocalBackend()) as ctx:
        model = DDP(copy.deepcopy(_START), ctx, dense_below=40, warmup_steps=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = DataParallel(compression=TopK(0.5))
        ElasticLoop(model, optimizer, (X, Y), batch_size=8, strategy=strategy)
        chosen = dict(zip(model.compression.names, model.compression.compressors, strict=True))
        assert {name for name, each in chosen.items() if each} == {"0.weight"}
        assert model.compression.compressor(0) is None, "not in the first steps"


def test_data_parallel_without_a_compression_leaves_that_of_the_model() -> None:
    with DistributedContext(LocalBackend()) as ctx:
        model = DDP(copy.deepcopy(_START), ctx, compression=TopK(0.5), dense_below=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.compression
        assert any(before.compressors)
        ElasticLoop(model, optimizer, (X, Y), batch_size=8, strategy=DataParallel())
        assert model.compression is before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGD(every=0), r"LocalSGD\(every=0\): a round has at least 1 step"),
        (lambda: LocalSGD(every=True), r"LocalSGD\(every=True\): every must be an int"),
        (lambda: DiLoCo(every=2.5), r"DiLoCo\(every=2.5\): every must be an int"),
        (lambda: DiLoCo(outer=torch.optim.SGD), r"pass potluck.torch.OuterSGD\(learning_rate"),
        (
            lambda: DiLoCo(outer=torch.optim.SGD(_START.parameters(), lr=0.7)),
            "outer is a torch.optim.sgd.SGD; pass potluck",
        ),
        (lambda: DiLoCo(deadline=-1), "must be finite, at least 0"),
        (lambda: DiLoCo(deadline="3"), "deadline must be a number"),
        (lambda: DiLoCo(mixing="half"), "mixing must be a number"),
        (lambda: DiLoCo(delay=1.0), "delay must be an int"),
        (lambda: DiLoCo(fragments=0), "fragments is 0"),
        (lambda: DiLoCo(every=10, fragments=4), "every must be a multiple"),
        (lambda: DiLoCo(every=8, delay=8), "delay is 8; .* below every / fragments = 8 steps"),
        (lambda: DiLoCo(every=8, fragments=4, delay=2), "every / fragments = 2 steps"),
        (lambda: DiLoCo(mixing=1), "mixing is 1"),
        (lambda: DiLoCo(compression=8), "compression is 8"),
        (lambda: DiLoCo(compression=PowerSGD(2)), "take TopK"),
        (lambda: OuterSGD(lr=0.7), "write learning_rate="),  # type: ignore[call-arg]
        (lambda: OuterSGD(0), "learning_rate must be positive"),
        (
            lambda: OuterSGD("0.7"),
            r"OuterSGD\(learning_rate='0.7'\): learning_rate must be a number",
        ),
        (lambda: OuterSGD(1, momentum=1), "below 1"),
        (lambda: OuterSGD(1, nesterov=True), "needs a momentum"),
        (lambda: DataParallel(compression=0.1), "compression is 0.1"),
        (lambda: DataParallel(compression=lambda name, p: None), r"belongs to DistributedDataPar"),
    ],
)
def test_bad_options_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_what_has_no_meaning_with_rounds_is_refused() -> None:
    with DistributedContext(LocalBackend()) as ctx:
        with pytest.raises(TypeError, match="strategy is 'fast'"):
            Training(ctx, "fast")
        with pytest.raises(ValueError, match="fragments is 5, but the model has 4 parameters"):
            Training(ctx, DiLoCo(every=5, fragments=5))
        batching = Policy(batching=NoiseBatching(min_batch=8, max_batch=16))
        with pytest.raises(ValueError, match="leave it out with a strategy of rounds"):
            Training(ctx, STRATEGY, policy=batching)
        model = DDP(nn.Linear(100, 100), ctx, compression=TopK(0.1))
        with pytest.raises(ValueError, match="leave its compression= out"):
            ElasticLoop(
                model, torch.optim.SGD(model.parameters(), lr=0.1), (X, Y), batch_size=8,
                strategy=STRATEGY,
            )  # fmt: skip


@pytest.mark.parametrize(
    "strategy",
    [LocalSGD(every=2), DiLoCo(every=2, outer=OuterSGD(1.0), compression=TopK(0.2, chunk=16))],
    ids=["dense", "sparse"],
)
def test_what_is_not_finite_in_a_round_is_named_once_on_all_ranks(
    strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def work(ctx: DistributedContext) -> Training:
        def on_step(training: Training) -> None:
            if ctx.rank == 1 and training.num_steps == 1:
                with torch.no_grad():
                    training.model.module[2].bias[3] = torch.nan

        return Training(ctx, strategy, on_step=on_step, epochs=1).run()

    with caplog.at_level("WARNING"):
        results = run_world(2, work)
    for training in results:
        assert training.job.num_nonfinite["2.bias"] >= 1
        residuals = training.job._outer.capture_residuals().values()
        assert all(np.isfinite(each).all() for each in residuals)
    named = [record.getMessage() for record in caplog.records]
    told = [line for line in named if line.startswith("2.bias: ")]
    assert len(told) == 2, "one line of each rank"
    assert all("of what round 0 changed are inf or NaN" in line for line in told)


def test_an_error_in_a_round_is_named_on_all_ranks() -> None:
    def work(ctx: DistributedContext) -> None:
        def on_step(training: Training) -> None:
            if ctx.rank == 1 and training.num_steps == 2:
                raise ZeroDivisionError("a bug")

        Training(ctx, STRATEGY, on_step=on_step).run()

    with pytest.raises(WorldError) as caught:
        run_world(2, work)
    assert "a bug" in str(caught.value.errors[0])
