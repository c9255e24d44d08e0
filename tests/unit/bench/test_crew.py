"""A crew waits for answers as long as what is asked may take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from potluck.cli.bench.crew import Crew
from potluck.cli.bench.peers import PEERS
from potluck.cli.bench.placement import BenchError

_WORKER = """
import os, sys
from potluck.cli.bench.crew import Channel
channel = Channel.connect(
    os.environ["BENCH_ADDRESS"], token=os.environ["BENCH_TOKEN"],
    rank=int(os.environ["RANK"]), world_size=2,
)
while (message := channel.receive())["do"] != "end":
    if message["do"] == "add":
        channel.send(sum=message["one"] + message["other"])
"""


def test_a_task_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    program = (sys.executable, str(script))
    with Crew(PEERS["potluck"], 2, tmp_path, program=program) as crew:
        crew.join()
        assert [each["sum"] for each in crew.ask("add", one=1, other=2)] == [3, 3]
        assert crew.ask("add", timeout_s=60.0, one=2, other=2)[1]["sum"] == 4
        with pytest.raises(BenchError, match=r"gave no answer within 0\.1 s \(asked to sleep\)"):
            crew.ask("sleep", timeout_s=0.1)
