"""The snippets of docs/parameter-server.md, run as the one script that the page says they are."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from support.pages import script_without_context, snippets

PAGE = "parameter-server.md"


def run(ctx: DistributedContext) -> None:
    exec(compile(script_without_context(PAGE), PAGE, "exec"), {"ctx": ctx, "__name__": "page"})


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_snippet_runs(world_size: int) -> None:
    assert len(snippets(PAGE)) == 6
    run_world(world_size, run)
