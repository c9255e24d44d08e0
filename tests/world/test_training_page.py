"""The snippets of docs/training.md, run as the one script that the page says they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from support.pages import snippets

pytest.importorskip("tensorboardX", reason="pip install 'potluck[tensorboard]'")

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
SNIPPETS = snippets("training.md")


def run(ctx: DistributedContext, folder: Path) -> dict[str, object]:
    """All snippets in one namespace; ``DDP`` gets this rank's context, directories are shared."""
    script = "\n".join(SNIPPETS)
    script = script.replace("pt.DDP(", "pt.DDP(ctx=ctx, module=")
    names = iter("abc")
    script = re.sub(r"tempfile\.mkdtemp\(\)", lambda _: repr(str(folder / next(names))), script)
    namespace: dict[str, object] = {"ctx": ctx, "__name__": "page"}
    exec(compile(script, str(PAGE), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_snippet_runs_alone_and_on_two_ranks(
    world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(SNIPPETS) == 9
    results = run_world(world_size, lambda ctx: run(ctx, tmp_path), timeout_s=60)
    printed = capsys.readouterr().out
    assert "6 of 10 steps after the start" in printed
    assert "epoch 0: loss" in printed
    hashes = {result["job"].parameter_hash() for result in results}  # type: ignore[attr-defined]
    assert len(hashes) == 1
