"""Runs as a script of its own, for some milliseconds, and becomes the worker.

``python shim.py AGENT_PID LIMITS COMMAND...``: asks the system to kill this process when its agent
dies, makes SIGINT work again where it was ignored (background jobs of a shell), puts this process
under ``LIMITS`` (JSON of ``Confinement.orders``), then executes COMMAND in its place, where all of
that still holds. It can't be done between fork and exec in the agent itself, where other threads
may hold locks.
"""

import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    agent_pid, limits, command = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:
        sys.exit(1)  # it died before we asked
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        confine(**limits)
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"potluck: this worker can't be held to the owner's limits {limits}: {error}")
    os.execvp(command[0], command)


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


if __name__ == "__main__":
    main()
