"""Runs as a script of its own, for some milliseconds, and becomes the worker.

``python shim.py AGENT_PID COMMAND...``: asks the system to kill this process when its agent dies,
makes SIGINT work again where it was ignored (background jobs of a shell), then executes COMMAND in
its place. The wish to die with the agent survives that. It can't be asked for between fork and
exec in the agent itself, where other threads may hold locks.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    agent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:
        sys.exit(1)  # it died before we asked
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
