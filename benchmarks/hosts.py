"""All-reduce between hosts with links of 1 and 10 Gbit/s: potluck over TLS, Gloo in clear text.

    python benchmarks/hosts.py          # needs Linux, root and iproute2
    python benchmarks/hosts.py --save   # keep the result in benchmarks/results/

The hosts are network namespaces of this machine (``support.hosts``), joined by a bridge; a
token bucket holds both directions of each link. All hosts share this machine's cores, and TLS
needs some of them: real machines have more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from common import claims, script, wire
from common.claims import Claim
from common.placements import InHosts

from potluck.cli.bench.comparison import ComparisonPlan
from potluck.cli.bench.machine import machine
from potluck.cli.bench.table import show
from support import hosts

SMALL, LARGE = 4 << 10, 100 << 20
MIB = 1 << 20
SEVERAL, ONE = "potluck-hierarchical", "potluck-tls"
"""The peers with several workers per host, and with one."""
CODECS = {"potluck-bf16": 0.52, "potluck-int8": 0.28}


def measure(quick: bool, say: script.Say) -> script.Measured:
    if reason := hosts.missing():
        say(f"skipped: {reason}")
        return {"machine": machine(), "rows": []}, []
    sizes = (SMALL, 1 << 20) if quick else (SMALL, LARGE)
    found: list[Claim] = []
    measured: dict[str, dict[str, Any]] = {}
    for rate, num_hosts, peers in (
        ("1gbit", 2, ("potluck-tls", "gloo", *CODECS)),
        ("1gbit", 4, ("potluck-tls", "gloo", *CODECS)),
        ("10gbit", 2, ("potluck-tls", "gloo")),
    ):
        if quick and measured:
            break
        result = between(rate, num_hosts, peers, sizes, quick, say)
        measured[f"{num_hosts} hosts, {rate}"] = result
        found += what_follows(result, rate, num_hosts)
    several, of_several = of_several_workers(quick, say)
    first = next(iter(measured.values()))
    result = {"machine": first["machine"], "networks": measured, "several_workers": several}
    return result, [*found, *of_several]


def between(
    rate: str,
    num_hosts: int,
    peers: Sequence[str],
    sizes: Sequence[int],
    quick: bool,
    say: script.Say,
) -> dict[str, Any]:
    plan = ComparisonPlan(
        peers=peers,
        world_sizes=(num_hosts,),
        cases=[("all-reduce", nbytes) for nbytes in sizes],
        rounds=1 if quick else 5,
        round_s=0.01 if quick else 0.2,
    )
    with hosts.Network(num_hosts, rate=rate) as network:
        title = f"{num_hosts} hosts at {rate}"
        return script.compared(plan, say, title=title, placement=InHosts(network))


def of_several_workers(quick: bool, say: script.Say) -> script.Measured:
    """Two hosts of two workers: the wire of a host carries what it does for one worker."""
    nbytes, rounds = (1 << 20, 1) if quick else (LARGE, 5)
    peers = (SEVERAL, "potluck-ring", "gloo")
    with hosts.Network(2, rate="1gbit") as network:
        say(f"2 hosts of 2 workers at 1 Gbit/s, {show(nbytes)}")
        one = wire.all_reduces(network, (ONE,), 1, nbytes, rounds)[ONE]
        two = wire.all_reduces(network, peers, 2, nbytes, rounds)
    for peer, figures in two.items():
        say(f"{peer}: {figures['seconds']:.3f} s, CPU {figures['cpu_s']:.3f} s")
    where = f"2 hosts of 2 workers at 1 Gbit/s, {show(nbytes)}, hierarchical"
    ours = two[SEVERAL]
    bytes_over = ours["wire_bytes"] / one["wire_bytes"]
    shown = f"{ours['wire_bytes'] / MIB:.1f} MiB of {one['wire_bytes'] / MIB:.1f} MiB:"
    found = [
        claims.at_most(
            f"{where}: bytes that a host sends, over those with one worker per host",
            "<= 1.03x",
            1.03,
            [(shown, bytes_over)],
        )
    ]
    for peer, name in (("potluck-ring", "the ring over all"), ("gloo", "Gloo")):
        ratio = [("", ours["seconds"] / two[peer]["seconds"])] if peer in two else []
        found.append(claims.at_most(f"{where}: time over that of {name}", "<= 1x", 1.0, ratio))
    return {"nbytes": nbytes, "peers": two}, found


def what_follows(result: dict[str, Any], rate: str, num_hosts: int) -> list[Claim]:
    """What was asked, and whether it was met."""
    where = f"{num_hosts} hosts at {rate.replace('gbit', ' Gbit/s')}"
    found = []
    for row in result["rows"]:
        cells, size = row["peers"], show(row["nbytes"])
        if not {"gloo", "potluck-tls"} <= set(cells):
            continue
        gloo, mine = cells["gloo"], cells["potluck-tls"]
        over_gloo = gloo["median_s"] / mine["median_s"]
        bandwidths = f"{_gbit(mine)} of {_gbit(gloo)} Gbit/s"
        if row["nbytes"] == SMALL:
            if rate == "1gbit":
                what = f"{where}, {size}: potluck's time with TLS over Gloo's"
                found.append(claims.at_most(what, "<= 0.3x", 0.3, [("", 1 / over_gloo)]))
            continue
        limit = 0.99 if rate == "1gbit" else 0.85
        what = f"{where}, {size}: TLS over Gloo's clear text, bandwidth"
        found.append(claims.at_least(what, f">= {limit}x", limit, [(bandwidths + ":", over_gloo)]))
        for name, most in CODECS.items() if rate == "1gbit" else ():
            part = [("", cells[name]["median_s"] / gloo["median_s"])] if name in cells else []
            what = f"{where}, {size}, codec {name.removeprefix('potluck-')}: time over Gloo's"
            found.append(claims.at_most(what, f"<= {most}x", most, part))
        if mine.get("memory_bytes") is not None:
            per_link = mine["memory_bytes"] / MIB / (num_hosts - 1)
            what = f"{where}, {size}: memory above the buffers, per link"
            found.append(claims.at_most(what, "<= 4 MiB", 4.0, [("", per_link)], " MiB"))
        frugal = mine["cpu_s_per_gb"], gloo["cpu_s_per_gb"]
        what = f"{where}, {size}: CPU seconds per GB, TLS and Gloo's clear text"
        shown = f"{frugal[0]:.3g} s and {frugal[1]:.3g} s"
        found.append(Claim(what, "not above Gloo", shown, frugal[0] <= frugal[1]))
    return found


def _gbit(cell: dict[str, Any]) -> str:
    return f"{cell['bus_bytes_per_s'] * 8 / 1e9:.3f}"


if __name__ == "__main__":
    sys.exit(script.main("hosts", __doc__, measure))
