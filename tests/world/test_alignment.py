"""Machines that round differently train together: their parameters are kept equal."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck._core.context import DistributedContext
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import Diverged, Evicted, PeerLost
from potluck.testing.elastic import ElasticWorld, Killed, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, DiLoCo, ElasticLoop, Policy
from potluck.torch.replica import TorchReplica
from potluck.training.replica import StateReplica

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(48, 6, generator=GENERATOR)
Y = torch.randint(0, 4, (48,), generator=GENERATOR)
with torch.random.fork_rng():
    torch.manual_seed(3)
    _START = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
_here = threading.local()


@pytest.fixture(autouse=True)
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rank's thread is on a machine of the ``kind`` that ``train`` was called with. An alignment
    may take any part of the time: steps take almost none here."""
    monkeypatch.setattr("potluck.torch.replica.arithmetic", lambda device: _here.kind)
    monkeypatch.setattr("potluck.training.alignment._COST", 1e9)
    yield
    _here.__dict__.clear()


class RoundingSGD(torch.optim.SGD):
    """The last bit of a parameter, and of its momentum, is the machine's: rounded down on an old
    one, up on others."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        momenta = [state["momentum_buffer"] for state in self.state.values()]
        for each in [*self.param_groups[0]["params"], *momenta]:
            bits = each.data.view(torch.int32)
            if _here.kind == "old":
                bits.bitwise_and_(~1)
            elif _here.kind != "new":
                bits.bitwise_or_(1)
        return result


def train(
    ctx: DistributedContext,
    kind: str = "",
    *,
    on_step: Callable[[ElasticLoop, nn.Module, Any], None] = lambda *given: None,
    after_step: Callable[[ElasticLoop], None] = lambda job: None,
    policy: Policy | None = None,
    strategy: Any = None,
    checkpoint: CheckpointStore | None = None,
    optimizer_type: type[RoundingSGD] = RoundingSGD,
) -> ElasticLoop:
    _here.kind = kind or ("new" if ctx.rank == 0 else "old")
    model = DDP(copy.deepcopy(_START), ctx)
    optimizer = optimizer_type(model.parameters(), lr=0.1, momentum=0.9)
    job = ElasticLoop(
        model, optimizer, (X, Y), batch_size=8, epochs=4, seed=5, strategy=strategy,
        policy=policy or Policy(hash_every=3, recovery_s=30), checkpoint=checkpoint,
    )  # fmt: skip
    for x, y in job:
        with job.step():
            on_step(job, model, optimizer)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            job.log(loss=loss)
            optimizer.step()
        after_step(job)
    return job


def flip_a_bit(model: nn.Module) -> None:
    """One of the last, but not the last one, which the next update may round away."""
    next(iter(model.parameters())).data.view(torch.int32)[0, 0] ^= 16


def test_they_end_with_equal_parameters_and_the_losses_of_one_machine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "potluck.training.alignment")
    expected = run_world(3, lambda ctx: train(ctx, "new"))[0]
    assert not caplog.records
    found = run_world(3, train)
    assert len({job.parameter_hash() for job in found}) == 1
    for job in found:
        assert job.losses == pytest.approx(expected.losses, rel=1e-4)
    said = sorted(record.getMessage().partition(", and")[0] for record in caplog.records)
    assert said == [f"rank {rank} rounds otherwise than rank 0" for rank in (1, 2)]
    assert all(record.getMessage().endswith(" (old)") for record in caplog.records)


def test_releases_of_torch_with_unlike_options_of_optimizers_train_together() -> None:
    """One release has an option that the other does not know; there both are one torch."""

    class Newer(RoundingSGD):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            for group in self.param_groups:
                group["decoupled"] = False

    def of_this_release(ctx: DistributedContext, newer: int) -> ElasticLoop:
        return train(ctx, optimizer_type=Newer if ctx.rank == newer else RoundingSGD)

    for newer in (0, 1):
        found = run_world(2, lambda ctx, newer=newer: of_this_release(ctx, newer))
        assert len({job.parameter_hash() for job in found}) == 1
        assert found[0].losses == pytest.approx(run_world(1, train)[0].losses, rel=1e-4)


def test_between_two_alignments_only_rounding_is_between_them() -> None:
    seen: dict[int, list[bytes]] = {}

    def on_step(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
        numbers = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        seen.setdefault(job.step_number, []).append(numbers)

    run_world(2, lambda ctx: train(ctx, on_step=on_step))
    equal = [step for step, (one, other) in sorted(seen.items()) if one == other]
    assert equal == list(range(0, 24, 3))


@pytest.mark.parametrize("kinds", [("old", "old"), ("new", "old", "old")])
def test_machines_of_one_kind_must_have_equal_bits(kinds: tuple[str, ...]) -> None:
    """There a last bit is a mistake."""
    last = len(kinds) - 1

    def on_step(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
        if job.step_number == 7 and job.ctx.rank == last:
            flip_a_bit(model)

    with pytest.raises(WorldError, match=f"parameters of rank {last} differ from") as caught:
        run_world(len(kinds), lambda ctx: train(ctx, kinds[ctx.rank], on_step=on_step))
    assert all(isinstance(each, Diverged) for each in caught.value.errors.values())
    if last > 1:
        assert "those of rank 1, whose machine rounds in the same way" in str(caught.value)


def nudge(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
    """What a script does wrong: an update that only one rank applies."""
    if job.step_number == 7 and job.ctx.rank == 1:
        with torch.no_grad():
            model.module[2].weight[0, 0] += 0.01  # type: ignore[union-attr,index]


def test_what_is_no_rounding_is_found_on_all_ranks_and_named_on_its_own() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(3, lambda ctx: train(ctx, f"kind {ctx.rank}", on_step=nudge))
    errors = caught.value.errors
    assert all(isinstance(errors[rank], Diverged) for rank in range(3))
    text = "step 9 in epoch 1: rank 1 differs from rank 0"
    assert all(str(errors[rank]).startswith(text) for rank in range(3))
    assert "in parameters/module.2.weight (1.0e-02 apart, where the" in str(errors[1])


def test_a_learning_rate_of_ones_own_is_found() -> None:
    def on_step(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
        if job.step_number == 7 and job.ctx.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.101

    with pytest.raises(WorldError) as caught:
        run_world(2, lambda ctx: train(ctx, on_step=on_step))
    text = str(caught.value.errors[1])
    assert "in hyperparameters/0/0/lr (0.101, not 0.1), and not by rounding" in text


def test_learning_rates_that_two_libraries_round_differently_are_rounding() -> None:
    def on_step(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = math.nextafter(0.1, job.ctx.rank)

    found = run_world(2, lambda ctx: train(ctx, on_step=on_step))
    assert len({job.parameter_hash() for job in found}) == 1


def test_a_learning_rate_that_is_a_tensor_is_set_in_place() -> None:
    rates = [torch.tensor(0.1), torch.tensor(0.1 + 1e-8)]
    assert rates[0] != rates[1]

    def on_step(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
        group, rank = optimizer.param_groups[0], job.ctx.rank
        assert job.step_number == 0 or group["lr"] is rates[rank]
        group["lr"] = rates[rank]

    run_world(2, lambda ctx: train(ctx, on_step=on_step))
    assert rates[0] == rates[1]


@pytest.mark.parametrize("moment", range(0, 66, 6))
def test_a_death_anywhere_leaves_the_others_equal(moment: int) -> None:
    results = ElasticWorld(
        3, train, dies=lambda worker, name, number: worker == "1" and number == moment
    ).run()
    assert len({job.parameter_hash() for job in results.values()}) == 1
    assert all(job.step_number == 24 for job in results.values())


def kind_of_worker(ctx: MortalContext) -> str:
    return "new" if ctx.backend.worker == "0" else "old"


@pytest.mark.parametrize("death", [None, 7, 13])
@pytest.mark.parametrize("every", [1, 3, 50])
def test_who_joins_from_another_machine_goes_on_with_that_ones_optimizer(
    every: int, death: int | None
) -> None:
    """The newcomer is like rank 1, but gets the parameters and the momentum of rank 0, which may
    leave the two alone."""
    joined = threading.Event()

    def work(ctx: MortalContext) -> ElasticLoop:
        def on_step(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
            if ctx.backend.worker == "0" and job.step_number == 4:
                world.join()
                joined.set()
            if job.step_number == 4:
                assert joined.wait(30)
            if ctx.backend.worker == "0" and job.step_number == death:
                ctx.die()

        policy = Policy(hash_every=every, recovery_s=30)
        return train(ctx, kind_of_worker(ctx), on_step=on_step, policy=policy)

    world = ElasticWorld(2, work)
    results = world.run()
    assert len(results) == 3 - (death is not None)
    assert len({job.parameter_hash() for job in results.values()}) == 1


def test_like_machines_are_compared_when_the_first_unlike_one_joins() -> None:
    """Before that they are compared at step 50: what was wrong until now is not taken over."""
    joined = threading.Event()

    def work(ctx: MortalContext) -> ElasticLoop:
        worker = ctx.backend.worker

        def on_step(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
            if job.step_number == 7 and worker == "1":
                flip_a_bit(model)
                world.join()
                joined.set()
            if job.step_number == 7:
                assert joined.wait(30)

        policy = Policy(hash_every=50, recovery_s=30)
        return train(ctx, "old" if worker == "2" else "new", on_step=on_step, policy=policy)

    world = ElasticWorld(2, work)
    text = "parameters of rank 1 differ from those of rank 0, whose machine rounds in the same way"
    with pytest.raises(Diverged, match=text):
        world.run()


def test_newcomers_from_one_machine_to_like_ones_must_have_equal_bits() -> None:
    """Both get the momentum of rank 0, in one group: no last bit may be between them."""
    joined = threading.Event()

    def work(ctx: MortalContext) -> ElasticLoop:
        def on_step(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
            if job.step_number == 4 and ctx.backend.worker == "0":
                world.join()
                world.join()
                joined.set()
            if job.step_number == 4:
                assert joined.wait(30)
            if job.step_number == 10 and ctx.backend.worker == "3":
                flip_a_bit(model)

        return train(ctx, kind_of_worker(ctx), on_step=on_step)

    world = ElasticWorld(2, work)
    text = "parameters of rank 3 differ from those of rank 2, whose machine rounds in the same way"
    with pytest.raises(Diverged, match=text):
        world.run()


def test_an_alignment_that_a_loss_interrupts_is_made_up_for_by_like_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 is lost when rank 1 has its parameters and rank 2 does not."""
    take_shared = TorchReplica.take_shared

    def work(ctx: MortalContext) -> ElasticLoop:
        _here.ctx = ctx
        try:
            return train(ctx, kind_of_worker(ctx))
        except Evicted:
            raise Killed("worker 0") from None

    def take(self: TorchReplica, state: Any) -> None:
        ctx = _here.ctx
        if ctx.backend.worker == "2" and ctx.world_size == 3:
            ctx.backend.hub.kill("0")
            raise PeerLost("rank 0 is lost")
        take_shared(self, state)

    monkeypatch.setattr(TorchReplica, "take_shared", take)
    results = ElasticWorld(3, work).run()
    assert sorted(results) == ["1", "2"]
    assert len({job.parameter_hash() for job in results.values()}) == 1


