"""A man on the cable between two workers: he copies Ethernet frames, and changes what he likes."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.cable import man_on_the_cable
from support.commands import Command
from support.hosts import INTERFACE, Network
from support.machines import PSK

pytestmark = pytest.mark.needs_root_netns

OBJECTS = Path(__file__).parent / "scripts" / "objects.py"


def run(network: Network, root: Path, size: int, backend: str = "potluck") -> tuple[list[int], str]:
    """A rank on each host, in one world of torch, to its end: exit codes, and what they wrote."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Command(
                    host.command([sys.executable, str(OBJECTS), str(size), backend]),
                    env={
                        "RANK": str(host.index),
                        "WORLD_SIZE": str(len(network)),
                        "MASTER_ADDR": network[0].address,
                        "MASTER_PORT": "29500",
                        "POTLUCK_HOME": str(root / str(host.index)),
                        "POTLUCK_PSK": PSK,
                        "GLOO_SOCKET_IFNAME": INTERFACE,
                        "POTLUCK_USE_SHARED_MEMORY": "no",  # hosts share one kernel
                        "PYTHONUNBUFFERED": "1",
                    },
                )
            )
            for host in network
        ]
        codes = [rank.finish(180) for rank in ranks]
    return codes, "\n".join(rank.text for rank in ranks)


@pytest.mark.parametrize("backend", ["potluck", "gloo"])
def test_a_pickle_can_not_be_rewritten_on_the_cable(backend: str, tmp_path: Path) -> None:
    """torch's object collectives unpickle what a rank sent. In Gloo's clear text he rewrites it,
    and his command runs; of potluck's bytes he finds none to rewrite."""
    owned = tmp_path / "owned"
    with ExitStack() as stack:
        network = stack.enter_context(Network(2))
        man = stack.enter_context(man_on_the_cable(network, "rewrite", f"touch {owned}"))
        codes, words = run(network, tmp_path, 900, backend)
    if backend == "gloo":
        assert man.num_changed > 0
        assert owned.exists(), words
        return
    assert not owned.exists(), words
    assert (man.num_changed, codes) == (0, [0, 0]), words
    assert words.count("all the same") == 2


def test_a_bit_that_was_flipped_on_the_cable_ends_the_link(tmp_path: Path) -> None:
    with ExitStack() as stack:
        network = stack.enter_context(Network(2))
        man = stack.enter_context(man_on_the_cable(network, "flip"))
        codes, words = run(network, tmp_path, 1_000_000)
    assert man.num_changed == 1
    assert all(codes), words
    assert "DECRYPTION_FAILED_OR_BAD_RECORD_MAC" in words
    assert "other" not in words
