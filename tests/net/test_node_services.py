"""The programs of docs/services.md on machines of their own: found by agents, called, killed."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from potluck._core.system import SIGKILL
from support.clusters import found_cluster
from support.commands import Command
from support.machines import PSK, WAIT_S, Machine, cluster_of, form

pytestmark = pytest.mark.needs_root_netns

PAGE = Path(__file__).parents[2] / "docs" / "services.md"
SERVE, LOOK = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
ORDERS = """
import sys, potluck
with potluck.NodeServices(timeout_s=60.0) as services:
    images = services.connect("images")
    for number, line in enumerate(sys.stdin):
        try:
            images.batch(0, 1)
            print("call", number, "is answered", flush=True)
        except potluck.errors.PotluckError as error:
            print("call", number, "failed:", type(error).__name__, error, flush=True)
"""


def program(machine: Machine, script: Path, *, orders: bool = False) -> Command:
    command = machine.host.command([sys.executable, str(script)])
    return Command(command, env=machine.environment, orders=orders)


def test_the_programs_of_the_page_find_each_other_and_a_ban_parts_them(tmp_path: Path) -> None:
    scripts = {"serve.py": SERVE, "look.py": LOOK, "orders.py": ORDERS}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    with cluster_of(3, tmp_path / "homes", psk="") as machines:
        found_cluster(*(each.home for each in machines), psk=bytes.fromhex(PSK))
        ada, bob, carl = machines
        form(*machines)
        with (
            program(ada, tmp_path / "serve.py") as server,
            program(bob, tmp_path / "orders.py", orders=True) as caller,
        ):
            server.wait_for(f"potluck: serving 'images' on ada ({ada.id}), port ")
            with program(carl, tmp_path / "look.py") as look:
                assert look.finish() == 0, look.text
                assert look.lines == [f"<Remote 'images' on node ada ({ada.id})> (64, 28, 28) True"]
            [found] = json.loads(carl.runs("services", "--json").stdout)["services"]
            assert (found["machine"], found["methods"]) == ("ada", ["batch"])
            caller.order("call")
            caller.wait_for("call 0 is answered")

            assert ada.runs("ban", "bob", "--yes").returncode == 0
            caller.order("call")
            caller.wait_for("call 1 failed: ServiceLost")
            caller.order("call")
            caller.wait_for("call 2 failed: ServiceLost")

            server.signal(signal.SIGINT)
            assert server.finish() == 0, server.text
        with program(ada, tmp_path / "serve.py") as server:
            server.wait_for("potluck: serving 'images'")
            server.signal(SIGKILL)
            server.finish()
        deadline = time.monotonic() + WAIT_S
        while "No program serves anything" not in (shown := carl.runs("services").stdout):
            assert time.monotonic() < deadline, shown
