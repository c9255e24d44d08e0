"""What follows from the cells of ``benchmarks/slow_networks.py``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def slow_results(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("common.slow_results")


def row(strategy: str, step_s: float, **changed: Any) -> dict[str, Any]:
    made = {"size": "25m", "network": "1gbit", "hosts": 2, "strategy": strategy}
    figures = {"step_s": step_s, "predicted_s": step_s, "is_choice": False}
    return made | figures | {"efficiency": 0.2 / step_s} | changed


def measured(slow_results: Any, *rows: dict[str, Any]) -> dict[str, str]:
    return {claim.what: claim.measured for claim in slow_results.of_predictions(rows)}


def test_near_predictions_and_good_choices_are_counted(slow_results: Any) -> None:
    cells = [
        row("plain", 1.0, predicted_s=1.14),
        row("int8", 0.5, predicted_s=0.6),
        row("diloco", 0.22, is_choice=True),
        row("sparse", 0.215),
        row("gloo", 9.0) | {"predicted_s": 0.1},
    ]
    del cells[-1]["predicted_s"]
    found = measured(slow_results, *cells)
    assert "3 of 4 cells" in found["slow networks, all cells: steps predicted within 15%"]
    choices = "slow networks, all choices: within 5% of the fastest measured"
    assert "1 of 1 networks" in found[choices]
    cells.append(row("plain", 0.01, size="1m", is_choice=True))
    both = measured(slow_results, *cells)
    assert "4 of 5 cells" in both["slow networks, all cells: steps predicted within 15%"]
    assert "1 of 1 cells, 1 M parameters" in " ".join(both.values())
    # A choice that was not measured says nothing.
    assert choices not in measured(slow_results, row("plain", 1.0))


def test_the_table_says_which_cells_were_too_slow(slow_results: Any) -> None:
    cells = [row("diloco", 0.2, is_choice=True), row("plain", 0.8, network="10gbit")]
    left_out = {"size": "25m", "network": "1gbit", "hosts": 2, "strategy": "plain"}
    head, _, plain, diloco = slow_results.table(cells, [left_out]).splitlines()
    assert head == "| strategy | 10 Gbit/s, 2 hosts | 1 Gbit/s, 2 hosts |"
    assert plain == "| `DataParallel()` | 25% | too slow |"
    assert diloco.endswith("| - | **100%** |")


def test_cells_of_several_workers_on_each_host_stand_apart(
    slow_results: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pairs = {"workers_per_host": 2}
    cells = [
        row("plain", 0.8),
        row("plain", 1.6, predicted_s=1.0, **pairs),
        row("hierarchical", 0.4, is_choice=True, **pairs),
    ]
    found = measured(slow_results, *cells)
    near = found["slow networks, all cells: steps predicted within 15%"]
    assert "2 of 3 cells" in near
    assert "1 of 1 cells, 25 M parameters 100%" in near
    assert "1 of 2 cells, 25 M parameters, 2 workers on each host 50%" in near
    # An efficiency was asked of one worker on each host.
    assert not any("efficiency" in claim.what for claim in slow_results.what_follows(cells))
    page = tmp_path / "page.md"
    page.write_text("<!-- measured -->\n<!-- end of measured -->\n")
    monkeypatch.setattr(slow_results, "DOCS", page)
    monkeypatch.setattr(slow_results.slow_plot, "draw", lambda *_: None)
    skipped = {"size": "25m", "network": "1gbit", "hosts": 2, "strategy": "int8"} | pairs
    machine = {"date": "2026-01-01"}
    monkeypatch.setattr(slow_results.pages, "heading", lambda _: "a machine")
    slow_results.into_docs({"rows": cells, "machine": machine, "skipped": [skipped], "claims": []})
    one, several = page.read_text().split("**25 M parameters, 2 workers on each host**")
    assert "`DataParallel()` | 25% |" in one
    assert "hierarchical" not in one
    assert '| `DataParallel(algorithm="hierarchical")` | **50%** |' in several
    assert "`DataParallel()` | 12% |" in several
