"""The snippets of the pages on services, messages and partitioning, each page run as the one script
that it says it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from potluck.context import DistributedContext
from potluck.testing.world import run_world

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("name", "num_snippets"), [("services.md", 2), ("messages.md", 3), ("partitioning.md", 3)]
)
def test_every_snippet_runs(
    name: str, num_snippets: int, world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / name).read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == num_snippets
    script = "\n".join(snippets).replace("ctx = potluck.init()", "")

    def run(ctx: DistributedContext) -> None:
        exec(compile(script, name, "exec"), {"ctx": ctx, "__name__": "page"})

    run_world(world_size, run)
    for line in capsys.readouterr().out.splitlines():
        assert f"\n    {line}\n" in page, "the page shows what its script prints"
