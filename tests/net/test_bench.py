"""``potluck bench`` between machines: one command on each, in step."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from support.commands import Command, potluck_command
from support.hosts import Network

pytestmark = pytest.mark.needs_root_netns


def bench(network: Network, *sizes: str) -> list[tuple[int, str]]:
    """Run it on every host, with these ``--sizes``; exit code and output of each."""
    peers = ",".join(f"{host.address}:52416" for host in network)
    with ExitStack() as stack:
        commands = [
            stack.enter_context(
                Command(
                    host.command(
                        [
                            *(*potluck_command(), "bench", "all-reduce", "--against", "none"),
                            *("--peers", peers, "--rank", str(host.index), "--sizes", size),
                            *("--rounds", "2", "--round-seconds", "0.01"),
                        ]
                    ),
                    env={"POTLUCK_PSK": "5a" * 32},
                )
            )
            for host, size in zip(network, sizes, strict=True)
        ]
        return [(command.finish(), command.text) for command in commands]


def test_machines_measure_together_and_those_told_otherwise_say_so() -> None:
    with Network(2) as network:
        for code, text in bench(network, "4KiB", "4KiB"):
            assert code == 0, text
            [row] = [line for line in text.splitlines() if line.startswith("all-reduce")]
            assert row.split()[1:4] == ["2", "4", "KiB"]
            assert "WRONG" not in text
        for code, text in bench(network, "4KiB", "8KiB"):
            assert code == 2, text
            assert "machine 0 was given operation, sizes, rounds all-reduce of 4096" in text
            assert "machine 1 all-reduce of 8192" in text
