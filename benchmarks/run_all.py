"""All claims about speed, one after the other: the tables of docs/performance.md.

    python benchmarks/run_all.py --save --docs      # about ten minutes; into the pages
    python benchmarks/run_all.py --only hosts busy  # some of it
    python benchmarks/run_all.py --quick            # does it work at all? about a minute

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import busy_main_thread
import compressors
import hosts
import one_host
import slow_networks
import time_to_loss
import torch_ddp
from common import claims, pages, script, side_by_side

from potluck.cli.bench.machine import load

DOCS = Path(__file__).parents[1] / "docs" / "performance.md"
ASKED = DOCS.parent / "dev" / "performance-asked.md"

PARTS: dict[str, script.Measure] = {
    "one_host": one_host.measure,
    "hosts": hosts.measure,
    "torch_ddp": torch_ddp.measure,
    "busy": busy_main_thread.measure,
    "slow_networks": slow_networks.measure,
    "time_to_loss": time_to_loss.measure,
    "compressors": compressors.measure,
}
ON_REQUEST = {"slow_networks", "time_to_loss", "compressors"}
"""Parts that run only when they are named."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some parts")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes")
    parser.add_argument("--save", action="store_true", help="write to benchmarks/results/")
    parser.add_argument("--docs", action="store_true", help="write into docs/performance.md")
    arguments = parser.parse_args()
    if arguments.quick and arguments.docs:
        parser.error("--quick measures too little for the pages: leave --docs out")
    began = time.monotonic()
    measured: dict[str, script.Measured] = {}
    failed = []
    for name in arguments.only or [name for name in PARTS if name not in ON_REQUEST]:
        print(f"\n=== {name}, after {time.monotonic() - began:.0f} s", flush=True)
        try:
            measured[name] = script.run(
                name, PARTS[name], quick=arguments.quick, save=arguments.save
            )
        except Exception as error:  # the other parts are worth having
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
    found = claims.markdown(claim for _, part in measured.values() for claim in part)
    print(f"\n=== all, {time.monotonic() - began:.0f} s, load {load()}\n\n{found}")
    if arguments.docs:
        into_docs(measured)
    for failure in failed:
        print(f"\nfailed: {failure}")
    return 1 if failed else 0


def into_docs(measured: Mapping[str, script.Measured]) -> None:
    """Write the tables into docs/performance.md, and what was asked into
    docs/dev/performance-asked.md. Parts without a figure stay as they are in both."""
    for name, (result, found) in measured.items():
        if not found:
            continue
        pages.fill(ASKED, result["machine"], claims.markdown(found), name=name)
        if name in side_by_side.TABLES:
            pages.fill(DOCS, result["machine"], side_by_side.TABLES[name](result), name=name)


if __name__ == "__main__":
    sys.exit(main())
