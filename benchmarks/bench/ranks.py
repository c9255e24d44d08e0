"""Groups of worker processes, driven through pipes, and the comparison of several of them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# float32 sums of up to 32 standard normal numbers: a few units in the last place, no more.
TOLERANCE = 1e-4


class Group:
    """The ranks of one peer, each a process of its own, all on loopback."""

    def __init__(self, role: str, world_size: int, script: Path, folder: Path) -> None:
        self.role = role
        self.world_size = world_size
        shared = {
            "POTLUCK_USE_WINDOWS": "0" if role == "potluck-tls" else "1",
            "BENCH_ROLE": role,
            "BENCH_STORE": f"file://{folder / 'gloo-store'}",
            "POTLUCK_HOME": str(folder / role),
            "POTLUCK_PSK": secrets.token_hex(32),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for rank in range(world_size)
        ]

    @classmethod
    @contextlib.contextmanager
    def all_of(cls, roles: Sequence[str], world_size: int, script: Path) -> Iterator[list[Group]]:
        """Start a group per role, wait until all are ready, end them all on the way out."""
        with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
            groups = [cls(role, world_size, script, Path(folder)) for role in roles]
            try:
                for group in groups:
                    ready = group.answers()
                    assert [answer["rank"] for answer in ready] == list(range(world_size))
                yield groups
                for group in groups:
                    group.tell("end")
                    for rank in group.ranks:
                        rank.wait(timeout=30)
            finally:
                for group in groups:
                    group.kill()

    def tell(self, command: str) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(command + "\n")
            rank.stdin.flush()

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Send a command to all ranks; their answers in rank order."""
        self.tell(command)
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        found = []
        for number, rank in enumerate(self.ranks):
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise SystemExit(f"{self.role}: rank {number} ended early (its error is above)")
            found.append(json.loads(line))
        return found

    def seconds_per_call(self, nbytes: int, calls: int) -> float:
        return float(max(a["seconds"] for a in self.ask(f"time {nbytes} {calls}"))) / calls

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def compare(groups: Sequence[Group], nbytes: int, *, rounds: int, seconds: float) -> dict[str, Any]:
    """One row of the table: check each group, then time them in turns."""
    row: dict[str, Any] = {"nbytes": nbytes, "world_size": groups[0].world_size}
    calls = {}
    for group in groups:
        checks = group.ask(f"check {nbytes}")
        error = max(answer["max_error"] for answer in checks)
        same = len({answer["digest"] for answer in checks}) == 1
        row[group.role] = {"max_error": error, "same_bits": same, "samples_s": []}
        row[group.role]["correct"] = error < TOLERANCE and same
        warm = min(group.seconds_per_call(nbytes, 3) for _ in range(2))
        calls[group.role] = max(1, round(seconds / warm))
    for number in range(rounds):
        # Who goes first alternates too: whoever comes second finds a warmer machine.
        for group in groups if number % 2 == 0 else groups[::-1]:
            sample = group.seconds_per_call(nbytes, calls[group.role])
            row[group.role]["samples_s"].append(sample)
    for group in groups:
        row[group.role]["calls_per_round"] = calls[group.role]
        row[group.role]["median_s"] = statistics.median(row[group.role]["samples_s"])
    return row


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
