"""Federated learning on a cluster: what crosses the cables, and what reaches other machines."""

from __future__ import annotations

import json
import random
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from potluck._core.cluster.content.shelf import Shelf
from support.commands import Command, potluck_command
from support.machines import cluster_of, form
from support.sniffer import Sniffer

pytestmark = pytest.mark.needs_root_netns

MARKER = b"PATIENT-0042-HAS-A-SECRET"
DATA_BYTES = 32 << 20
"""Much more than a federation sends, and than one measurement of a link (about 5 MiB in each
direction). What cables carry is encrypted, and the data can't be compressed below a half: data that
left its machine would show in the number of bytes."""
SERVER = """
import numpy as np
from potluck import federated
from potluck.federated import Patience

@federated.server
def main(federation):
    patience = Patience(min_clients=3, deadline=60.0)
    history = federation.run([np.zeros(2)], rounds=4, patience=patience)
    print("result", history.parameters[0][0], flush=True)
"""
CLIENT = """
import os
from potluck import federated
import reading

@federated.client
def train(parameters, config):
    rows = reading.rows(federated.site().data_dir)
    print("rows", rows[:7], flush=True)
    if config["round"] == 2 and federated.site().client == "2":
        raise ValueError(f"a bad row: {rows[0]}")
    if config["round"] == 3 and federated.site().client == "3":
        os.kill(os.getpid(), 9)
    return federated.Update([each + len(rows) for each in parameters], len(rows))
"""
READING = "def rows(folder):\n    return (folder / 'patients.csv').read_text().split()\n"


def test_the_data_stays_where_it_is(tmp_path: Path) -> None:
    code, data = tmp_path / "code", tmp_path / "data"
    code.mkdir()
    data.mkdir()
    noise = random.Random(1).randbytes(DATA_BYTES // 2).hex().encode()
    (data / "patients.csv").write_bytes(b"\n".join([*[MARKER] * 6, noise]))
    (code / "export.csv").write_bytes(MARKER)  # a file of the folder that nobody named
    for name, text in (("server", SERVER), ("client", CLIENT), ("reading", READING)):
        (code / f"{name}.py").write_text(text)
    out = tmp_path / "out.json"
    with cluster_of(3, tmp_path / "homes") as machines, ExitStack() as stack:
        ada = machines[0]
        form(*machines)
        sniffers = [stack.enter_context(Sniffer(each.host, tmp_path)) for each in machines]
        words = ["--min-nodes", "3", "--data-dir", str(data), "--json", str(out)]
        files = [str(code / "server.py"), "--clients", str(code / "client.py")]
        command = [*potluck_command(), "federated", "run", *words, *files]
        with Command(ada.host.command(command), env=ada.environment) as run:
            assert run.finish() == 0, run.text
            said = run.text
        assert "result 28.0" in said, said
        assert re.search(r"without client 2 on (ada|bob|carl): ValueError", said), said
        captures = [each.stop() for each in sniffers]
        assert all(capture.num_frames > 100 for capture in captures)
        # Nodes that measure their link send as many bytes in both directions, unless a job that
        # starts ends the measurement after its first direction.
        one_way = [
            abs(len(data) - len(capture.streams.get((*stream[2:], *stream[:2]), b"")))
            for capture in captures
            for stream, data in capture.streams.items()
        ]
        assert 0 < max(one_way) < DATA_BYTES / 4, one_way
        assert not any(MARKER in capture.everything for capture in captures)
        assert MARKER.decode() not in said
        assert MARKER not in out.read_bytes()
        for machine in machines:
            shelf = Shelf(machine.home / "content" / "code")
            packages = [shelf.package(kept.package) for kept in shelf.packages()]
            sent = {file.path for each in packages if each for file in each.manifest.files}
            assert sent == {"federated-server.py", "server.py", "client.py", "reading.py"}
            folders = (machine.home / "code_store", machine.home / "content")
            stored = [path for each in folders for path in each.rglob("*") if path.is_file()]
            code_files = [path for path in stored if path.suffix != ".log"]
            assert not any(MARKER in path.read_bytes() for path in code_files)
        logs = [
            path.read_bytes()
            for machine in machines
            for path in (machine.home / "code_store").rglob("client-*.log")
        ]
        assert len(logs) == 3
        # The owner of the machine sees the whole.
        assert sum(b"a bad row: " + MARKER in log for log in logs) == 1
    rounds = json.loads(out.read_text())["runs"][0]["rounds"]
    assert [len(each["arrived"]) for each in rounds] == [3, 2, 2, 3]
    assert rounds[1]["missing"]["2"].startswith("ValueError (at client.py:")
