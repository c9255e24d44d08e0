"""docs/performance.md and docs/dev/performance-asked.md, as ``benchmarks/run_all.py --docs`` writes
them: the tables are those of a kept result, and parts that were not measured stay."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
ASKED = ROOT / "docs" / "dev" / "performance-asked.md"


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("run_all")


def parts(page: Path) -> dict[str, str]:
    """What stands between the marks, by name."""
    found = re.findall(
        r"<!-- measured: (\w+) -->\n(.*?)<!-- end of measured: \1 -->", page.read_text(), re.DOTALL
    )
    return dict(found)


def kept(name: str, part: str) -> list[dict[str, Any]]:
    """The kept results of the benchmark ``name`` on the day that ``part`` names."""
    date = part.split(",")[0].strip()
    files = sorted(RESULTS.glob(f"{date}-{name}*.json"))
    return [json.loads(file.read_text()) for file in files]


def test_both_pages_hold_the_figures_of_kept_results(run_all: Any) -> None:
    assert set(parts(PAGE)) == set(run_all.side_by_side.TABLES)
    assert set(parts(ASKED)) == set(run_all.PARTS)
    for name, part in parts(PAGE).items():
        tables = [run_all.side_by_side.TABLES[name](result) for result in kept(name, part)]
        assert [table for table in tables if f"\n\n{table}\n" in part], name
    for name, part in parts(ASKED).items():
        results = kept(name, part)
        tables = [
            run_all.claims.markdown(run_all.claims.Claim(**each) for each in result["claims"])
            for result in results
        ]
        assert [table for table in tables if f"\n\n{table}\n" in part], name


def test_users_are_not_told_what_was_asked() -> None:
    assert "| asked |" not in PAGE.read_text()


def test_a_part_that_was_not_measured_stays(
    run_all: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages = tmp_path / "performance.md", tmp_path / "asked.md"
    marks = "<!-- measured: {0} -->\nold\n<!-- end of measured: {0} -->\n"
    for page in pages:
        page.write_text(marks.format("busy") + marks.format("hosts"))
    monkeypatch.setattr(run_all, "DOCS", pages[0])
    monkeypatch.setattr(run_all, "ASKED", pages[1])
    monkeypatch.setattr(run_all.pages, "heading", lambda _: "a machine")
    place = {"idle_s": 0.2, "busy_s": 0.21}
    claim = run_all.claims.Claim(
        "buckets: time with the main thread busy", "<= 1.1x", "1.05x", True
    )
    busy = {"machine": {}, "places": {"one host": place}}
    run_all.into_docs({"busy": (busy, [claim]), "hosts": ({"machine": {}, "rows": []}, [])})
    rows = "| one host | 200 ms | 210 ms |", "| 1.05x | <= 1.1x | yes |"
    for page, row in zip(pages, rows, strict=True):
        assert parts(page)["hosts"] == "old\n"
        assert parts(page)["busy"].startswith("    a machine\n\n")
        assert row in parts(page)["busy"]


def cell(seconds: float, cpu: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"median_s": seconds, "cpu_s_per_gb": cpu, "bus_bytes_per_s": 1e8, **more}


def test_a_faster_peer_is_named_in_bold_and_close_times_are_equal(run_all: Any) -> None:
    def row(nbytes: int, **peers: dict[str, Any]) -> dict[str, Any]:
        return {"operation": "broadcast", "world_size": 2, "nbytes": nbytes, "peers": peers}

    result = {
        "peers": {"potluck": "", "gloo": "", "mpi": ""},
        "rows": [
            row(4096, potluck=cell(2e-6), gloo=cell(9e-6, 0.5), mpi=cell(4e-6)),
            row(1 << 20, potluck=cell(2e-3), gloo=cell(9e-3), mpi=cell(1e-3)),
            row(2 << 20, potluck=cell(2e-3), gloo=cell(2.05e-3)),
        ],
    }
    assert run_all.side_by_side.one_host(result).splitlines()[2:] == [
        "| broadcast | 2 | 4 KiB | 2 us | 9 us | 4 us | potluck, 2x | 1 | 0.5 |",
        "| broadcast | 2 | 1 MiB | 2 ms | 9 ms | 1 ms | **Open MPI, 2x** | 1 | 1 |",
        "| broadcast | 2 | 2 MiB | 2 ms | 2.05 ms | - | equal | 1 | 1 |",
    ]


def test_hosts_have_their_rates_codecs_and_memory(run_all: Any) -> None:
    peers = {
        "potluck-tls": cell(1.0, 2.0, memory_bytes=3 << 20),
        "gloo": cell(0.5),
        "potluck-int8": cell(0.4),
    }
    rows = [{"operation": "all-reduce", "world_size": 2, "nbytes": 100 << 20, "peers": peers}]
    seconds = {"potluck-hierarchical": {"seconds": 0.9}, "gloo": {"seconds": 1.3}}
    several = {"nbytes": 100 << 20, "peers": seconds}
    result = {"networks": {"2 hosts, 10gbit": {"rows": rows}}, "several_workers": several}
    head, _, row, _, *two = run_all.side_by_side.hosts(result).splitlines()
    assert "| potluck, int8 |" in head
    assert "bf16" not in head
    assert row == (
        "| 2 hosts, 10 Gbit/s | 100 MiB | 1 s (0.800 Gbit/s) | 500 ms (0.800 Gbit/s) "
        "| **Gloo, 2x** | 400 ms | 2 | 1 | 3.0 MiB | - |"
    )
    assert two[0] == "| hosts | potluck, hierarchical | Gloo |"
    assert two[2] == "| 2 hosts of 2 workers, 1 Gbit/s, 100 MiB | 900 ms | 1.3 s |"
