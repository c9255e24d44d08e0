"""A stranger on the network attacks an agent, while another one starts. No job."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from support.commands import Command
from support.figures import Figures
from support.hosts import Network
from support.machines import agreed, form, machines, marks

pytestmark = pytest.mark.needs_root_netns

ATTACK = Path(__file__).parent / "scripts" / "attack.py"
PAGE = "security"


def test_a_flood_a_scan_and_a_crowd_cost_little_and_keep_nobody_out(
    figures: Figures, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """10,000 forged adverts with --long, else 2,000."""
    count = 10_000 if request.config.getoption("--long") else 2_000
    with Network(3) as network, machines(network, tmp_path) as (ada, bob, mallory):
        form(ada)
        before, since = ada.resident_bytes(), marks([ada])
        attack = [sys.executable, str(ATTACK), ada.host.address, str(count)]
        with Command(mallory.host.command(attack)) as attacker:
            began = attacker.when("begins")
            attacker.wait_for("half of the flood")
            bob.start()
            bob.wait_until_up()
            found = -time.monotonic() + agreed(ada, bob, since=since | {bob: 0})
            assert attacker.finish() == 0
        lines = [line for line in ada.command.lines[since[ada] :] if line[:8] != "potluck:"]
        seconds = time.monotonic() - began
        grown = (ada.resident_bytes() - before) / (1 << 20)
    fault = f"{count:,} forged adverts by mDNS and beacon, port scan, HTTP and junk, lengths of "
    fault += "4 GiB, 500 idle connections"
    figures.take(fault, "a real peer is in one view after", found, asked=3.0, page=PAGE)
    figures.take(fault, "the agent grows by", grown, asked=64, unit="MiB", page=PAGE)
    rate = (len(lines) - 1) / seconds  # the first is due at once
    figures.take(fault, "log lines:", round(rate, 2), asked=1, unit="a second", page=PAGE)
    assert lines, "it is told to the person at the machine"