def test_who_joins_when_the_others_save_at_the_end_makes_the_same_calls(tmp_path: Path) -> None:
    """The others are still in ``save``, the newcomer is at the end of its loop."""

    def work(ctx: MortalContext) -> ElasticLoop:
        worker = ctx.backend.worker

        def after_step(job: ElasticLoop) -> None:
            if job.done:
                if worker == "2":
                    world.join()
                    ctx.die()
                job.save()

        store = CheckpointStore(tmp_path / worker)
        return train(ctx, kind_of_worker(ctx), after_step=after_step, checkpoint=store)

    world = ElasticWorld(3, work)
    results = world.run()
    assert sorted(results) == ["0", "1", "3"]
    assert len({job.parameter_hash() for job in results.values()}) == 1


def test_alignments_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each step costs nothing, so hundreds of steps would pass between two of them."""
    taken = []

    def broadcast_state(*args: Any, **options: Any) -> Any:
        taken.append(args)
        return broadcast(*args, **options)

    from potluck.training.alignment import broadcast_state as broadcast

    monkeypatch.setattr("potluck.training.alignment.broadcast_state", broadcast_state)
    monkeypatch.setattr("potluck.training.alignment._COST", 1e-9)
    found = run_world(2, train)
    assert len(taken) == 2 * 2  # before step 3, and at the end
    assert len({job.parameter_hash() for job in found}) == 1


def test_the_outer_optimizer_rounds_alike_everywhere() -> None:
    """Local steps may differ: what is summed is equal, and so is what follows from it."""
    strategy = DiLoCo(every=4, fragments=2, delay=1)
    found = run_world(2, lambda ctx: train(ctx, strategy=strategy))
    assert len({job.parameter_hash() for job in found}) == 1


def test_a_script_without_torch_rounds_alike() -> None:
    state = {"w": X.numpy().copy()}
    replica = StateReplica(lambda: state, state.update)
    assert replica.arithmetic == ""
    replica.take_shared({"w": X.numpy() + 1})
    assert (replica.shared()["w"] == X.numpy() + 1).all()
