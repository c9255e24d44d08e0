"""Hosts whose scripts found each other lose one: who goes on, who does not, and in which order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.hosts import Host, Network
from support.talking import TalkingProcess

pytestmark = pytest.mark.needs_root_netns

PSK = "ab" * 32
PATIENCE_S = 200.0

SCRIPT = """
import json, sys, time
import numpy as np
from potluck import AutoDiscoveryBackend, DistributedContext
from potluck.errors import GroupError, PotluckError

def say(**facts):
    print(json.dumps(facts), flush=True)

say(ready=True)
sys.stdin.readline()
backend = AutoDiscoveryBackend(min_peers=int(sys.argv[1]))
ctx = DistributedContext(backend, timeout_s=60)
ctx.timeout_s = 20  # for what follows
say(rank=ctx.rank, world=ctx.world_size, node=ctx.group.me.node,
    nodes=[member.node for member in ctx.members],
    paths=sorted((p.source, p.target, p.bandwidth) for p in ctx.group.paths))
sys.stdin.readline()
while True:
    try:
        total = ctx.all_reduce(np.ones(1000), op="sum", timeout=8)
        assert total[0] == ctx.world_size
        time.sleep(0.01)
    except GroupError as error:
        try:
            ctx.reform(error)
        except PotluckError as refused:
            say(error=type(refused).__name__, text=str(refused))
            break
        say(rank=ctx.rank, world=ctx.world_size, epoch=ctx.epoch)
"""


class Script(TalkingProcess):
    """SCRIPT in a host, with a home, and what it says line by line."""

    def __init__(self, host: Host, home: Path, min_peers: int) -> None:
        self.host = host
        process: subprocess.Popen[str] = host.start(
            [sys.executable, "-c", SCRIPT, str(min_peers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Hosts in namespaces share a kernel, and could share memory: not these.
            env=os.environ
            | {"POTLUCK_HOME": str(home), "POTLUCK_PSK": PSK, "POTLUCK_USE_SHARED_MEMORY": "no"},
        )
        super().__init__(process, timeout_s=PATIENCE_S)


@contextmanager
def formed(network: Network, home: Path) -> Iterator[tuple[list[Script], list[dict[str, Any]]]]:
    """A script on every host, in rank order, and what each said of the group."""
    scripts = [Script(host, home / str(host.index), len(network) - 1) for host in network]
    try:
        for script in scripts:
            assert script.hears() == {"ready": True}
        for script in scripts:
            script.go()
        said = {script: script.hears() for script in scripts}
        ranked = sorted(scripts, key=lambda script: int(said[script]["rank"]))
        yield ranked, [said[script] for script in ranked]
    finally:
        for script in scripts:
            script.end()


def heard(scripts: Sequence[Script]) -> list[dict[str, Any]]:
    return [script.hears() for script in scripts]


def test_the_side_without_a_majority_ends_and_the_other_goes_on(tmp_path: Path) -> None:
    """Of three hosts, two without the one that was cut off: the first or the last; of two hosts,
    rank 0. All at once, as what is cut off waits for half a minute."""
    cases = [(3, 0), (3, 2), (2, 1)]
    with ExitStack() as stack:
        worlds: list[tuple[list[Script], Script]] = []
        for size, lost in cases:
            network = stack.enter_context(Network(size))
            scripts, said = stack.enter_context(formed(network, tmp_path / f"{size}-{lost}"))
            assert [each["world"] for each in said] == [size] * size
            worlds.append(([each for each in scripts if each is not scripts[lost]], scripts[lost]))
        for rest, cut_off in worlds:
            for script in (*rest, cut_off):
                script.go()
            cut_off.host.link(up=False)
        for (size, lost), (rest, _) in zip(cases, worlds, strict=True):
            after = [(each["rank"], each["world"]) for each in heard(rest)]
            assert after == [(rank, size - 1) for rank in range(size - 1)], (size, lost)
        for (size, lost), (_, cut_off) in zip(cases, worlds, strict=True):
            alone = cut_off.hears()
            assert alone["error"] == "GroupError", (size, lost)
            why = (
                "1 of 3 members that may still run is not a majority"
                if size == 3
                else "half of them without the most senior"
            )
            assert why in alone["text"], (size, lost)


def test_a_killed_process_on_another_host_is_certain_and_one_is_enough(tmp_path: Path) -> None:
    with Network(3) as network, formed(network, tmp_path) as (scripts, _):
        for script in scripts:
            script.go()
        scripts[0].process.kill()
        assert [(each["rank"], each["world"]) for each in heard(scripts[1:])] == [(0, 2), (1, 2)]
        scripts[1].process.kill()
        assert scripts[2].hears()["world"] == 1, "whose machine says so: no majority is needed"


def test_links_are_measured_and_the_ranks_follow_the_ring(tmp_path: Path) -> None:
    with Network(3) as network:
        network[1].shape("10mbit")  # far below what a busy machine measures for the others
        with formed(network, tmp_path) as (scripts, said):
            order = said[0]["nodes"]
            assert all(each["nodes"] == order for each in said)
            assert all(each["paths"] == said[0]["paths"] for each in said), "all hold the same"
            slow = next(e["node"] for s, e in zip(scripts, said, strict=True) if s.host.index == 1)
    paths = {(a, b): bandwidth for a, b, bandwidth in said[0]["paths"]}
    assert len(paths) == 6
    cable = [bandwidth for ends, bandwidth in paths.items() if slow in ends]
    assert max(cable) < min(bandwidth for ends, bandwidth in paths.items() if slow not in ends)

    def slowest(ring: list[str]) -> float:
        return min(paths[way] for way in zip(ring, [*ring[1:], ring[0]], strict=True))

    assert slowest(order) >= slowest(order[::-1])
