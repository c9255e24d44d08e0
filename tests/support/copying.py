"""How long a plain copy takes on a link, beside which a fetch is measured."""

from __future__ import annotations

import sys

from support.commands import Command
from support.hosts import Host

_COPY = """
import socket, sys, time
listening, count = socket.create_server(("", 7000)), int(sys.argv[1])
print("listens", flush=True)
sock, began, left = listening.accept()[0], None, count
while left:
    left -= len(sock.recv(1 << 20))
    began = began or time.monotonic()
print("took", time.monotonic() - began, flush=True)
"""
_SEND = """
import socket, sys
sock, data = socket.create_connection((sys.argv[1], 7000)), bytes(1 << 20)
for _ in range(int(sys.argv[2]) >> 20):
    sock.sendall(data)
sock.recv(1)
"""


def wire_time(source: Host, target: Host, count: int) -> float:
    """Seconds that ``count`` bytes take over one plain connection."""
    with Command(target.command([sys.executable, "-c", _COPY, str(count)])) as receiving:
        receiving.wait_for("listens")
        words = [sys.executable, "-c", _SEND, target.address, str(count)]
        with Command(source.command(words)):
            return float(receiving.wait_for("took ", 60 + 4 * count / 25e6).split()[1])
