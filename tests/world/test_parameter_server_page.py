"""The snippets of docs/parameter-server.md, run as the one script that the page says they are."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from potluck.testing.world import run_world
from support.pages import run_by_rank, snippets

PAGE = "parameter-server.md"


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_snippet_runs(world_size: int) -> None:
    assert len(snippets(PAGE)) == 6
    run_world(world_size, run_by_rank(PAGE))
