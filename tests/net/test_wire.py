"""A man on the cable between two workers: he copies Ethernet frames, and changes what he likes."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.cable import man_on_the_cable
from support.commands import Command
from support.hosts import Network
from support.machines import PSK, Machine, form

pytestmark = pytest.mark.needs_root_netns

OBJECTS = Path(__file__).parent / "scripts" / "objects.py"
WIRES = ("sealed", "signed")


def run(network: Network, root: Path, wire: str, size: int) -> tuple[list[int], str]:
    """A rank on each host, in one world of torch, to its end: exit codes, and what they wrote."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Command(
                    host.command([sys.executable, str(OBJECTS), str(size)]),
                    env={
                        "RANK": str(host.index),
                        "WORLD_SIZE": str(len(network)),
                        "MASTER_ADDR": network[0].address,
                        "MASTER_PORT": "29500",
                        "POTLUCK_HOME": str(root / str(host.index)),
                        "POTLUCK_PSK": PSK,
                        "POTLUCK_WIRE": wire,
                        "POTLUCK_USE_SHARED_MEMORY": "no",  # hosts share one kernel
                        "PYTHONUNBUFFERED": "1",
                    },
                )
            )
            for host in network
        ]
        codes = [rank.finish(180) for rank in ranks]
    return codes, "\n".join(rank.text for rank in ranks)


@pytest.mark.parametrize("wire", WIRES)
def test_a_pickle_that_was_rewritten_on_the_cable_never_runs(wire: str, tmp_path: Path) -> None:
    """torch's object collectives unpickle what a rank sent: only what a rank sent."""
    owned = tmp_path / "owned"
    with ExitStack() as stack:
        network = stack.enter_context(Network(2))
        man = stack.enter_context(man_on_the_cable(network, "rewrite", f"touch {owned}"))
        codes, words = run(network, tmp_path, wire, 900)
    assert not owned.exists(), words
    if wire == "sealed":  # he finds nothing to rewrite
        assert (man.num_changed, codes) == (0, [0, 0]), words
        assert words.count("all the same") == 2
    else:
        assert man.num_changed > 0
        assert all(codes), words
        assert "a record's tag is wrong: its bytes were changed" in words
        assert "PeerLost" in words
        assert "other" not in words


@pytest.mark.parametrize("wire", WIRES)
def test_a_bit_that_was_flipped_on_the_cable_ends_the_link(wire: str, tmp_path: Path) -> None:
    reasons = {
        "sealed": "DECRYPTION_FAILED_OR_BAD_RECORD_MAC",
        "signed": "a record's tag is wrong: its bytes were changed",
    }
    with ExitStack() as stack:
        network = stack.enter_context(Network(2))
        man = stack.enter_context(man_on_the_cable(network, "flip"))
        codes, words = run(network, tmp_path, wire, 1_000_000)
    assert man.num_changed == 1
    assert all(codes), words
    assert reasons[wire] in words
    assert "other" not in words


def test_a_run_has_readable_links_only_if_every_machine_allows_it(tmp_path: Path) -> None:
    script = tmp_path / "code" / "sum.py"
    script.parent.mkdir()
    script.write_text(
        "import os\n"
        "os.environ['POTLUCK_WIRE'] = 'signed'\n"  # counts for nothing: the agent's word does
        "import numpy as np, potluck\n"
        "ctx = potluck.init()\n"
        "print('sum', ctx.all_reduce(np.ones(1)).item(), flush=True)\n"
        "ctx.close()\n"
    )
    readable = "POTLUCK_WIRE=signed: links between workers are not encrypted"
    with ExitStack() as stack:
        network = stack.enter_context(Network(3))
        homes = tmp_path / "homes"
        ada, bob, carl = (
            stack.enter_context(Machine(host, homes, POTLUCK_WIRE=wire))
            for host, wire in zip(network, ("signed", "sealed", "signed"), strict=True)
        )
        form(ada, bob)
        with ada.run("--wire", "signed", script) as run:
            assert run.finish() != 0
            assert "can't run the job: its settings allow only encrypted links" in run.text
            assert "start potluck up there with POTLUCK_WIRE=signed" in run.text
            assert "bob" in run.text
            assert "sum" not in run.text
        with ada.run(script) as run:  # what ada allows is no request
            assert run.finish() == 0, run.text
            assert run.text.count("] sum 2.0") == 2
            assert readable not in run.text
        bob.down()
        form(ada, carl)
        with ada.run("--wire", "signed", script) as run:
            assert run.finish() == 0, run.text
            assert run.text.count("] sum 2.0") == 2
            assert run.text.count(readable) == 2
