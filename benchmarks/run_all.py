"""All claims about speed, one after the other, as the rows of docs/performance.md.

    python benchmarks/run_all.py --save             # about ten minutes on two cores
    python benchmarks/run_all.py --only hosts busy  # some of it
    python benchmarks/run_all.py --quick            # does it work at all? about a minute

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time

import busy_main_thread
import hosts
import one_host
import torch_ddp
from bench import claims, script

from potluck.bench.machine import load

PARTS: dict[str, script.Measure] = {
    "one_host": one_host.measure,
    "hosts": hosts.measure,
    "torch_ddp": torch_ddp.measure,
    "busy": busy_main_thread.measure,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes")
    parser.add_argument("--save", action="store_true", help="write to benchmarks/results/")
    arguments = parser.parse_args()
    began = time.monotonic()
    found, failed = [], []
    for name in arguments.only:
        print(f"\n=== {name}, after {time.monotonic() - began:.0f} s", flush=True)
        try:
            found += script.run(name, PARTS[name], quick=arguments.quick, save=arguments.save)
        except Exception as error:  # the other parts are worth having
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
    print(f"\n=== all, {time.monotonic() - began:.0f} s, load {load()}\n\n{claims.markdown(found)}")
    for failure in failed:
        print(f"\nfailed: {failure}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
