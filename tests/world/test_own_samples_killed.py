"""A worker with samples of its own is killed at any operation of a training in rounds: each sample
of the others counts once per epoch, whatever they knew of the round in which it was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.torch import DiLoCo, ElasticLoop, Gossip, LocalSGD, OuterSGD, Policy

SIZES = {"0": 13, "1": 8, "2": 10, "3": 9}
EPOCHS = 2

STRATEGIES = [
    Gossip(),
    Gossip(every=3),
    LocalSGD(every=2),
    LocalSGD(every=100),
    LocalSGD(every=3, deadline=0.0),  # ends each round but the first after a step
    DiLoCo(every=4, outer=OuterSGD(0.7, momentum=0.5), fragments=2, delay=1),
    DiLoCo(every=3, outer=OuterSGD(0.7), delay=1, deadline=0.0),
]


def samples_of(worker: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets are the numbers of the samples."""
    num = SIZES[worker]
    return torch.arange(3.0 * num).reshape(num, 3) / num, torch.arange(num)


class Seen:
    """By worker, how often each sample was in a step whose round counted."""

    def __init__(self) -> None:
        self.computed: dict[str, Counter[int]] = {worker: Counter() for worker in SIZES}
        self.epochs: dict[str, list[int]] = {worker: [] for worker in SIZES}

    def train(
        self,
        ctx: MortalContext,
        strategy: Any,
        on_step: Callable[[ElasticLoop, str], bool] = lambda job, worker: False,
        batch_size: int = 8,
        **options: Any,
    ) -> int:
        """``on_step`` is called before each step, and says whether to leave the loop."""
        worker = ctx.backend.worker
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job = ElasticLoop(
            *(model, optimizer, samples_of(worker)),
            batch_size=batch_size, epochs=EPOCHS, samples="own", strategy=strategy, ctx=ctx,
            policy=Policy(hash_every=1, recovery_s=30, save_every=1),
            callbacks=[lambda epoch, loss: self.epochs[worker].append(epoch)],
            **options,
        )  # fmt: skip
        for x, numbers in job:
            if on_step(job, worker):
                break
            with job.step():
                optimizer.zero_grad()
                loss = model(x).square().sum()
                loss.backward()
                job.log(loss=loss)
                optimizer.step()
                self.computed[worker].update(numbers.tolist())
        return job.committed

    def check(self, workers: set[str]) -> None:
        for worker in workers:
            expected = dict.fromkeys(range(SIZES[worker]), EPOCHS)
            assert dict(self.computed[worker]) == expected, worker
            assert self.epochs[worker] == list(range(EPOCHS)), worker


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("victim", ["0", "2"])
def test_each_sample_of_a_survivor_counts_once_per_epoch(strategy: Any, victim: str) -> None:
    # Four steps in an epoch, or three where a round goes on over its end with three, too: there are
    # fewer moments, and each of them takes a training.
    batch_size = 8 if strategy.every == 3 else 11
    for moment in range(1000):
        seen = Seen()
        world = ElasticWorld(
            3,
            lambda ctx, seen=seen: seen.train(ctx, strategy, batch_size=batch_size),
            dies=lambda worker, _, at, moment=moment: (worker, at) == (victim, moment),
        )
        results = world.run()
        assert set(results) >= {"0", "1", "2"} - {victim}
        try:
            seen.check(set(results))
        except AssertionError as error:
            error.add_note(f"killed at moment {moment}")
            raise
        if victim in results:
            break
    assert moment > 10


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_worker_that_joins_takes_no_sample_of_the_others_time(strategy: Any) -> None:
    """It begins with the positions that nobody was dealt; the others lose nothing to it."""
    seen, joined = Seen(), []

    def on_step(job: ElasticLoop, worker: str) -> bool:
        if worker == "1" and job.committed > 3 and not joined:
            joined.append(world.join())
        return False

    world = ElasticWorld(3, lambda ctx: seen.train(ctx, strategy, on_step))
    assert set(world.run()) == {"0", "1", "2", "3"}
    assert joined == ["3"]
    seen.check({"0", "1", "2"})
    assert all(times <= EPOCHS for times in seen.computed["3"].values())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_training_that_resumes_goes_on_with_the_samples_that_are_left(
    strategy: Any, tmp_path: Path
) -> None:
    seen = Seen()
    leaves = [2, 3, 5]  # the rounds after which all workers are lost

    def on_step(job: ElasticLoop, worker: str) -> bool:
        return bool(leaves) and len(job.losses) >= leaves[0]

    for _ in (*leaves, 0):
        before = max(map(len, seen.epochs.values()))
        world = ElasticWorld(
            3, lambda ctx: seen.train(ctx, strategy, on_step, checkpoint=tmp_path / "kept")
        )
        world.run()
        assert max(map(len, seen.epochs.values())) >= before
        leaves = leaves[1:]
    for worker in ("0", "1", "2"):
        expected = dict.fromkeys(range(SIZES[worker]), EPOCHS)
        assert dict(seen.computed[worker]) == expected, worker
