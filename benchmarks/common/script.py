"""What a script of comparisons does besides measuring: options, the table as it comes, files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import claims, results
from common.claims import Claim
from potluck.cli.bench.comparison import ComparisonPlan, compare
from potluck.cli.bench.machine import heading, machine
from potluck.cli.bench.peers import PEERS, missing
from potluck.cli.bench.placement import Here
from potluck.cli.bench.table import Table

Say = Callable[[str], None]
Measured = tuple[dict[str, Any], list[Claim]]
Measure = Callable[[bool, Say], Measured]
"""``measure(quick, say)``: a result ready for JSON and what follows from it; ``say`` prints."""


class Page:
    """Prints lines and remembers them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines += text.splitlines() or [""]
        print(text, flush=True)


def main(name: str, description: str, measure: Measure) -> int:
    """A script of its own; 1 if a claim is not met."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: does it work at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/")
    arguments = parser.parse_args()
    _, found = run(
        name, measure, quick=arguments.quick, save=arguments.save, json_file=arguments.json
    )
    return 0 if all(claim.met is not False for claim in found) else 1


def run(
    name: str, measure: Measure, *, quick: bool, save: bool, json_file: Path | None = None
) -> Measured:
    """Measure, print the table and the claims, keep both if asked to."""
    page = Page()
    page.say(heading(machine()))
    result, found = measure(quick, page.say)
    result["benchmark"] = name
    result["claims"] = claims.as_dicts(found)
    page.say("\n" + claims.markdown(found))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if save:
        print(f"saved: {results.save(result, page.lines)}")
    return result, found


def compared(
    plan: ComparisonPlan, say: Say, *, title: str = "", placement: Here | None = None
) -> dict[str, Any]:
    """``compare`` without the peers that are missing here; its table is said row by row."""
    absent = {name: why for name in plan.peers if (why := missing(PEERS[name]))}
    here = ComparisonPlan(
        peers=[name for name in plan.peers if name not in absent],
        world_sizes=plan.world_sizes,
        cases=plan.cases,
        rounds=plan.rounds,
        round_s=plan.round_s,
        memory=plan.memory,
    )
    table = Table(here.peers)
    say(f"\n{title}\n{table.head()}" if title else f"\n{table.head()}")
    result = compare(here, placement=placement, on_row=lambda row: say(table.line(row)))
    result["left_out"] |= absent
    say("\n" + table.foot(result))
    return result


def cells(
    result: dict[str, Any], operation: str, peers: Sequence[str]
) -> list[tuple[int, int, dict[str, dict[str, Any]]]]:
    """``(workers, bytes, cell by peer)`` of the rows that have all ``peers``."""
    return [
        (row["world_size"], row["nbytes"], row["peers"])
        for row in result["rows"]
        if row["operation"] == operation and set(peers) <= set(row["peers"])
    ]
