"""All claims about speed, one after the other, as the rows of docs/performance.md.

    python benchmarks/run_all.py --save --docs      # about ten minutes; into docs/performance.md
    python benchmarks/run_all.py --only hosts busy  # some of it
    python benchmarks/run_all.py --quick            # does it work at all? about a minute

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import busy_main_thread
import compressors
import hosts
import one_host
import slow_networks
import time_to_loss
import torch_ddp
from common import claims, pages, script
from common.claims import Claim

from potluck.cli.bench.machine import load, machine

DOCS = Path(__file__).parents[1] / "docs" / "performance.md"

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
    facts = machine()
    began = time.monotonic()
    found, failed = [], []
    for name in arguments.only or [name for name in PARTS if name not in ON_REQUEST]:
        print(f"\n=== {name}, after {time.monotonic() - began:.0f} s", flush=True)
        try:
            found += script.run(name, PARTS[name], quick=arguments.quick, save=arguments.save)
        except Exception as error:  # the other parts are worth having
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
    print(f"\n=== all, {time.monotonic() - began:.0f} s, load {load()}\n\n{claims.markdown(found)}")
    if arguments.docs:
        into_docs(facts, found)
    for failure in failed:
        print(f"\nfailed: {failure}")
    return 1 if failed else 0


def into_docs(facts: dict[str, Any], found: Sequence[Claim]) -> None:
    """Write the claims into docs/performance.md."""
    pages.fill(DOCS, facts, claims.markdown(found))


if __name__ == "__main__":
    sys.exit(main())
