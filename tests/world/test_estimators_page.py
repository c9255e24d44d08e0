"""The snippets of docs/estimators.md, run as the one script that the page says they are."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from support.pages import script_without_context, snippets

PAGE = "estimators.md"


def run(ctx: DistributedContext) -> None:
    exec(compile(script_without_context(PAGE), PAGE, "exec"), {"ctx": ctx, "__name__": "page"})


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_snippet_runs_alone_and_on_two_ranks(
    world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(snippets(PAGE)) == 8
    run_world(world_size, run, timeout_s=60)
    printed = capsys.readouterr().out
    assert "20 trees on every rank" in printed
    assert len(set(re.findall(r"10 exact trees, accuracy \d\.\d+", printed))) == 1, "one forest"
    assert len(set(re.findall(r"5 iterations, accuracy \d\.\d+", printed))) == 1, "one model"
    assert ("has 64 features" in printed) == (world_size == 2)
    accuracies = [float(found) for found in re.findall(r"accuracy (0\.\d+|1\.0+)", printed)]
    assert len(accuracies) == 6 * world_size
    assert min(accuracies) > 0.8
