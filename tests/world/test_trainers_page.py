"""The snippets of docs/trainers.md, run as the one script that the page says they are."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")
pytest.importorskip("torch")

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from support.pages import script_without_context, snippets

PAGE = "trainers.md"


def run(ctx: DistributedContext) -> None:
    exec(compile(script_without_context(PAGE), PAGE, "exec"), {"ctx": ctx, "__name__": "page"})


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_snippet_runs_alone_and_on_two_ranks(
    world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(snippets(PAGE)) == 7
    run_world(world_size, run, timeout_s=90)
    printed = capsys.readouterr().out
    assert printed.count("epoch 4: loss") == world_size
    accuracies = [float(found) for found in re.findall(r"accuracy (\d\.\d+)", printed)]
    assert len(accuracies) == 3 * world_size
    assert min(accuracies) > 0.8
    falls = re.findall(r"loss (\d\.\d+), then (\d\.\d+)", printed)
    assert all(float(then) < float(first) for first, then in falls)
    assert printed.count("to 10 centroids") == world_size
