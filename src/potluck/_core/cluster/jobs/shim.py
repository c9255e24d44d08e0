"""Runs as a script of its own, for some milliseconds, and becomes the worker.

``python shim.py AGENT_PID ORDERS COMMAND...``: asks the system to kill this process when its agent
dies, puts it under the limits in ``ORDERS`` (JSON of ``Confinement.orders``), then executes COMMAND
in its place, where all of that still holds. It can't be done between fork and exec in the agent
itself, where other threads may hold locks.

In a sandbox this script runs twice: outside it becomes the sandbox's own command, which starts
``python shim.py inside COMMAND...``. The variables that the job's sender gave come last, so that
none of them (LD_PRELOAD) acts before the limits and the sandbox do.
"""

import json
import os
import signal
import sys

GIVEN = "POTLUCK_GIVEN"
"""The variable with the sender's variables, as JSON."""

_TYPED = {"POTLUCK_TYPED"}
"""``worker_link.TYPED``, which lacks the process id that only this process knows: in a sandbox it
is another one."""
_PR_SET_PDEATHSIG = 1
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def main() -> None:
    if sys.argv[1] == "inside":
        become(sys.argv[2:], _SIGNALS)
    agent_pid, orders, command = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:
        sys.exit(1)  # it died before we asked
    sandbox = orders.pop("sandbox", None)
    try:
        confine(**orders)
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"potluck: this worker can't be held to the owner's limits {orders}: {error}")
    if sandbox is None:
        become(command, _SIGNALS[:1])
    for name in _SIGNALS:
        # Signals go to all processes of a worker. The sandbox waits for the script that has them.
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    inside = [sys.executable, "-I", "-S", os.path.abspath(__file__), "inside"]
    os.execv(sandbox[0], [*sandbox, *inside, *command])


def confine(cgroup: str = "", nice: int = 0, cpus: tuple[int, ...] = (), data: int = 0) -> None:
    """Put this process under these limits, for good; OSError or ValueError if that fails."""
    if sys.platform == "win32":
        return
    if cgroup:
        with open(f"{cgroup}/cgroup.procs", "w") as file:
            file.write("0")
    if nice:
        os.nice(nice)
    if cpus and sys.platform == "linux":
        os.sched_setaffinity(0, cpus)
    if data:
        import resource

        # Private memory that can be written to. RLIMIT_AS would count what CUDA reserves, too:
        # tens of gigabytes of addresses without memory.
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))


def become(command: list[str], signals: tuple[str, ...]) -> None:
    """Execute ``command`` in the place of this process, where these ``signals`` work as usual."""
    for name in signals:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    given = json.loads(os.environ.pop(GIVEN, "{}"))
    typed = {name: f"{os.environ[name]}:{os.getpid()}" for name in _TYPED & os.environ.keys()}
    os.execvpe(command[0], command, {**os.environ, **given, **typed})


if __name__ == "__main__":
    main()
