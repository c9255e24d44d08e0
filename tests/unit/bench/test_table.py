"""The text of a comparison: ratios, wrong results, missing peers."""

from __future__ import annotations

from typing import Any

from potluck.cli.bench.table import Table, best_of, is_right


def cell(seconds: float, *, correct: bool = True, memory: int | None = None) -> dict[str, Any]:
    return {
        "median_s": seconds,
        "bus_bytes_per_s": 1e6 / seconds,
        "cpu_s_per_gb": 2 * seconds,
        "correct": correct,
        **({} if memory is None else {"memory_bytes": memory}),
    }


def row(**peers: dict[str, Any]) -> dict[str, Any]:
    return {"operation": "all-reduce", "world_size": 2, "nbytes": 1 << 20, "peers": peers}


def test_the_best_rival_counts_and_potlucks_other_ways_are_no_rivals() -> None:
    table = Table(["potluck", "gloo", "mlx", "potluck-tls"])
    mine = {"potluck-tls": cell(0.001), "potluck": cell(0.002)}
    line = table.line(row(**mine, gloo=cell(0.008), mlx=cell(0.004)))
    assert line.split()[-2:] == ["2.00", "0.008"]
    assert "8 ms (4x)" in line
    assert "1 ms (0.5x)" in line
    assert len(table.head()) == len(line)


def test_a_peer_without_the_operation_has_a_dash() -> None:
    table = Table(["potluck", "gloo", "mlx"])
    line = table.line(row(potluck=cell(0.002), gloo=cell(0.003)))
    assert line.split()[-3:] == ["-", "1.50", "0.006"]
    assert best_of(row(potluck=cell(0.002)), ["gloo", "mlx"]) is None


def test_a_wrong_result_is_said_and_fails_the_comparison() -> None:
    rows = [row(potluck=cell(0.002), gloo=cell(0.003, correct=False))]
    assert "3 ms WRONG" in Table(["potluck", "gloo"]).line(rows[0])
    assert not is_right({"rows": rows})
    assert is_right({"rows": [row(potluck=cell(0.002))]})


def test_the_foot_names_engine_memory_and_who_is_missing() -> None:
    result = {
        "machine": {"load_after": 0.5},
        "peers": {"potluck": "0.1.0, engine Python, ring"},
        "left_out": {"mlx": "pip install mlx"},
        "rows": [row(potluck=cell(0.002, memory=3 << 19))],
    }
    foot = Table(["potluck"]).foot(result)
    for part in ("engine Python", "potluck 1.5 MiB", "left out: mlx: pip install mlx", "load"):
        assert part in foot
