"""The snippets of docs/data.md, run as the one script that the page says they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from support.pages import snippets

pytest.importorskip("torch")
pytest.importorskip("pyarrow", reason="pip install 'potluck[data]'")

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SNIPPETS = snippets("data.md")


def test_every_snippet_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SNIPPETS) == 4
    script = "\n".join(SNIPPETS).replace("pt.DDP(", "pt.DDP(ctx=ctx, module=")
    script = script.replace("tempfile.mkdtemp()", repr(str(tmp_path)))

    def run(ctx: DistributedContext) -> None:
        exec(compile(script, str(PAGE), "exec"), {"ctx": ctx, "__name__": "page"})

    run_world(1, run, timeout_s=60)
    printed = capsys.readouterr().out
    assert float(re.findall(r"loss (\S+) after 2000 samples", printed)[0]) < 0.3
    assert "4 steps" in printed
    assert "[3, 3, 4, 4, 5]" in printed
    assert "148 items, epoch 1" in printed
