"""A plan is suggested where a link is slow, and nothing else is done about it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from potluck.torch import DDP, DataParallel, ElasticLoop
from support.narrow import narrow_pair

_GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(32, 60, generator=_GENERATOR)
Y = torch.randint(0, 4, (32,), generator=_GENERATOR)
START = nn.Sequential(nn.Linear(60, 400), nn.Tanh(), nn.Linear(400, 4))
NUM_BYTES = 4 * sum(p.numel() for p in START.parameters())
"""Of two ranks each sends about as many in a step."""


class Trained:
    """What is left of a training of 8 steps."""

    def __init__(self, ctx: DistributedContext, **options: Any) -> None:
        self.model = DDP(copy.deepcopy(START), ctx)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        job = ElasticLoop(self.model, optimizer, (X, Y), batch_size=4, ctx=ctx, **options)
        for x, y in job:
            with job.step():
                optimizer.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                job.log(loss=loss)
                optimizer.step()
        self.losses, self.optimizer = job.losses, optimizer

    def numbers(self) -> list[Tensor]:
        """All that the training computed: parameters, and what its optimizer keeps."""
        kept = self.optimizer.state_dict()["state"].values()
        return [p.detach() for p in self.model.parameters()] + [
            each[name] for each in kept for name in sorted(each)
        ]


def test_a_slow_link_brings_one_suggestion_and_changes_no_bit_of_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    [right, _] = run_world(2, lambda ctx: Trained(ctx, strategy=DataParallel()))
    assert caplog.messages == [], "no link was slow"
    with narrow_pair(NUM_BYTES / 0.3) as world:
        found = world.run(Trained)
    [said] = caplog.messages
    assert re.match(r"a step takes \d+\.\d+ s", said)
    assert "is waiting for other machines: `potluck plan` says which strategy" in said
    for each in found:
        assert each.model.compression is None
        assert each.losses == right.losses
        for mine, theirs in zip(each.numbers(), right.numbers(), strict=True):
            assert torch.equal(mine, theirs)
