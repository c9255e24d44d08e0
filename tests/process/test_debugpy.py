"""``potluck run --debug-rank``: a rank under debugpy, and a client of its protocol."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from support.commands import Command, potluck_command

pytest.importorskip("debugpy")

DEADLINE_S = 120.0

SCRIPT = """
import numpy as np, potluck
secret = 21
ctx = potluck.init()
print("begins", ctx.rank, ctx.world_size, flush=True)
total = ctx.all_reduce(np.array([float(secret)]))
print("counted", int(total[0]), flush=True)
ctx.close()
"""


class Client:
    """A client of the Debug Adapter Protocol."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self._file = self._socket.makefile("rb")
        self._num_sent = 0

    def send(self, command: str, **arguments: Any) -> int:
        self._num_sent += 1
        asked = {"seq": self._num_sent, "type": "request", "command": command}
        body = json.dumps(asked | {"arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self._num_sent

    def _read(self) -> dict[str, Any]:
        length = 0
        while line := self._file.readline().strip():
            length = int(line.partition(b":")[2])
        assert length, "the adapter has hung up"
        return dict(json.loads(self._file.read(length)))

    def event(self, name: str) -> dict[str, Any]:
        """The body of the next event ``name``."""
        while (message := self._read()).get("event") != name:
            pass
        return dict(message["body"] or {}) if "body" in message else {}

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The body of the response."""
        number = self.send(command, **arguments)
        while (message := self._read()).get("request_seq") != number:
            pass
        assert message["success"], message
        return dict(message.get("body") or {})

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def test_a_rank_is_debugged_before_and_after_its_group_forms_while_the_others_wait(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    options = ["run", "--plain", "-n", "2", "--debug-rank", "0", "--wait", "1"]
    options += ["--peer-timeout", "3", str(path)]
    with Command([*potluck_command(), *options], cwd=tmp_path) as run:
        line = run.wait_for("debugpy waits for a client")
        assert re.search(r"\[ ?0\]", line)
        port = re.search(r"127\.0\.0\.1:(\d+) of this machine", line)
        assert port
        client = Client(int(port[1]))
        client.ask("initialize", adapterID="test", pathFormat="path")
        client.send("attach", justMyCode=True)
        client.event("initialized")
        lines = [{"line": 3}, {"line": 6}]
        made = client.ask("setBreakpoints", source={"path": str(path)}, breakpoints=lines)
        assert [each["verified"] for each in made["breakpoints"]] == [True, True]
        client.send("configurationDone")
        for number in (3, 6):
            thread = client.event("stopped")["threadId"]
            frame = client.ask("stackTrace", threadId=thread)["stackFrames"][0]
            assert (frame["line"], Path(frame["source"]["path"]).name) == (number, "train.py")
            until = time.monotonic() + 5  # longer than --wait and --peer-timeout
            while time.monotonic() < until:
                seen = client.ask("evaluate", expression="6 * 7", frameId=frame["id"])
                assert seen["result"] == "42"
            client.send("continue", threadId=thread)
        client.send("disconnect")
        assert run.finish() == 0, run.text
        client.close()
    assert run.text.count("begins 0 2") == run.text.count("begins 1 2") == 1
    assert run.text.count("counted 42") == 2


def test_a_rank_that_the_job_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    options = ["run", "-n", "2", "--debug-rank", "2", "train.py"]
    with Command([*potluck_command(), *options], cwd=tmp_path) as run:
        assert run.finish() == 2
    assert "--debug-rank 2: the highest rank is 1, with --workers 2" in " ".join(run.text.split())
