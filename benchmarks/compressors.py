"""What compressing costs one core: ``potluck bench compress``, kept, and written into the page.

    python benchmarks/compressors.py --save --docs  # into docs/compression.md; about two minutes
    python benchmarks/compressors.py --read benchmarks/results/DATE-compressors.json --docs

Each method compresses 26 million float32, the gradients of a ResNet-50, in turns with torch's own
operations that do the same, on one core. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import claims, pages, results, script
from common.claims import Claim

from potluck.cli.bench import compression
from potluck.cli.bench.machine import heading, load, machine
from potluck.cli.bench.table import show_seconds

DOCS = Path(__file__).parents[1] / "docs" / "compression.md"
_QUICK_COUNT = 1 << 18
_ASKED_MS: dict[str, tuple[float, tuple[str, ...]]] = {
    "exact top-k of 1%": (100, ("TopK(ratio=0.01, chunk=None, bits=None)",)),
    "top-k of 1% in chunks": (25, ("TopK(ratio=0.01, chunk=4096, bits=None)",)),
    "8 bits, with error feedback": (25, ("Quantize(bits=8)",)),
    "4 and 2 bits, with error feedback": (30, ("Quantize(bits=4)", "Quantize(bits=2)")),
    "FP16 and BF16": (15, ("FP16()", "BF16()")),
}
"""By claim: milliseconds for all elements, and the compressors that it is about."""


def measure(quick: bool, say: script.Say) -> script.Measured:
    """All methods; ``quick``: of a hundredth of the elements, about which nothing is claimed."""
    count, rounds = (_QUICK_COUNT, 1) if quick else (compression.COUNT, 7)
    result: dict[str, Any] = {"machine": machine(), "count": count, "load_before": load()}
    say(f"{count} float32, one core\n\n{compression.head()}")
    result["rows"] = []
    for row in compression.measure(count, rounds):
        result["rows"].append(row)
        say(compression.line(row))
    return result, what_follows(result)


def what_follows(result: dict[str, Any]) -> list[Claim]:
    """The asked times, of the whole number of elements."""
    if result["count"] != compression.COUNT:
        return []
    found = []
    for what, (most, strategies) in _ASKED_MS.items():
        shown = [
            (_named(row), row["median_s"] * 1e3)
            for row in result["rows"]
            if row["strategy"] in strategies
        ]
        said = f"compressing 26 M elements, {what}: milliseconds on one core"
        found.append(claims.at_most(said, f"<= {most:g}", most, shown, ""))
    return found


def _named(row: dict[str, Any]) -> str:
    return f"{row['strategy']}{' with feedback' if row['error_feedback'] else ''}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each compressor, with and without error feedback."""
    lines = [
        "| compressor | error feedback | times fewer bytes | time | torch's operations |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        feedback = "yes" if row["error_feedback"] else "no"
        other = "-"
        if row["torch"] is not None:
            times = row["torch"]["median_s"] / row["median_s"]
            other = f"{show_seconds(row['torch']['median_s'])} ({times:.2g}x)"
        took = show_seconds(row["median_s"])
        lines.append(
            f"| `{row['strategy']}` | {feedback} | {row['ratio']:.3g} | {took} | {other} |"
        )
    return "\n".join(lines)


def into_docs(result: dict[str, Any]) -> None:
    """Write the table into docs/compression.md."""
    said = f"{result['count'] / 1e6:.3g} million float32 on one core, medians of wall time:"
    pages.fill(DOCS, result["machine"], f"{said}\n\n{table(result['rows'])}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few elements: does it work at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: a kept result")
    parser.add_argument("--docs", action="store_true", help="write into docs/compression.md")
    arguments = parser.parse_args()
    if arguments.quick and arguments.docs:
        parser.error("--quick measures too little for the page: leave --docs out")
    page = script.Page()
    if arguments.read:
        result = json.loads(arguments.read.read_text())
        page.say(f"{heading(result['machine'])}\n\n{compression.head()}")
        page.say("\n".join(map(compression.line, result["rows"])))
        found = what_follows(result)
    else:
        page.say(heading(machine()))
        result, found = measure(arguments.quick, page.say)
    result["benchmark"], result["claims"] = "compressors", claims.as_dicts(found)
    if found:
        page.say("\n" + claims.markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.save:
        print(f"saved: {results.save(result, page.lines)}")
    if arguments.docs:
        into_docs(result)
    return 0 if all(claim.met is not False for claim in found) else 1


if __name__ == "__main__":
    sys.exit(main())
