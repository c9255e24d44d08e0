"""TLS 1.3: the core's two records per system call against other ways, in speed and CPU.

    python benchmarks/tls_records.py          # needs OpenSSL's headers; Linux and root for networks
    python benchmarks/tls_records.py --save   # keep the result in benchmarks/results/

Two processes, one sends: over the loopback, and between two hosts (network namespaces) with links
of 1 and 10 Gbit/s. ``native/benchmarks/tls_records.cpp`` is either end and says what the ways are.
CPU is that of both ends. The core's way should take at most 5% more CPU per GB than the best of the
others.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import claims, script

from potluck.cli.bench.machine import machine
from support import hosts

SOURCE = Path(__file__).parents[1] / "native" / "build"
BUILD = Path(__file__).parents[1] / "build" / "benchmarks"
WAYS = ("core", "batch-1", "batch-4", "batch-8", "socket", "ktls", "clear")
OTHERS = ("batch-1", "batch-4", "batch-8", "socket", "ktls")
MARGIN = 0.95
PORT = 52499
GB = 1_000_000_000

Row = dict[str, dict[str, Any]]


def measure(quick: bool, say: script.Say) -> script.Measured:
    program = built()
    found: dict[str, Row] = {}
    ahead: list[tuple[str, float]] = []
    for network, rate, gigabytes in (("loopback", "", 4.0), ("10 Gbit/s", "10gbit", 4.0),
                                     ("1 Gbit/s", "1gbit", 0.5)):  # fmt: skip
        if rate and (reason := hosts.missing()):
            say(f"{network} skipped: {reason}")
            continue
        total = int(gigabytes * GB) // (20 if quick else 1)
        say(f"\n{network}, {total / GB:g} GB one way")
        found[network] = row = compared(program, rate, total, 1 if quick else 5, say)
        others = {way: row[way]["cpu_s_per_gb"] for way in OTHERS if "missing" not in row[way]}
        best = min(others, key=lambda way: others[way])
        ahead.append((f"{network} ({best})", others[best] / row["core"]["cpu_s_per_gb"]))
    text = "CPU per GB of the best other way over the core's"
    return {"machine": machine(), "networks": found}, [
        claims.at_least(text, f">= {MARGIN}x", MARGIN, ahead)
    ]


def built() -> Path:
    """The measuring program, built in ``build/benchmarks``."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DPOTLUCK_BENCHMARKS=ON", "-DPOTLUCK_BINDING=OFF"]
    subprocess.run(["cmake", "-S", SOURCE, "-B", BUILD, *options], check=True, stdout=sys.stderr)
    subprocess.run(
        ["cmake", "--build", BUILD, "--target", "tls_records", "--parallel", "2"],
        check=True,
        stdout=sys.stderr,
    )
    return BUILD / "tls_records"


def compared(program: Path, rate: str, total: int, rounds: int, say: script.Say) -> Row:
    """The medians of ``rounds`` transfers by each way, in turns."""
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        pem = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "identity.pem"
        subprocess.run([program, "key", pem], check=True)
        network = stack.enter_context(hosts.Network(2, rate=rate)) if rate else None
        for number in range(rounds):
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                taken[way].append(transfer(program, way, total, pem, network))
    row: Row = {}
    say(f"  {'way':16}{'Gbit/s':>8}{'CPU s per GB':>14}")
    for way, each in taken.items():
        if "missing" in each[0]:
            row[way] = each[0]
            say(f"  {way:16}not here: {each[0]['missing']}")
            continue
        middle = {key: statistics.median(one[key] for one in each) for key in each[0]}
        row[way] = {
            "gbit_per_s": 8 * total / GB / middle["seconds"],
            "cpu_s_per_gb": middle["cpu_s"] * GB / total,
        }
        say(f"  {way:16}{row[way]['gbit_per_s']:8.2f}{row[way]['cpu_s_per_gb']:14.3f}")
    return row


def transfer(
    program: Path, way: str, total: int, pem: Path, network: hosts.Network | None
) -> dict[str, Any]:
    """One transfer: its seconds, and the CPU seconds of both ends; or why there is none."""
    details = [way, str(total), str(pem), str(PORT)]
    serve, call = [str(program), "serve", *details], [str(program), "call", *details]
    address = network[0].address if network else "127.0.0.1"
    if network:
        serve, call = network[0].command(serve), network[1].command(call)
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        lines = [first] if "missing" in first else [server_line(call, address, server)]
        lines.append(server.stdout.read().strip())
    ends = [json.loads(line) for line in lines if line.startswith("{")]
    for end in ends:
        if "missing" in end:
            return {"missing": end["missing"]}
    return {"seconds": ends[0]["seconds"], "cpu_s": sum(end["cpu_s"] for end in ends)}


def server_line(call: list[str], address: str, server: subprocess.Popen[str]) -> str:
    """What the calling end prints; the server is ended if that fails."""
    try:
        done = subprocess.run([*call, address], check=True, capture_output=True, text=True)
    except BaseException:
        server.kill()
        raise
    return done.stdout


if __name__ == "__main__":
    sys.exit(script.main("tls_records", __doc__ or "", measure))
