"""Hosts with several interfaces, aliases and one kind of IP: the right way is found unasked."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.hosts import Network
from support.machines import Machine, cluster_of, form, leader_of, machines

pytestmark = pytest.mark.needs_root_netns

PATIENCE_S = 150.0
"""For rows of measurements, which agents tell each other now and then."""


def shows(machine: Machine, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the machine's agent tells, once that is right; each question is a command."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        cluster = machine.cluster()
        if is_it(cluster):
            return cluster
    raise AssertionError(f"{machine.id} still shows {cluster}")


def measured(cluster: dict[str, Any]) -> bool:
    """Whether both directions of the pair's link have a figure."""
    links = cluster["links"]
    return len(links) == 2 and all(link["bandwidth"] for link in links)


def test_of_a_slow_and_a_fast_network_the_fast_one_is_used_and_dead_ends_are_none(
    tmp_path: Path,
) -> None:
    with Network(2, rate="20mbit") as network:
        network.second(rate="500mbit", interface="eth7")
        for host in network:
            # A bridge of containers, the same on each machine, which leads nowhere; a VPN that no
            # other is in; an alias of the loopback; the own name as 127.0.1.1 is one of these.
            for name, address in (
                ("docker0", "172.17.0.1/16"),
                ("tun0", f"10.8.{host.index}.6/24"),
            ):
                host.run(["ip", "link", "add", name, "type", "bridge"])
                host.run(["ip", "addr", "add", address, "dev", name])
                host.run(["ip", "link", "set", name, "up"])
            host.run(["ip", "addr", "add", "127.0.1.1/8", "dev", "lo"])
        with machines(network, tmp_path) as (ada, bob):
            form(ada, bob)

            def by_the_fast_one(cluster: dict[str, Any]) -> bool:
                return measured(cluster) and all(
                    link["interface"] == "eth7" for link in cluster["links"]
                )

            shown = shows(ada, by_the_fast_one)
            [peer] = [each for each in shown["nodes"] if each["link"] != "self"]
            assert peer["host"].startswith(("10.89.0.", "fd89:", "fe80:")), peer
            figures = [8 * link["bandwidth"] / 1e6 for link in shown["links"]]
            print(f"Mbit/s: {figures[0]:.0f} and {figures[1]:.0f}")
            assert all(each["cores"] and each["memory_bytes"] for each in shown["nodes"])


@pytest.mark.parametrize("family", ["-4", "-6"])
def test_hosts_with_one_kind_of_ip_only(family: str, tmp_path: Path) -> None:
    with Network(2, rate="100mbit") as network:
        for host in network:
            if family == "-6":
                host.run(["ip", "-4", "addr", "flush", "dev", "eth0"])
            else:
                host.run(["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"])
        with machines(network, tmp_path) as (ada, bob):
            form(ada, bob)

            def by_the_cable(cluster: dict[str, Any]) -> bool:
                """The other side's interface is known when its next row has come."""
                return measured(cluster) and all(
                    link["interface"] == "eth0" for link in cluster["links"]
                )

            shown = shows(ada, by_the_cable)
            [peer] = [each for each in shown["nodes"] if each["link"] != "self"]
            assert (":" in peer["host"]) == (family == "-6")


RANKS = """
import potluck

ctx = potluck.init()
paths = sorted((path.source, path.target, path.bandwidth) for path in ctx.group.paths)
print("rank", ctx.rank, "of", ctx.group.me.node, "knows", paths)
ctx.barrier()
ctx.close()
"""


def test_the_ranks_of_a_job_follow_the_ring_that_was_measured(tmp_path: Path) -> None:
    script = tmp_path / "code" / "ranks.py"
    script.parent.mkdir()
    script.write_text(RANKS)
    with cluster_of(3, tmp_path / "homes") as trio:
        form(*trio)

        def all_measured(cluster: dict[str, Any]) -> bool:
            links = cluster["links"]
            return len(links) == 6 and all(link["bandwidth"] for link in links)

        shows(leader_of(trio), all_measured)  # it tells the ranks
        with trio[1].run(script) as run:
            assert run.finish() == 0, run.text
        told = dict(re.findall(r"rank (\d) of (\w{64})", run.text))
        order = [told[str(rank)] for rank in range(3)]
        knowledge = set(re.findall(r"knows (.*)", run.text))
        assert len(knowledge) == 1, "all ranks hold the same figures"
        paths = {(a, b): bandwidth for a, b, bandwidth in ast.literal_eval(knowledge.pop())}
        assert len(paths) == 6

        def slowest(ring: list[str]) -> float:
            """Of the way from each node to the next one."""
            return min(paths[way] for way in zip(ring, [*ring[1:], ring[0]], strict=True))

        # By the figures that the job was given: links are measured again and again.
        assert slowest(order) >= slowest(order[::-1])
