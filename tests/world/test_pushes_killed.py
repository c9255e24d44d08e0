"""PARAMETER_SERVER: workers die amid pushes, and each gradient of the others counts once.

Parameter ``i`` is that of sample ``i``, whose gradient is 1 in it: so the parameters say how often
each sample has counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import TrainingStrategy
from potluck.errors import GroupError
from potluck.parameter_server import SGD, Asynchronous, Synchronous
from potluck.parameter_server.calls import Calls
from potluck.parameter_server.service import PrimaryService
from potluck.testing.elastic import ElasticWorld, Killed, MortalContext
from potluck.torch.ways import by_server

NUM = 12
"""The samples of each worker: 3 in each of 4 steps."""


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(3 * NUM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.counts[x[:, 0].long()]


class Deaths:
    """``worker`` dies at its call number ``at`` of a method, before it or after."""

    def __init__(self, worker: str, method: str, at: int, *, after: bool) -> None:
        self.worker, self.method, self.at, self.after = worker, method, at, after
        self.calls: Counter[str] = Counter()
        self.is_dying = self.is_dead = False
        self.lock = threading.Lock()

    def is_due(self, method: str) -> bool:
        """One more call of the worker."""
        with self.lock:
            self.calls[method] += 1
            return method == self.method and self.calls[method] == self.at


def counts_of(deaths: Deaths, mode: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By survivor, how often each sample has counted in one epoch."""
    ask, push = Calls.ask, PrimaryService.push
    contexts: dict[str, MortalContext] = {}

    def mortal_ask(self: Calls, method: str, *args: Any, **options: Any) -> Any:
        ctx: Any = self._ctx
        is_due = False
        if ctx.backend.worker == deaths.worker:
            if deaths.is_dead:
                raise Killed(deaths.worker)
            is_due = deaths.is_due(method)
        if is_due and not deaths.after:
            ctx.die()
        reply = ask(self, method, *args, **options)
        if is_due:
            ctx.die()
        return reply

    def mortal_push(self: PrimaryService, *args: Any, **options: Any) -> Any:
        if self._replica.server != deaths.worker:
            return push(self, *args, **options)
        is_due = deaths.is_due("taken")
        if is_due and not deaths.after:
            die()
        reply = push(self, *args, **options)
        if is_due and deaths.after:
            die()
        return reply

    def die() -> None:
        """On a thread that serves; the script's ends with its next call."""
        deaths.is_dying = True
        contexts[deaths.worker].backend.hub.kill(deaths.worker)
        deaths.is_dead = True

    monkeypatch.setattr(Calls, "ask", mortal_ask)
    monkeypatch.setattr(PrimaryService, "push", mortal_push)
    monkeypatch.setattr(by_server, "Adam", lambda rate: SGD(1.0))

    def train(ctx: MortalContext) -> Any:
        contexts[ctx.backend.worker] = ctx
        mine = np.arange(NUM, dtype=np.float64)[:, None] + NUM * int(ctx.backend.worker)
        with potluck.DistributedNeuralNetTrainer(
            *(ctx, TrainingStrategy.PARAMETER_SERVER), aggregation=mode, model=Counts(),
            batch_size=9, loss=lambda found, _: -found.sum(),
        ) as trainer:  # fmt: skip
            try:
                trainer.train(mine, np.zeros(NUM))
            except GroupError as error:
                if deaths.is_dying and ctx.backend.worker == deaths.worker:
                    raise Killed(deaths.worker) from error
                raise
        return trainer.get_parameters()["counts"]

    try:
        return ElasticWorld(3, train, timeout_s=40.0).run(limit_s=60)
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize(
    "mode",
    [Synchronous(), Asynchronous(scale_by_staleness=False)],
    ids=["synchronous", "asynchronous"],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("worker", "method"),
    [("1", "push"), ("1", "pull"), ("0", "push"), ("0", "pull"), ("0", "taken"), ("0", "outcome")],
)
def test_each_gradient_of_the_others_counts_once_whoever_dies(
    worker: str, method: str, after: bool, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean of a synchronous step is over 2 or 3 gradients."""
    once = [1.0] if isinstance(mode, Asynchronous) else [1 / 2, 1 / 3]
    for at in range(1, 100):
        deaths = Deaths(worker, method, at, after=after)
        results = counts_of(deaths, mode, monkeypatch)
        if deaths.calls[method] < at:
            break
        assert set(results) == {"0", "1", "2"} - {worker}
        for found in results.values():
            for survivor in map(int, results):
                counted = found[NUM * survivor :][:NUM]
                right = np.isclose(counted[:, None], once).any(axis=1)
                assert right.all(), f"worker {survivor} after {at}: {counted}"
    assert at > 2 or method == "outcome"
