"""The snippets of docs/choosing.md, run as the one script that the page says they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from support.pages import script_without_context, snippets

PAGE = "choosing.md"


def run(ctx: DistributedContext) -> dict[str, Any]:
    names: dict[str, Any] = {"ctx": ctx, "__name__": "page"}
    exec(compile(script_without_context(PAGE), PAGE, "exec"), names)
    return names


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_family_trains_alone_and_on_two_ranks(world_size: int) -> None:
    assert len(snippets(PAGE)) == 8
    results = run_world(world_size, run, timeout_s=90)
    for found in results:
        assert torch.equal(found["every_step"], results[0]["every_step"])
        assert torch.equal(found["rounds"], results[0]["rounds"])
        assert np.array_equal(found["state"]["w"], results[0]["state"]["w"])
        assert np.abs(found["state"]["w"]).max() > 0
        assert found["trainer"].get_global_loss() < 1
        weights = found["history"].parameters["w"]
        np.testing.assert_allclose(weights, [1.0, -2.0, 0.5], atol=1e-3)
