"""``python -m potluck._core.backends.debugged SCRIPT ARGS`` or ``-m MODULE ARGS``: a rank of
``potluck run --debug-rank``, whose script runs under debugpy.

debugpy listens on 127.0.0.1 only: whoever connects may run any code in the rank. As long as a
client is connected, the other ranks wait (``engine/patience.py``); before the rank has a link to
its agent, that agent sees to it (``cluster/jobs/local_runner.py``). debugpy's adapter, a process of
its own, lets the script go on when the client is lost, and ends after both.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path

from potluck._core.background import start_thread
from potluck._core.engine import patience
from potluck._core.optional import require
from potluck._core.waiting import to_stderr
from potluck.errors import MissingDependency

_WAIT_S = 600.0


def main() -> None:
    """Wait for a client, for 10 minutes at most, then run the script as Python does."""
    try:
        debugpy = require("debugpy", "debug", ", or name debugpy among what the script needs")
    except MissingDependency as error:
        sys.exit(f"potluck: --debug-rank: {error}")
    debugpy.configure(subProcess=False)
    port = debugpy.listen(("127.0.0.1", 0))[1]
    patience.has_client = debugpy.is_client_connected
    sys.breakpointhook = debugpy.breakpoint
    is_module, sys.argv = sys.argv[1] == "-m", sys.argv[1:]
    folder = os.getcwd() if is_module else str(Path(sys.argv[0]).resolve().parent)
    to_stderr(
        f"debugpy waits for a client on 127.0.0.1:{port} of this machine, for {_WAIT_S / 60:g} "
        f"minutes, and the other ranks wait. From another machine: ssh -L {port}:127.0.0.1:{port} "
        f"MACHINE. For pathMappings: the script lies in {folder}"
    )
    came = threading.Event()

    def give_up() -> None:
        if not came.wait(_WAIT_S):
            debugpy.wait_for_client.cancel()

    start_thread(give_up, name="potluck-no-debugger", on_broken=lambda _: None)
    debugpy.wait_for_client()
    came.set()
    if not debugpy.is_client_connected():
        to_stderr("no client of debugpy came; the script begins")
    if is_module:
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, folder)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
