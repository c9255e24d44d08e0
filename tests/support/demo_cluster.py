"""``make demo-cluster``: three hosts on this machine train one model, one is cut off and returns.

Each host is a network namespace with a cable to the others, and runs ``potluck up`` with a home of
its own; nothing tells them of each other. The command that trains is the one a person would give.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.commands import potluck_command
from support.hosts import missing
from support.machines import Machine, cluster_of, form

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
CUT_AT = 60
"""The step at which a host's cable is pulled."""
WAIT_S = 120.0


def main() -> int:
    """The exit code of the training, or 1 where hosts can't be made."""
    why = missing()
    if why:
        print(f"potluck: this demo {why}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="potluck-demo-") as folder,
        cluster_of(3, Path(folder)) as machines,
    ):
        print("$ potluck up     (on each of three hosts, which know nothing of each other)")
        began = time.monotonic()
        ada, _, carl = machines
        form(*machines)
        print(f"{ada.command.lines[-1]}\nthey found each other in {time.monotonic() - began:.1f} s")
        print(f"\nada$ potluck run {SCRIPT.name}     (at step {CUT_AT} carl's cable is pulled)")
        sys.stdout.flush()
        return train(ada, carl)


def train(starter: Machine, other: Machine) -> int:
    """Run the example from ``starter``, with the terminal its own; pull the cable of ``other``
    meanwhile, until the rest goes on without it."""
    command = starter.host.command([*potluck_command(), "run", str(SCRIPT)])
    with subprocess.Popen(command, env=starter.variables) as run:
        if wait(run, starter, lambda job: job["step"] >= CUT_AT):
            other.cut()
            wait(run, starter, lambda job: world(job) == 2)
            other.heal()
        return run.wait()


def world(job: dict[str, Any]) -> int:
    """How many workers are in the job's group."""
    return sum(worker["rank"] >= 0 for worker in job["workers"])


def wait(
    run: subprocess.Popen[bytes], machine: Machine, happened: Callable[[dict[str, Any]], bool]
) -> bool:
    """Look at the job until it ends (False), or ``happened``, or ``WAIT_S`` have passed."""
    deadline = time.monotonic() + WAIT_S
    while run.poll() is None and time.monotonic() < deadline:
        if any(happened(job) for job in machine.status()["jobs"]):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
