"""The tables of ``docs/algorithms.md`` are computed from the plans and from the choice.

``python tests/unit/collectives/test_algorithms_page.py`` writes them anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from potluck._core.collectives.choose import choose
from potluck._core.collectives.links import LinkModel, Wire
from potluck._core.collectives.plan import Action, Algorithm, Operation
from potluck._core.collectives.registry import algorithms_for, make_plan
from potluck._core.collectives.simulate import chunk_sizes, simulate
from potluck._core.types import ReduceOp

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
REFERENCE = PAGE.parent / "reference" / "potluck.md"
BEGIN, END = "<!-- computed: {} -->", "<!-- end of {} -->"

NODES = (0, 0, 0, 0, 1, 1, 1, 1)
NBYTES = 8 * 5040
LATENCY_ONLY = LinkModel(Wire(1.0, 0.0), Wire(1.0, 0.0), frame_s=0.0, gamma_s_per_byte=0.0)

SIZES = {"4 B": 4, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "25 MiB": 25 << 20, "100 MiB": 100 << 20}
WORLDS: dict[str, tuple[int, tuple[int, ...] | None]] = {
    "2 ranks": (2, None),
    "4 ranks": (4, None),
    "8 ranks": (8, None),
    "8 on one node": (8, (0,) * 8),
    "8 on two nodes": (8, NODES),
    "32 ranks": (32, None),
}


def costs() -> str:
    rows = [
        "| operation | algorithm | hops | sends, busiest rank | bytes sent, busiest rank "
        "| bytes sent, all ranks | bytes between the nodes |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for operation in Operation:
        for algorithm in algorithms_for(operation):
            plans = [make_plan(operation, algorithm, 8, rank, nodes=NODES) for rank in range(8)]
            links = replace(LATENCY_ONLY, nodes=NODES)
            simulated = simulate(plans, NBYTES, links, NBYTES)
            sends = max(sum(s.action is Action.SEND for s in plan.steps) for plan in plans)
            assert sum(chunk_sizes(plans[0], NBYTES)) % 8 == 0
            busiest, total, wire = (
                f"{count / NBYTES:.3g}"
                for count in (
                    max(simulated.bytes_sent),
                    sum(simulated.bytes_sent),
                    sum(simulated.wire_bytes_sent),
                )
            )
            rows.append(
                f"| {operation} | {algorithm} | {simulated.seconds:.0f} | {sends} | {busiest} "
                f"| {total} | {wire} |"
            )
    return "\n".join(rows)


def choices() -> str:
    rows = [
        "| operation | world | " + " | ".join(SIZES) + " |",
        "|---|---|" + "---|" * len(SIZES),
    ]
    for operation in Operation:
        for name, (world_size, nodes) in WORLDS.items():
            chosen = [
                choose(operation, size, world_size, op=ReduceOp.SUM, nodes=nodes)
                for size in SIZES.values()
            ]
            rows.append(f"| {operation} | {name} | " + " | ".join(chosen) + " |")
    return "\n".join(rows)


def levels() -> str:
    rows = ["| workers | " + " | ".join(SIZES) + " |", "|---|" + "---|" * len(SIZES)]
    for counts in ((2, 2), (3, 1), (4, 4), (2, 2, 2), (4, 2, 1)):
        nodes = tuple(node for node, count in enumerate(counts) for _ in range(count))
        chosen = [
            choose(Operation.ALL_REDUCE, size, len(nodes), op=ReduceOp.SUM, nodes=nodes)
            for size in SIZES.values()
        ]
        rows.append(f"| {' + '.join(map(str, counts))} | " + " | ".join(chosen) + " |")
    return "\n".join(rows)


TABLES = {"costs": costs, "choices": choices, "levels": levels}


def table_span(page: str, name: str) -> tuple[int, int]:
    begin = BEGIN.format(name)
    return page.index(begin) + len(begin), page.index(END.format(name))


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    for name, table in TABLES.items():
        start, end = table_span(page, name)
        assert page[start:end].strip() == table(), f"run: python {Path(__file__).name}"


def test_the_page_speaks_of_every_algorithm() -> None:
    page = PAGE.read_text()
    assert all(f"**{algorithm}**" in page for algorithm in Algorithm)
    [row] = [each for each in REFERENCE.read_text().splitlines() if "| `algorithm` |" in each]
    assert all(f"`{algorithm}`" in row for algorithm in Algorithm)


def write_page() -> None:
    page = PAGE.read_text()
    for name, table in TABLES.items():
        start, end = table_span(page, name)
        page = f"{page[:start]}\n{table()}\n{page[end:]}"
    PAGE.write_text(page)


if __name__ == "__main__":
    write_page()
