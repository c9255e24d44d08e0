"""A worker killed at any operation of DiLoCo with top-k leaves no trace in the others: parameters,
residuals and outer momenta are, bit by bit, those of an undisturbed run of what was counted."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import TopK
from potluck._core.context import DistributedContext
from potluck.testing.elastic import ElasticWorld
from potluck.testing.world import run_world
from potluck.torch import DiLoCo, ElasticLoop, OuterSGD, Policy
from potluck.torch.outer import OuterStrategy

_GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(48, 6, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 4, (48,), generator=_GENERATOR)
START = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


class Learner:
    """A model with its inner optimizer and scheduler, and the step of a script."""

    def __init__(self) -> None:
        self.model = copy.deepcopy(START)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.8)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.scheduler.step()


class Noted(OuterStrategy):
    """Notes what happens to one rank, in order, and in how large a world each round was summed when
    it counted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[tuple[Any, ...]] = []
        self.world_sizes: dict[int, int] = {}

    def begin(self, number: int) -> None:
        self.events.append(("begin", number))
        super().begin(number)

    def close(self, number: int, *, whole: bool) -> None:
        self.events.append(("close", number, whole))
        super().close(number, whole=whole)

    def start(self, ctx: DistributedContext, number: int, *rest: Any) -> Callable[[], None]:
        self.world_sizes[number] = ctx.world_size  # the last try counts
        return super().start(ctx, number, *rest)

    def apply(self, number: int, fraction: float, *, delayed: bool) -> None:
        self.events.append(("apply", number, delayed))
        super().apply(number, fraction, delayed=delayed)

    def restore_inner(self, state: Any) -> None:
        self.events.append(("inner", copy.deepcopy(state)))
        super().restore_inner(state)

    @property
    def samples(self) -> dict[int, list[Tensor]]:
        """By round, what this rank has computed."""
        found: dict[int, list[Tensor]] = {}
        for kind, *what in self.events:
            if kind == "begin":
                current = found.setdefault(what[0], [])
            elif kind == "step":
                current += what[0]
        return found


def train(ctx: DistributedContext, strategy: DiLoCo, learner: Learner) -> Noted:
    job = ElasticLoop(
        learner.model, learner.optimizer, (X, Y), batch_size=8, seed=5, strategy=strategy, ctx=ctx,
        also={"scheduler": learner.scheduler}, policy=Policy(hash_every=1, recovery_s=30),
    )  # fmt: skip
    outer: Any = job._outer
    noted[ctx.backend.worker] = outer
    for x, y in job:
        with job.step():
            outer.events.append(("step", x, y))
            learner.step(x, y)
    assert job.committed == 48
    return outer


noted: dict[str, Noted] = {}
"""By worker, of the present run."""


class Again:
    """Does again what was noted of a rank, in a world in which nobody dies."""

    def __init__(self, strategy: DiLoCo, source: Noted, weights: dict[int, float]) -> None:
        self.learner = Learner()
        self.outer = OuterStrategy(
            *(strategy, self.learner.model, [self.learner.optimizer]),
            {"scheduler": self.learner.scheduler},
        )
        self._weights = weights
        self._events = deque(source.events)
        self._summed = -1

    def run(self, ctx: DistributedContext, num_rounds: int) -> None:
        """All events until round ``num_rounds`` would be summed."""
        while self._events:
            kind, *what = self._events[0]
            if kind == "apply" and what[0] >= num_rounds:
                break
            self._events.popleft()
            self._do(ctx, kind, *what)
        if self._summed < num_rounds - 1:  # it died before it knew that the round counts
            self._sum(ctx, num_rounds - 1)

    def _do(self, ctx: DistributedContext, kind: str, *what: Any) -> None:
        if kind == "begin":
            self.outer.begin(*what)
        elif kind == "step":
            self.learner.step(*what)
        elif kind == "close":
            self.outer.close(what[0], whole=what[1])
        elif kind == "inner":
            self.outer.restore_inner(*what)
        else:
            self._sum(ctx, what[0])
            self.outer.apply(what[0], 1.0, delayed=what[1])

    def _sum(self, ctx: DistributedContext, number: int) -> None:
        self.outer.start(ctx, number, self._weights[number], 30.0)()
        self._summed = number


