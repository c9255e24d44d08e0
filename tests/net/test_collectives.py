"""Collectives between hosts: the right sum over real links, and what survivors of a cut hear."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from support.hosts import Network

pytestmark = pytest.mark.needs_root_netns

DEADLINE_S = 8.0
"""Both survivors make the call well before it."""
BUSY_S = 20.0
"""What a machine that also does other work may add."""
WORKER = """
import json, sys, time
import numpy as np
from potluck._core.backends.ring import RingBackend
from potluck._core.context import DistributedContext
from potluck.errors import GroupError

rank, peers, deadline = int(sys.argv[1]), sys.argv[2].split(","), float(sys.argv[3])

def say(**facts):
    print(json.dumps({"rank": rank, **facts}), flush=True)

with DistributedContext(RingBackend(peers, rank), timeout_s=60) as ctx:
    array = np.random.default_rng(rank).standard_normal(300_000)
    expected = sum(np.random.default_rng(r).standard_normal(300_000) for r in range(len(peers)))
    result = ctx.all_reduce(array.copy(), timeout=60)
    say(step="reduced", error=float(np.abs(result - expected).max()),
        in_shared_memory=sum(
            link["bytes_in_shared_memory"] for link in ctx.stats()["links"].values()))
    sys.stdin.readline()
    start = time.monotonic()
    try:
        while True:
            start = time.monotonic()
            ctx.all_reduce(array.copy(), timeout=deadline)
    except GroupError as error:
        say(step="lost", error=type(error).__name__, lost=error.rank, certain=error.certain,
            waited=time.monotonic() - start, text=str(error))
"""


@contextmanager
def workers(network: Network) -> Iterator[list[subprocess.Popen[str]]]:
    """One rank per host, each blocked on its stdin after a first all_reduce over TLS."""
    peers = ",".join(f"{host.address}:52416" for host in network)
    with ExitStack() as stack:
        started = []
        for rank, host in enumerate(network):
            worker: subprocess.Popen[str] = host.start(
                [sys.executable, "-c", WORKER, str(rank), peers, str(DEADLINE_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(worker)
            stack.callback(worker.kill)
            started.append(worker)
        yield started


def heard(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdout is not None
    answer: dict[str, Any] = json.loads(worker.stdout.readline() or "{}")
    return answer


def go(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


@pytest.mark.parametrize("how", ["cable out", "killed"])
def test_hosts_reduce_and_survivors_name_the_one_that_is_gone(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_PSK", "5a" * 32)
    with Network(3, rate="1gbit") as network, workers(network) as ranks:
        for rank in ranks:
            first = heard(rank)
            assert first["step"] == "reduced"
            assert first["error"] < 1e-12
        if how == "cable out":
            network[2].link(up=False)
        began = time.monotonic()
        for rank in ranks:
            go(rank)
        if how == "killed":
            ranks[2].kill()
        for rank in ranks[:2]:
            end = heard(rank)
            assert end["step"] == "lost", end
            assert end["lost"] == 2, end
            if how == "killed":
                assert (end["error"], end["certain"]) == ("PeerLost", True), end
                assert end["waited"] < DEADLINE_S + BUSY_S
            else:  # silence, and nobody who knows more: the deadline ends it
                assert end["error"] in ("PeerLost", "OperationTimeout")
                assert end["waited"] < DEADLINE_S + BUSY_S
        assert time.monotonic() - began < DEADLINE_S + BUSY_S
