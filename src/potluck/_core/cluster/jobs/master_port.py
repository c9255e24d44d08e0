"""``MASTER_PORT`` of a job: for scripts that use torch.distributed by themselves. potluck does not
use it."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(20_000, 32_768)
"""Systems give none of these to programs that ask for any port: they begin at 32768 on Linux, at
49152 on macOS and Windows. A script listens seconds after its port was chosen."""
_NUM_TRIES = 64


def free_port() -> int:
    """A port on which nobody listens, at any IPv4 address of this machine: of ``_PORTS``, or any if
    all that were tried are taken. OSError if there is none."""
    for port in (*random.SystemRandom().sample(_PORTS, _NUM_TRIES), 0):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("", port))
            found: int = sock.getsockname()[1]
            return found
    raise OSError("this machine has no free port")
