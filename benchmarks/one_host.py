"""Collectives between processes of one machine: potluck, Gloo, Open MPI and MLX, in turns.

    python benchmarks/one_host.py           # 2, 4 and 8 processes, all claims
    python benchmarks/one_host.py --save    # keep the result in benchmarks/results/

``potluck bench`` measures the same with sizes and peers of your choice.
"""

from __future__ import annotations

import sys
from typing import Any

from common import claims, script
from common.claims import Claim

from potluck.cli.bench.comparison import ComparisonPlan
from potluck.cli.bench.table import best_of, ratio, show

OTHERS = ("gloo", "mpi", "mlx")
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 100 << 20)
FURTHER = ("broadcast", "all-gather", "reduce-scatter")
MIB = 1 << 20


def measure(quick: bool, say: script.Say) -> script.Measured:
    sizes = SIZES[:3:2] if quick else SIZES
    further = SIZES[:1] if quick else SIZES[:4:3]
    plan = ComparisonPlan(
        peers=("potluck", *OTHERS),
        world_sizes=(2,) if quick else (2, 4, 8),
        cases=[
            *(("all-reduce", nbytes) for nbytes in sizes),
            *((operation, nbytes) for operation in FURTHER for nbytes in further),
        ],
        rounds=2 if quick else 7,
        round_s=0.01 if quick else 0.08,
    )
    result = script.compared(plan, say)
    return result, what_follows(result)


def what_follows(result: dict[str, Any]) -> list[Claim]:
    """What was asked, and whether it was met."""
    found = []
    for world_size in dict.fromkeys(row["world_size"] for row in result["rows"]):
        found.append(
            claims.at_least(
                f"all-reduce, {world_size} processes: the best peer's time over potluck's",
                ">= 2x",
                2.0,
                ratios(result, "all-reduce", world_size),
            )
        )
    for row in result["rows"]:
        mine = row["peers"].get("potluck")
        if mine is None or row["operation"] != "all-reduce" or row["world_size"] != 2:
            continue
        if row["nbytes"] == 100 * MIB:
            copies = mine["median_s"] / row["copy_s"]
            what = "2 processes, 100 MiB, over one single-core copy of 100 MiB"
            found.append(claims.at_most(what, "<= 2x", 2.0, [("", copies)]))
        if row["nbytes"] == 4096:
            what = "4 KiB, 2 processes, from Python on a NumPy array, median call"
            found.append(
                claims.at_most(what, "<= 4 us", 4.0, [("", mine["call_median_s"] * 1e6)], " us")
            )
    for operation in FURTHER:
        every = [
            (f"{world_size} processes {name}", value)
            for world_size in dict.fromkeys(row["world_size"] for row in result["rows"])
            for name, value in ratios(result, operation, world_size)
        ]
        what = f"{operation}: the best peer's time over potluck's"
        found.append(claims.at_least(what, ">= 1.5x", 1.5, every))
    return [*found, *frugality(result)]


def ratios(result: dict[str, Any], operation: str, world_size: int) -> list[tuple[str, float]]:
    """The best peer's time over potluck's, by size."""
    return [
        (show(row["nbytes"]), ratio(best, row["peers"]["potluck"]))
        for row in result["rows"]
        if (row["operation"], row["world_size"]) == (operation, world_size)
        and (best := best_of(row, OTHERS)) is not None
    ]


def frugality(result: dict[str, Any]) -> list[Claim]:
    """CPU seconds and memory at the largest size."""
    rows = [row for row in result["rows"] if row["operation"] == "all-reduce"]
    largest = max(row["nbytes"] for row in rows)
    cpu, memory = [], []
    for row in rows:
        others = [row["peers"][name] for name in OTHERS if name in row["peers"]]
        if row["nbytes"] != largest or not others:
            continue
        name = f"{row['world_size']} processes"
        mine = row["peers"]["potluck"]
        least = min(cell["cpu_s_per_gb"] for cell in others)
        cpu.append((name, mine["cpu_s_per_gb"] / least))
        if mine.get("memory_bytes") is not None:
            memory.append((name, mine["memory_bytes"] / MIB))
    size = show(largest)
    return [
        claims.at_most(
            f"CPU seconds per GB, all-reduce of {size}, over the most frugal peer's",
            "<= 1x",
            1.0,
            cpu,
        ),
        claims.at_most(
            f"memory above the buffers, per worker, all-reduce of {size}",
            "<= 8 MiB",
            8.0,
            memory,
            " MiB",
        ),
    ]


if __name__ == "__main__":
    sys.exit(script.main("one_host", __doc__, measure))
