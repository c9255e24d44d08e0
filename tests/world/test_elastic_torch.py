"""The elastic loop with torch: one process or many, the same losses; faults change nothing."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import Desync, RemoteError
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, DistributedSampler, ElasticLoop
from potluck.training.elastic import Policy

EVERY_STEP = Policy(hash_every=1, save_every=4, recovery_s=30)
NUM_SAMPLES = 45
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 4, (NUM_SAMPLES,), generator=GENERATOR)
_START = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4)
).double()


class Training:
    """A small network under Adam with a schedule, as a script would write it."""

    def __init__(
        self,
        ctx: DistributedContext,
        *,
        on_step: Callable[[Training], None] = lambda training: None,
        inner: nn.Module | None = None,
        dataset: Any = (X, Y),
        **options: Any,
    ) -> None:
        self.ctx = ctx
        self.on_step = on_step
        self.model = DDP(copy.deepcopy(_START) if inner is None else inner, ctx)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.job = ElasticLoop(
            self.model,
            self.optimizer,
            dataset,
            batch_size=options.pop("batch_size", 8),
            epochs=options.pop("epochs", 3),
            seed=5,
            also={"scheduler": self.scheduler},
            policy=EVERY_STEP,
            **options,
        )
        self.norms: list[float] = []

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
        return self

    def whole(self) -> tuple[str, str]:
        """Hashes of the parameters and of the state as a whole."""
        return self.job.parameter_hash(), repr(self.scheduler.state_dict())


def serial(**options: Any) -> Training:
    with DistributedContext(LocalBackend()) as ctx:
        return Training(ctx, **options).run()


def plain_torch_losses(batch_size: int, epochs: int) -> list[float]:
    """The same training without a line of potluck but the order of samples."""
    from potluck.training.sampler import Schedule

    model = copy.deepcopy(_START)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.7)
    schedule = Schedule(NUM_SAMPLES, batch_size, epochs, seed=5)
    losses, committed = [], 0
    while committed < schedule.total:
        batch = schedule.batch(committed)
        chosen = schedule.indices(batch).tolist()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[chosen]), Y[chosen])
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        committed += batch.size
    return losses


def test_alone_the_loop_is_plain_torch() -> None:
    assert serial().job.losses == plain_torch_losses(8, 3)


@pytest.mark.parametrize("world_size", [2, 3, 4, 9])
def test_many_workers_have_the_loss_curve_of_one(world_size: int) -> None:
    """Nine workers on batches of eight, the last of an epoch five: some shares are empty."""
    expected = serial()
    results = run_world(world_size, lambda ctx: Training(ctx).run())
    for training in results:
        assert training.job.losses == pytest.approx(expected.job.losses, rel=1e-9)
        for mine, right in zip(
            training.model.parameters(), expected.model.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, right, rtol=1e-7, atol=1e-10)
    assert len({training.whole() for training in results}) == 1


def test_a_death_and_a_join_change_nothing_in_the_losses() -> None:
    expected = serial(epochs=6)
    world: ElasticWorld[Training]
    all_are_there = threading.Barrier(3)

    def work(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if training.job.step_number == 7 and ctx.world_size == 3:
                all_are_there.wait(30)
                if ctx.backend.worker == "1":
                    ctx.die()
            if training.job.step_number == 12 and ctx.backend.worker == "0":
                world.join()

        return Training(ctx, on_step=on_step, epochs=6).run()

    world = ElasticWorld(3, work)
    results = world.run()
    assert sorted(results) == ["0", "2", "3"]
    for training in results.values():
        told = training.job.losses
        assert told == pytest.approx(expected.job.losses[-len(told) :], rel=1e-9)
    assert len({training.whole() for training in results.values()}) == 1
    assert results["0"].job.num_reruns == 1
    assert len(results["3"].job.losses) < len(results["0"].job.losses) == 36


@pytest.mark.parametrize("moment", range(4, 40, 3))
def test_a_death_anywhere_keeps_losses_and_replicas_equal(moment: int) -> None:
    expected = serial(epochs=1)
    results = ElasticWorld(
        3,
        lambda ctx: Training(ctx, epochs=1).run(),
        dies=lambda worker, name, number: worker == "2" and number == moment,
    ).run()
    for training in results.values():
        told = training.job.losses
        # Where the dead one's vote is lost the step counts, but its loss stays unknown.
        assert sum(map(math.isnan, told)) <= 1
        known = [
            right if math.isnan(mine) else mine
            for mine, right in zip(told, expected.job.losses, strict=True)
        ]
        assert known == pytest.approx(expected.job.losses, rel=1e-9)
        for mine, right in zip(
            training.model.parameters(), expected.model.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, right, rtol=1e-7, atol=1e-10)
    assert len({training.whole() for training in results.values()}) == 1


class Watched(nn.Module):
    """Batch normalisation and dropout: a forward that changes buffers and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1).double()
        self.body = copy.deepcopy(_START)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(F.dropout(self.norm(x), 0.1, self.training))


