"""One worker that is no member of the server's group: pushes without end, or serves until killed.

Arguments: ``push HOST:PORT NODE`` or ``serve``. The cluster's secret is in the environment.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

import potluck
from potluck._core.backends.service_transport import TcpServiceTransport
from potluck._core.backends.tcp import TcpBase
from potluck._core.settings import load_settings
from potluck._core.types import Group, Member
from potluck.services import Services


@potluck.service("slow", concurrent=True)
def wait(call: potluck.Call) -> None:
    """Never returns; says when it was called."""
    print("called\n", end="", flush=True)  # one write: four threads print
    threading.Event().wait()


def main() -> None:
    settings = load_settings()
    base = TcpBase("127.0.0.1", 0, settings)
    me = Member("me", base.credentials.node_id, "127.0.0.1", base.port)
    members = [Member("server", port=0), me]
    if sys.argv[1] == "push":
        host, _, port = sys.argv[2].rpartition(":")
        members[0] = Member("server", sys.argv[3], host, int(port))
    group = Group(1, 1, tuple(members), job="job")
    access = Services(
        TcpServiceTransport(base.switchboard), lambda: group, timeout_s=60, max_bytes=1 << 30
    )
    if sys.argv[1] == "serve":
        access.serve(wait)
        print(f"serving at {base.port} on {base.credentials.node_id}", flush=True)
        threading.Event().wait()
    sink = access.connect("sink", 0, 60.0)
    array = np.ones(32 << 20, np.uint8)
    while True:
        print("pushing", flush=True)
        sink.push(array)


main()
