"""A man on the cable between two hosts, who copies Ethernet frames and changes some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from support.bridge import BridgeProgram
from support.hosts import INTERFACE, Network

_SCRIPT = Path(__file__).parents[1] / "net" / "scripts" / "man_on_the_cable.py"
# Each frame with a checksum of its own, and no longer than a cable's. (ethtool, where it is not.)
_OFFLOADS_OFF = """
import fcntl, socket, struct, sys, array
with socket.socket() as sock:
    for command in (0x17, 0x1F, 0x24, 0x2C):  # sums when sending; TSO, GSO, GRO
        value = array.array("I", [command, 0])
        request = struct.pack("16sP", sys.argv[1].encode(), value.buffer_info()[0])
        fcntl.ioctl(sock, 0x8946, request)
"""


class ManOnTheCable:
    """``num_changed``: how many frames he changed, once he is gone."""

    num_changed = -1


@contextlib.contextmanager
def man_on_the_cable(network: Network, mode: str, command: str = "") -> Iterator[ManOnTheCable]:
    """He sits between the two hosts of ``network``; ``mode`` and ``command`` as in his script."""
    for host in network:
        host.run(["python3", "-c", _OFFLOADS_OFF, INTERFACE])
        network.ip("link", "set", host.port, "nomaster")
    ports = [host.port for host in network]
    program = BridgeProgram(network, _SCRIPT.read_text(), *ports, mode, command, ready="copying")
    man = ManOnTheCable()
    try:
        yield man
        said = program.finish()
        man.num_changed = int(said.split("changed ")[1].split()[0])
    finally:
        program.kill()
