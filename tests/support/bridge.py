"""A program beside a network's bridge, where the cables of all hosts end."""

from __future__ import annotations

import subprocess
import sys

from support.hosts import Network


class BridgeProgram:
    """``script`` in an interpreter of its own, once it has printed the line ``ready``."""

    def __init__(self, network: Network, script: str, *arguments: str, ready: str) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", network.bridge, sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{ready}\n"

    def go_on(self) -> None:
        """Tell it to go on, by a line."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def finish(self) -> str:
        """Tell it to end, by a line, and wait until it did; what it said since it was ready."""
        return self._process.communicate("\n", timeout=60)[0]

    def kill(self) -> None:
        """End it, if it still runs."""
        self._process.kill()
        self._process.communicate()
