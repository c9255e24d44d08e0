"""The snippets of docs/parameter-server.md, run as the one script that the page says they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from potluck.context import DistributedContext
from potluck.testing.world import run_world

PAGE = Path(__file__).parents[2] / "docs" / "parameter-server.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_snippet_runs(world_size: int) -> None:
    assert len(SNIPPETS) == 6
    script = "\n".join(SNIPPETS).replace("ctx = potluck.init()", "")

    def run(ctx: DistributedContext) -> None:
        exec(compile(script, str(PAGE), "exec"), {"ctx": ctx, "__name__": "page"})

    run_world(world_size, run)
