"""Machines that round differently train together: their parameters are kept equal."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck.context import DistributedContext
from potluck.errors import Diverged
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, DiLoCo, ElasticLoop, Policy
from potluck.training.replica import StateReplica

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(48, 6, generator=GENERATOR)
Y = torch.randint(0, 4, (48,), generator=GENERATOR)
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
    """The last bit of a parameter is the machine's: rounded down on an old one, up on others."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for each in (each for group in self.param_groups for each in group["params"]):
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
    policy: Policy | None = None,
    strategy: Any = None,
) -> ElasticLoop:
    _here.kind = kind or ("new" if ctx.rank == 0 else "old")
    model = DDP(copy.deepcopy(_START), ctx)
    optimizer = RoundingSGD(model.parameters(), lr=0.1, momentum=0.9)
    job = ElasticLoop(
        model, optimizer, (X, Y), batch_size=8, epochs=4, seed=5, strategy=strategy,
        policy=policy or Policy(hash_every=3, recovery_s=30),
    )  # fmt: skip
    for x, y in job:
        with job.step():
            on_step(job, model, optimizer)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            job.log(loss=loss)
            optimizer.step()
    return job


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
            next(iter(model.parameters())).data.view(torch.int32)[0, 0] ^= 2

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


@pytest.mark.parametrize("moment", range(0, 66, 6))
def test_a_death_anywhere_leaves_the_others_equal(moment: int) -> None:
    results = ElasticWorld(
        3, train, dies=lambda worker, name, number: worker == "1" and number == moment
    ).run()
    assert len({job.parameter_hash() for job in results.values()}) == 1
    assert all(job.step_number == 24 for job in results.values())


def test_who_joins_from_another_machine_is_aligned_before_bits_are_compared() -> None:
    """The newcomer is like rank 1, and gets the bits of rank 0."""
    joined = threading.Event()

    def work(ctx: MortalContext) -> ElasticLoop:
        def on_step(job: ElasticLoop, model: nn.Module, optimizer: Any) -> None:
            if ctx.backend.worker == "0" and job.step_number == 4:
                world.join()
                joined.set()
            if job.step_number == 4:
                assert joined.wait(30)

        return train(ctx, "new" if ctx.backend.worker == "0" else "old", on_step=on_step)

    world = ElasticWorld(2, work)
    results = world.run()
    assert len(results) == 3
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