def test_an_interrupted_step_leaves_no_trace_in_buffers_gradients_and_random_state() -> None:
    found: dict[str, Tensor] = {}
    both_are_there = threading.Barrier(2)

    def work(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if training.job.step_number != 2:
                return
            if ctx.world_size == 2:
                both_are_there.wait(30)
            if ctx.backend.worker == "1":
                ctx.die()
            now = {
                "count": training.model.module.norm.num_batches_tracked.clone(),
                "mean": training.model.module.norm.running_mean.clone(),
                "random": torch.get_rng_state(),
            }
            assert all(p.grad is None for p in training.model.parameters()) or not found
            for name, value in now.items():
                assert torch.equal(found.setdefault(name, value), value), name
            found[f"run {len([k for k in found if 'run' in k])}"] = torch.zeros(())

        return Training(ctx, on_step=on_step, inner=Watched(), epochs=1).run()

    results = ElasticWorld(2, work).run()
    assert sorted(results) == ["0"]
    assert "run 1" in found, "the step must have begun twice"


def test_a_resumed_training_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    expected = serial(epochs=4)

    class PowerCut(BaseException):
        pass

    def cut(training: Training) -> None:
        if training.job.step_number == 11:
            raise PowerCut

    with pytest.raises(PowerCut):
        serial(epochs=4, checkpoint=tmp_path, on_step=cut)
    resumed = serial(epochs=4, checkpoint=tmp_path)
    assert resumed.job.step_number == 24
    assert resumed.job.losses == expected.job.losses[8:]
    assert resumed.whole() == expected.whole()


def test_all_workers_killed_then_a_smaller_group_resumes(tmp_path: Path) -> None:
    expected = serial()

    def doomed(ctx: MortalContext) -> Training:
        def on_step(training: Training) -> None:
            if training.job.step_number == 9:
                ctx.die()

        return Training(ctx, on_step=on_step, checkpoint=tmp_path).run()

    assert ElasticWorld(4, doomed).run() == {}
    results = run_world(2, lambda ctx: Training(ctx, checkpoint=tmp_path).run())
    for training in results:
        assert training.job.losses == pytest.approx(expected.job.losses[8:], rel=1e-9)


def test_an_error_in_one_ranks_backward_names_that_rank_everywhere() -> None:
    def work(ctx: DistributedContext) -> None:
        def on_step(training: Training) -> None:
            if ctx.rank == 1 and training.job.step_number == 2:
                training.model.module[3].weight.register_hook(lambda gradient: 1 / 0)

        Training(ctx, on_step=on_step).run()

    with pytest.raises(WorldError) as caught:
        run_world(3, work)
    errors = caught.value.errors
    assert isinstance(errors[1], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(errors[rank], RemoteError)
        assert "rank 1" in str(errors[rank])
        assert "division by zero" in str(errors[rank])


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A data set as most scripts have it; sample ``bad`` can't be read."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise OSError(f"sample {index} can't be read")
        return X[index], Y[index]


def test_a_data_set_of_single_samples_gives_the_same_training() -> None:
    assert serial(dataset=Pairs()).job.losses == serial().job.losses


def test_a_sample_that_cannot_be_read_stops_all_ranks_with_that_reason() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(2, lambda ctx: Training(ctx, dataset=Pairs(bad=7)).run())
    kinds = {type(error) for error in caught.value.errors.values()}
    assert kinds == {OSError, RemoteError}
    assert all("sample 7 can't be read" in str(e) for e in caught.value.errors.values())


def test_an_unwrapped_model_in_a_group_is_a_mistake_with_a_remedy() -> None:
    def work(ctx: DistributedContext) -> None:
        model = copy.deepcopy(_START)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in ElasticLoop(model, optimizer, (X, Y), batch_size=8, ctx=ctx):
            raise AssertionError("no batch may be handed out")

    with pytest.raises(WorldError, match="wrap it in potluck"):
        run_world(2, work)


def test_two_optimizers_and_accumulation_make_one_step() -> None:
    def work(ctx: DistributedContext) -> list[float]:
        model = DDP(copy.deepcopy(_START), ctx)
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.Adam(parameters[2:])]
        job = ElasticLoop(model, optimizers, (X, Y), batch_size=8, policy=EVERY_STEP)
        for x, y in job:
            with job.step():
                model.zero_grad()
                half = (len(x) + 1) // 2
                with model.no_sync():
                    first = F.cross_entropy(model(x[:half]), y[:half], reduction="sum") / len(x)
                    first.backward()
                rest = F.cross_entropy(model(x[half:]), y[half:], reduction="sum") / len(x)
                rest.backward()
                job.log(loss=first + rest)
                for optimizer in optimizers:
                    optimizer.step()
        assert job.step_number == 6
        return job.losses

    with DistributedContext(LocalBackend()) as ctx:
        expected = work(ctx)
    for losses in run_world(3, work):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_an_optimizer_with_a_closure_is_refused() -> None:
    def work(ctx: DistributedContext) -> None:
        training = Training(ctx)
        for _ in training.job:
            with training.job.step():
                training.optimizer.step(lambda: torch.zeros(()))

    with pytest.raises(WorldError, match="closure"):
        run_world(1, work)


def test_a_corrupted_parameter_is_found_at_the_next_comparison() -> None:
    def work(ctx: DistributedContext) -> None:
        def on_step(training: Training) -> None:
            if ctx.rank == 1 and training.job.step_number == 4:
                with torch.no_grad():
                    training.model.module[0].weight[0, 0, 0, 0] += 1e-12

        Training(ctx, on_step=on_step).run()

    with pytest.raises(WorldError, match="Diverged: step 4"):
        run_world(3, work)


def test_the_sampler_gives_every_sample_once_per_epoch_also_after_a_change_of_the_group() -> None:
    def work(ctx: DistributedContext) -> list[list[int]]:
        sampler = DistributedSampler(range(NUM_SAMPLES), batch_size=10, seed=1, ctx=ctx)
        taken = []
        for indices in sampler:
            taken.append(indices)
            if len(taken) == 2:
                break
            sampler.commit()
        assert len(sampler) == 4
        again = DistributedSampler(range(NUM_SAMPLES), batch_size=10, seed=1, ctx=ctx)
        again.load_state_dict(sampler.state_dict())
        again.set_epoch(0)
        rest = list(again)
        assert rest[0] == taken[1]
        return [taken[0], *rest]

    parts = run_world(3, work)
    together = sorted(index for part in parts for indices in part for index in indices)
    assert together == list(range(NUM_SAMPLES))


def test_the_sampler_serves_torchs_data_loader() -> None:
    def work(ctx: DistributedContext) -> list[float]:
        sampler = DistributedSampler(Pairs(), batch_size=8, ctx=ctx)
        loader = torch.utils.data.DataLoader(Pairs(), batch_sampler=sampler)
        weights = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, _ in loader:
                weights.append(sampler.weight * (8 if len(weights) % 6 < 5 else 5))
                assert weights[-1] == pytest.approx(len(x))
                sampler.commit()
        assert sampler.epoch == 2
        return weights

    for weights in run_world(2, work):
        assert len(weights) == 12


def test_a_sampler_state_of_another_data_set_is_refused(tmp_path: Path) -> None:
    with DistributedContext(LocalBackend()) as ctx:
        state = DistributedSampler(range(5), batch_size=2, ctx=ctx).state_dict()
        with pytest.raises(ValueError, match="num_samples 5"):
            DistributedSampler(range(6), batch_size=2, ctx=ctx).load_state_dict(state)


def test_a_checkpoint_holds_model_optimizer_and_scheduler(tmp_path: Path) -> None:
    serial(checkpoint=CheckpointStore(tmp_path), epochs=1)
    loaded = CheckpointStore(tmp_path).load_latest()
    assert loaded is not None
    replica = loaded.state["replica"]
    assert list(replica["model"]) == list(_START.state_dict())
    assert replica["optimizers"][0]["state"][0]["exp_avg"].dtype == torch.float64
    assert replica["also"]["scheduler"]["last_epoch"] == 6


def test_a_rank_with_another_model_is_told_where_it_differs_before_it_takes_a_state() -> None:
    def work(ctx: DistributedContext) -> None:
        model = DDP(nn.Linear(2, 3 + ctx.rank), ctx)
        optimizer = torch.optim.SGD(model.parameters())
        data = (torch.ones(8, 2), torch.ones(8, 1))
        for _ in ElasticLoop(model, optimizer, data, batch_size=4, ctx=ctx):
            ctx.barrier()  # rank 0 waits for the other one, and learns of its error

    with pytest.raises(WorldError) as caught:
        run_world(2, work)
    expected = (
        "rank 0 (worker 0) has 'weight' (float32 of shape (3, 2), requires_grad=True) and "
        "rank 1 (worker 1) has 'weight' (float32 of shape (4, 2), requires_grad=True)"
    )
    for error in caught.value.errors.values():
        assert isinstance(error, Desync)
        assert expected in str(error)
