"""The slow networks of the benchmarks: hosts in namespaces whose links have a rate and a delay."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from potluck.cli.bench.crew import Crew
from support import hosts
from support.delay import Delay

_SETTLE_S, _LONG_DELAY_S = 2.0, 0.02
_OLD_PATH_S = 10.5
"""For so long BBR remembers the round trip of a path: the kernel's own time, nothing to wait on."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of network: every path's rate, its delay each way, and the asked efficiency of a
    step of 25 M parameters with 200 ms of computation (None: none is asked)."""

    name: str
    short: str
    rate: str
    bits_per_s: float
    delay_s: float
    jitter_s: float
    reach: float | None


KINDS = {
    "10gbit": Kind("10 Gbit/s", "10 Gbit/s", "10gbit", 1e10, 0.0, 0.0, None),
    "1gbit": Kind("1 Gbit/s", "1 Gbit/s", "1gbit", 1e9, 0.0, 0.0, 0.90),
    "wifi": Kind(
        "Wi-Fi-like, 300 Mbit/s, 3 ± 3 ms", "Wi-Fi-like", "300mbit", 3e8, 0.003, 0.003, 0.85
    ),
    "100mbit": Kind("100 Mbit/s", "100 Mbit/s", "100mbit", 1e8, 0.0, 0.0, 0.85),
    "20mbit": Kind("20 Mbit/s, 50 ± 20 ms", "20 Mbit/s", "20mbit", 2e7, 0.050, 0.020, 0.80),
}


@contextlib.contextmanager
def slowed(network: hosts.Network, kind: Kind) -> Iterator[None]:
    """``network`` as slow as ``kind`` for the block. Each path leads over two cables, and each of
    these has half of the delay."""
    with contextlib.ExitStack() as stack:
        if kind.delay_s:
            for host in network:
                delay = Delay(host, kind.delay_s / 2, jitter_s=kind.jitter_s / 2, seed=host.index)
                stack.enter_context(delay)
        for host in network:
            host.shape(kind.rate)
            stack.callback(host.shape, None)
        yield


def settle(crew: Crew, kind: Kind) -> None:
    """Wait, then send, until connections have found the rate of a network with a delay. Congestion
    control by BBR takes the shortest round trip of the last 10 s for that of the path, and sends
    too little for as long after a network without delay."""
    if kind.delay_s >= _LONG_DELAY_S:
        time.sleep(_OLD_PATH_S)
    if kind.delay_s:
        crew.ask("send", nbytes=round(kind.bits_per_s / 8 * _SETTLE_S / 4), times=4)