def undisturbed(strategy: DiLoCo, with_all: int, num_rounds: int) -> list[OuterStrategy]:
    """The survivors after ``with_all`` rounds of three ranks, and the others of two: each round the
    mean of what these ranks' samples have changed."""
    counting = {n: ["0", "1", "2"] if n < with_all else ["0", "1"] for n in range(num_rounds)}
    counts = {
        number: {worker: len(noted[worker].samples.get(number, ())) for worker in workers}
        for number, workers in counting.items()
    }
    # A round without samples reduces what the rounds before have left: their samples count.
    kept = strategy.fragments - 1
    counts = {
        number: each
        if any(each.values())
        else {
            worker: sum(counts[n][worker] for n in range(max(number - kept, 0), number))
            for worker in each
        }
        for number, each in counts.items()
    }
    again = [
        Again(
            *(strategy, noted[worker]),
            {n: each[worker] / sum(each.values()) for n, each in counts.items() if worker in each},
        )
        for worker in ("0", "1", "2")
    ]  # fmt: skip
    if with_all:
        run_world(3, lambda ctx: again[ctx.rank].run(ctx, with_all))
    run_world(2, lambda ctx: again[ctx.rank].run(ctx, num_rounds))
    computed = [
        sample
        for number, workers in counting.items()
        for worker in workers
        for sample in noted[worker].samples.get(number, ())
    ]
    assert sorted(map(Tensor.tolist, computed)) == sorted(X.tolist()), "each sample once"
    return [each.outer for each in again[:2]]


def numbers(outer: OuterStrategy) -> dict[str, Any]:
    """All that a rank has at the end."""
    parameters = zip(outer._names, outer._tensors, strict=True)
    found: dict[str, Any] = {f"parameter {name}": each for name, each in parameters}
    momenta = outer.capture()["momenta"].items()
    found |= {f"momentum {name}": each for name, each in momenta if each is not None}
    found |= {f"residual {name}": each for name, each in outer.capture_residuals().items()}
    return {name: np.asarray(each.detach() if isinstance(each, Tensor) else each)
            for name, each in found.items()}  # fmt: skip


@pytest.mark.parametrize(
    "strategy",
    [
        DiLoCo(every=3, outer=OuterSGD(1.0), compression=TopK(0.2, chunk=16, bits=2)),
        DiLoCo(every=3, outer=OuterSGD(0.7, momentum=0.5), compression=TopK(0.1, chunk=None)),
        DiLoCo(
            every=4,
            outer=OuterSGD(1.0),
            fragments=2,
            delay=1,
            compression=TopK(0.2, chunk=16, bits=4),
        ),
    ],
    ids=["sparse", "momentum", "streaming"],
)
def test_a_kill_at_every_operation_leaves_what_an_undisturbed_run_of_what_counted_leaves(
    strategy: DiLoCo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck.torch.outer.OuterStrategy", Noted)
    with_all = set()
    for moment in range(1000):
        noted.clear()
        results = ElasticWorld(
            3,
            lambda ctx: train(ctx, strategy, Learner()),
            dies=lambda worker, _, number, at=moment: worker == "2" and number == at,
        ).run()
        sizes = results["0"].world_sizes
        assert sizes == results["1"].world_sizes
        with_all.add(sum(size == 3 for size in sizes.values()))
        wanted = undisturbed(strategy, sum(size == 3 for size in sizes.values()), len(sizes))
        for found, right in zip((results["0"], results["1"]), wanted, strict=True):
            mine, theirs = numbers(found), numbers(right)
            assert mine.keys() == theirs.keys()
            assert any(name.startswith("residual") and each.any() for name, each in mine.items())
            for name, each in mine.items():
                assert np.array_equal(each, theirs[name]), f"{name}, killed at moment {moment}"
        if "2" in results:
            break
    assert moment > 10
    assert with_all >= set(range(len(sizes) + 1)), "a kill in each round"
