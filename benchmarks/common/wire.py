"""Several workers per host: seconds, CPU seconds, and what the interface of a host has sent."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.placements import InHosts
from potluck.cli.bench.comparison import crews
from support.hosts import INTERFACE, Host, Network


def sent_bytes(host: Host) -> int:
    """What the interface of ``host`` has sent so far, by its own counter, headers and all."""
    shown = subprocess.run(
        ["ip", "-n", host.namespace, "-s", "-j", "link", "show", "dev", INTERFACE],
        check=True,
        capture_output=True,
        text=True,
        timeout=10,
    )
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def all_reduces(
    network: Network, peers: Sequence[str], per_host: int, nbytes: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Medians of ``rounds`` all-reduces, peers in turn: ``seconds`` (the slowest rank's), ``cpu_s``
    (of all ranks) and ``wire_bytes`` (sent by host 0)."""
    world_size = per_host * len(network)
    left_out: dict[str, str] = {}
    found: dict[str, list[tuple[float, float, int]]] = {}
    details: dict[str, Any] = {
        "operation": "all-reduce",
        "nbytes": nbytes,
        "calls": 1,
        "warm": False,
    }
    with (
        tempfile.TemporaryDirectory(prefix="potluck-hosts-") as folder,
        crews(peers, world_size, left_out, InHosts(network, per_host, Path(folder))) as started,
    ):
        for number in range(rounds + 1):
            for crew in started:
                before = sent_bytes(network[0])
                answers = crew.ask("time", **details)
                sent = sent_bytes(network[0]) - before
                seconds = max(answer["seconds"] for answer in answers)
                cpu = sum(answer["cpu_s"] for answer in answers)
                if number:  # the first one makes links
                    found.setdefault(crew.peer.name, []).append((seconds, cpu, sent))
    names = ("seconds", "cpu_s", "wire_bytes")
    return {
        peer: dict(zip(names, map(statistics.median, zip(*rows, strict=True)), strict=True))
        for peer, rows in found.items()
    }
