"""The snippets of the pages on services, messages and partitioning, each page run as the one script
that it says it is."""

from __future__ import annotations

import pytest

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from support.pages import DOCS, script_without_context, snippets


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("name", "num_snippets"), [("services.md", 2), ("messages.md", 3), ("partitioning.md", 3)]
)
def test_every_snippet_runs(
    name: str, num_snippets: int, world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / name).read_text()
    assert len(snippets(name)) == num_snippets
    script = script_without_context(name)

    def run(ctx: DistributedContext) -> None:
        exec(compile(script, name, "exec"), {"ctx": ctx, "__name__": "page"})

    run_world(world_size, run)
    for line in capsys.readouterr().out.splitlines():
        assert f"\n    {line}\n" in page, "the page shows what its script prints"
