"""However a script ends, its exit code is its own: potluck's threads never abort the process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from potluck._core import native

pytestmark = pytest.mark.real_exec  # nothing of an interpreter but what the script makes

PATIENCE_S = 200.0

LATE = """
import sys, threading, time
from potluck._core import native

{prepare}

class Lingers:
    def __del__(self):
        time.sleep(1.0)  # what is left of the interpreter lasts longer than the native call

keep = Lingers()
sys.modules["lingers"] = keep  # goes with the modules, after the daemon threads are shut out
threading.Thread(target=lambda: {call}, daemon=True).start()
time.sleep(0.1)
sys.exit(7)
"""

NATIVE_CALLS = {
    "events of a loop": (
        "loop = native.core.ProgressLoop(1, 0, 2, 1 << 19, 1 << 21)",
        "loop.events(0.5)",
    ),
    "an operation's end": (
        "loop = native.core.ProgressLoop(1, 0, 2, 1 << 19, 1 << 21); ticket = loop.ticket(1)",
        "ticket.wait(0.5)",
    ),
    "a measurement of shared memory": ("", "[native.core.shm_costs() for _ in range(1000)]"),
}


@pytest.mark.skipif(not native.available, reason="about calls of the native core")
@pytest.mark.parametrize("which", NATIVE_CALLS)
def test_a_thread_in_a_native_call_does_not_abort_an_interpreter_that_ends(which: str) -> None:
    prepare, call = NATIVE_CALLS[which]
    script = LATE.format(prepare=prepare, call=call)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (7, "")


PAIR = """
import os, signal, sys, threading, time
import numpy as np
from potluck._core.backends.discovery import AutoDiscoveryBackend
from potluck._core.cluster.discovery.configured import StaticPeers
from potluck._core.context import DistributedContext
from potluck.errors import PotluckError

kind, port = sys.argv[1], int(sys.argv[2])
finders = [StaticPeers([("127.0.0.1", port)])] if port else []
backend = AutoDiscoveryBackend(world_size=2, finders=finders, port=0)
print(backend.port, flush=True)
context = DistributedContext(backend, timeout_s=60)
assert context.all_reduce(np.ones(100_000), op="sum")[0] == 2

def work_to_the_end():
    try:
        while True:
            context.all_reduce(np.ones(1000))
    except PotluckError:
        pass

if kind == "leaves in order" and context.rank == 1:
    try:
        while True:
            context.barrier()
    except PotluckError as error:
        sys.exit(7 if "it left the group" in str(error) else repr(error))
if kind == "raises":
    raise RuntimeError("the script's own")
if kind == "exits in a thread":
    threading.Thread(target=sys.exit, args=(3,)).start()
if kind in ("loses its peer", "aborts"):
    # Rank 1 has left the first all_reduce when it sends, and catches what comes from here on.
    try:
        if context.rank == 1:
            context.send(np.ones(1), 0)
        else:
            context.recv(np.ones(1), 1)
            if kind == "aborts":
                threading.Timer(0.2, context.abort, [RuntimeError("enough")]).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
    except PotluckError:
        pass
    work_to_the_end()
if kind == "closes":
    context.close()
if kind == "leaves a call behind":
    never = lambda: context.recv(np.ones(9), 1 - context.rank)
    threading.Thread(target=never, daemon=True).start()
if kind == "drops what it has":
    if context.rank == 1:
        context.send(np.ones(1), 0)
        work_to_the_end()
    else:
        context.recv(np.ones(1), 1)
    del context, backend
sys.exit(7)
"""

CODES = {
    "raises": 1,
    "exits in a thread": 7,
    "loses its peer": 7,
    "aborts": 7,
    "closes": 7,
    "does not close": 7,
    "leaves in order": 7,
    "leaves a call behind": 7,
    "drops what it has": 7,
}


def ended(kind: str) -> tuple[list[int], str]:
    """The exit codes of two processes that train together and end like ``kind``, and what they
    wrote to stderr."""

    def start(port: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PAIR, kind, str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start(0)
    assert first.stdout is not None
    second = start(int(first.stdout.readline()))
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in (first, second)]
    return sorted([first.returncode, second.returncode]), "".join(said)


@pytest.mark.parametrize("kind", CODES)
def test_a_script_ends_with_its_own_code(kind: str) -> None:
    codes, said = ended(kind)
    assert codes == expected(kind), said
    assert "terminate called" not in said


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_hundred_exits_end_with_the_script_s_own_code() -> None:
    rounds = 200 // (2 * len(CODES)) + 1
    for _ in range(rounds):
        for kind in CODES:
            codes, said = ended(kind)
            assert codes == expected(kind), (kind, said)


def expected(kind: str) -> list[int]:
    lost = -signal.SIGKILL if kind == "loses its peer" else CODES[kind]
    return sorted([CODES[kind], lost])
