"""Real processes on loopback, one of them killed in the middle of a large all-reduce."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from potluck._core import native
from support.ports import reserved_ports

needs_native = pytest.mark.skipif(
    not native.available, reason="shared memory needs the native core"
)

NODES = (0, 0, 1, 1)
PATIENCE_S = 30.0
"""Hierarchical plans: the mate of the lost worker waits for it, the others for their leaders."""
DEADLINE_S = 8.0
"""For calls of which a rank is stopped: the running ranks make each of them well before it."""

WORKER = """
import json, os, sys, time
import numpy as np
from potluck._core.backends.ring import RingBackend
from potluck._core.context import DistributedContext, init
from potluck.errors import GroupError

rank, peers, algorithm = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
patience_s = float(sys.argv[4])

def say(**facts):
    print(json.dumps({"rank": rank, **facts}), flush=True)

if algorithm in ("shared_memory", "hierarchical"):
    # a list of addresses does not say who shares a node
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(peers)))
    os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = peers[0].rpartition(":")
    ctx = init("env", timeout_s=30)
else:
    ctx = DistributedContext(RingBackend(peers, rank), timeout_s=30)
ctx.barrier(algorithm="direct")
array = np.full(2_000_000, rank + 1.0)
say(step="ready", total=float(ctx.all_reduce(array.copy(), algorithm=algorithm)[0]))
try:
    while True:
        result = ctx.all_reduce(array.copy(), algorithm=algorithm, timeout=patience_s)
        assert (result == result[0]).all() and result[0] == sum(range(1, len(peers) + 1))
        say(step="reduced")
except GroupError as error:
    at = time.monotonic()
    again = None
    try:
        ctx.barrier()
    except GroupError as second:
        again = type(second).__name__
    say(step="lost", at=at, error=type(error).__name__, lost=error.rank, text=str(error),
        certain=error.certain, again=again)
ctx.close()
say(step="closed", threads=[t.name for t in __import__("threading").enumerate()])
"""


@contextmanager
def workers(
    size: int,
    algorithm: str,
    tmp_path: Path,
    patience_s: float = PATIENCE_S,
    nodes: Sequence[int] = (),
    **variables: str,
) -> Iterator[list[subprocess.Popen[str]]]:
    """``nodes``: which node each is on; without it they share one."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {
        **os.environ,
        "POTLUCK_PSK": "ab" * 32,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **variables,
    }
    with reserved_ports(size) as ports, ExitStack() as stack:
        peers = ",".join(f"127.0.0.1:{port}" for port in ports)
        children = []
        for rank in range(size):
            home = {"POTLUCK_HOME": str(tmp_path / f"node-{nodes[rank]}")} if nodes else {}
            child = subprocess.Popen(
                [sys.executable, str(script), str(rank), peers, algorithm, str(patience_s)],
                env=environment | home,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, child)
            children.append(child)
        yield children


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def wait_for(child: subprocess.Popen[str], step: str) -> dict[str, object]:
    assert child.stdout is not None
    for line in child.stdout:
        said = json.loads(line)
        if said["step"] == step:
            return said
    raise AssertionError(f"ended before {step!r}: {child.stderr.read() if child.stderr else ''}")


@pytest.mark.parametrize(
    ("algorithm", "shared"),
    [
        ("ring", "true"),
        ("ring", "false"),
        ("direct", "true"),
        ("direct", "false"),
        pytest.param("shared_memory", "true", marks=needs_native),
        ("hierarchical", "true"),
    ],
)
def test_a_killed_process_is_named_by_every_survivor_at_once(
    algorithm: str, shared: str, tmp_path: Path
) -> None:
    size, victim = 4, 2
    nodes = NODES if algorithm == "hierarchical" else ()
    switch = {"POTLUCK_USE_SHARED_MEMORY": shared}
    with workers(size, algorithm, tmp_path, nodes=nodes, **switch) as children:
        for child in children:
            assert wait_for(child, "ready")["total"] == 10
        wait_for(children[victim], "reduced")
        killed = time.monotonic()  # the same clock in all processes of one machine
        children[victim].send_signal(signal.SIGKILL)
        for rank, child in enumerate(children):
            if rank == victim:
                continue
            said = wait_for(child, "lost")
            took = float(str(said["at"])) - killed
            print(f"rank {rank} knew after {1000 * took:.0f} ms: {said['text']}")
            assert (said["error"], said["lost"]) == ("PeerLost", victim), said
            assert said["certain"] is True
            assert said["again"] == "PeerLost"
            assert took < PATIENCE_S / 2, "long before the deadline of the call"
            assert wait_for(child, "closed")["threads"] == ["MainThread"]
            assert child.wait(200) == 0


@pytest.mark.parametrize(
    "algorithm", ["ring", pytest.param("shared_memory", marks=needs_native), "hierarchical"]
)
def test_a_stopped_process_is_named_when_the_deadline_passes(
    algorithm: str, tmp_path: Path
) -> None:
    """SIGSTOP: no link ends, nothing is said; and what it does later harms nobody."""
    size, victim = 4, 1
    nodes = NODES if algorithm == "hierarchical" else ()
    with workers(size, algorithm, tmp_path, patience_s=DEADLINE_S, nodes=nodes) as children:
        for child in children:
            wait_for(child, "reduced")
        children[victim].send_signal(signal.SIGSTOP)
        try:
            for rank, child in enumerate(children):
                if rank == victim:
                    continue
                said = wait_for(child, "lost")
                assert (said["error"], said["lost"]) == ("OperationTimeout", victim), said
                wait_for(child, "closed")
        finally:
            children[victim].send_signal(signal.SIGCONT)
        said = wait_for(children[victim], "lost")
        assert said["error"] in ("OperationTimeout", "PeerLost")
        wait_for(children[victim], "closed")
