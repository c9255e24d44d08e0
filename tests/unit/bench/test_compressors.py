"""``benchmarks/compressors.py``: what was asked, and the table of the page."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from potluck.cli.bench import compression

ROOT = Path(__file__).parents[3]


@pytest.fixture
def compressors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("compressors")
    page = tmp_path / "compression.md"
    page.write_text("before\n<!-- measured -->\nold\n<!-- end of measured -->\nafter\n")
    monkeypatch.setattr(module, "DOCS", page)
    monkeypatch.setattr(module.pages, "heading", lambda _: "a machine\nits versions")
    return module


def row(strategy: str, seconds: float, in_torch_s: float | None = None) -> dict[str, Any]:
    other = None if in_torch_s is None else {"median_s": in_torch_s}
    figures = {"ratio": 3.94, "median_s": seconds, "torch": other}
    return {"strategy": strategy, "error_feedback": other is None, **figures}


def test_times_of_all_elements_are_held_against_what_was_asked(compressors: Any) -> None:
    rows = [row(repr(case.compressor), 0.02) for case in compression.CASES]
    claims = compressors.what_follows({"count": compression.COUNT, "rows": rows})
    assert [claim.met for claim in claims] == [True, True, True, True, False]
    assert claims[-1].measured == "FP16() with feedback 20, BF16() with feedback 20"
    assert compressors.what_follows({"count": 1000, "rows": rows}) == []


def test_the_page_gets_a_row_for_each_strategy(compressors: Any) -> None:
    rows = [row("Quantize(bits=8)", 0.0125), row("FP16()", 0.006, 0.037)]
    compressors.into_docs({"machine": {}, "count": 26_000_000, "rows": rows})
    text = compressors.DOCS.read_text()
    assert text.startswith(
        "before\n<!-- measured -->\n    a machine\n    its versions\n\n26 million"
    )
    assert "| `Quantize(bits=8)` | yes | 3.94 | 12.5 ms | - |\n" in text
    assert text.endswith("| 6 ms | 37 ms (6.2x) |\n<!-- end of measured -->\nafter\n")


def test_each_measured_row_is_a_line_under_its_titles() -> None:
    lines = [compression.line(each) for each in compression.measure(1 << 14, 1)]
    assert [line.split("  ")[0] for line in lines] == [
        repr(case.compressor) for case in compression.CASES
    ]
    assert {len(line) for line in lines} == {len(compression.head())}
