"""Ranks with and without the native core in one world: all know of it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.commands import Command, potluck_command
from support.ports import reserved_ports

SCRIPT = str(Path(__file__).parent / "scripts" / "mixed_engines.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MIXED = "native,python python [3.0, 3.0, 3.0]"

pytest.importorskip("potluck._core._native")
pytestmark = pytest.mark.real_exec  # the script chooses its engine before it imports potluck


@pytest.mark.parametrize(
    "start", [[*potluck_command(), "run", "-n", "2"], TORCHRUN], ids=["potluck-run", "torchrun"]
)
def test_the_engines_of_ranks_that_a_launcher_started(start: list[str]) -> None:
    with Command([*start, SCRIPT], env={"OMP_NUM_THREADS": "1"}) as run:
        assert run.finish() == 0, run.text
        assert run.text.count(MIXED) == 2, run.text


def test_the_engines_of_processes_that_found_each_other() -> None:
    with ExitStack() as stack:
        [port] = map(str, stack.enter_context(reserved_ports(1)))
        environment = {
            "POTLUCK_MIN_PEERS": "1",
            "POTLUCK_DISCOVERY": "static",
            "POTLUCK_PEERS": f"127.0.0.1:{port}",
            "OMP_NUM_THREADS": "1",
        }
        runs = []
        for which in ("with", "without"):
            first = {"POTLUCK_GRADIENT_PORT": port if which == "with" else "0"}
            command = Command([sys.executable, SCRIPT, which], env=environment | first)
            runs.append(stack.enter_context(command))
        for run in runs:
            assert run.finish() == 0, run.text
            engines, slowest, sums = run.text.splitlines()[-1].split(" ", 2)
            assert sums == "[3.0, 3.0, 3.0]"
            assert sorted(engines.split(",")) == ["native", "python"]
            assert slowest == "python"
