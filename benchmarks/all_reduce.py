"""potluck against Gloo: one all-reduce, many sizes, all in one run.

For each number of processes all groups are started and stay alive. Rounds alternate between them,
the others idle meanwhile, so that whatever the machine does meanwhile hits all. A round is a
barrier and then as many calls as fill its share of the time; its figure is the seconds per call of
the slowest rank. The table shows the median of the rounds.

    python benchmarks/all_reduce.py                         # 4 KiB to 100 MiB, 2 and 4 processes
    python benchmarks/all_reduce.py --sizes 1MiB --world 2  # a short look
    python benchmarks/all_reduce.py --save                  # keep the result in benchmarks/results/

The peers: ``potluck`` as it comes (workers of one node share memory), ``potluck-tls`` with that
switched off (every byte through TLS 1.3 sockets, as between machines) and ``gloo``, torch's own
CPU backend (plain TCP, not encrypted).

Data is float32, the operation is sum, in place, as a gradient's is: NumPy memory for potluck, a
torch tensor for Gloo. Each peer also reduces random data once per size; the largest error against
a float64 sum, and whether all ranks hold the same bits, stand beside its times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from bench import plot, ranks, report, sizes

PEERS = ("potluck", "potluck-tls", "gloo")


def main() -> int:
    parser = argparse.ArgumentParser(description="potluck against Gloo: all-reduce, side by side")
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="processes")
    parser.add_argument(
        "--sizes",
        type=sizes.parse,
        nargs="+",
        default=[4 << 10, 64 << 10, 1 << 20, 16 << 20, 100 << 20],
        help="buffer sizes: 4KiB 1MiB ...",
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds per size and peer")
    parser.add_argument("--round-seconds", type=float, default=0.2, help="about one round's length")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/")
    arguments = parser.parse_args()

    machine = report.machine()
    print(report.heading(machine), flush=True)
    rows = []
    for world_size in arguments.world:
        with ranks.Group.all_of(arguments.peers, world_size, Path(__file__)) as groups:
            for nbytes in arguments.sizes:
                row = ranks.compare(
                    groups, nbytes, rounds=arguments.rounds, seconds=arguments.round_seconds
                )
                rows.append(row)
                print(report.line(row, first=len(rows) == 1), flush=True)
    print(report.explanation())

    result = {"benchmark": "all_reduce", "machine": machine, "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot.draw(result, arguments.plot)
    if arguments.save:
        print(f"saved: {report.save(result, Path(__file__).parent / 'results')}")
    return 0 if all(row[peer]["correct"] for row in rows for peer in arguments.peers) else 1


if __name__ == "__main__":
    if role := os.environ.get("BENCH_ROLE"):
        from bench import worker

        sys.exit(worker.serve(role))
    sys.exit(main())
