"""Accepting connections in an asyncio loop, without the race of ``loop.sock_accept``.

A cancelled ``sock_accept`` may have accepted already, and then loses the connection it got.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from potluck.transport.rate import RateLimitedLog

_PAUSE_S = 0.1
_BURST = 64


class Door:
    """Hands each connection that arrives at ``sock`` (listening, non-blocking) to ``arrived``."""

    def __init__(
        self,
        sock: socket.socket,
        arrived: Callable[[socket.socket, str], None],
        complain: RateLimitedLog,
    ) -> None:
        self._sock = sock
        self._arrived = arrived
        self._complain = complain
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._open()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._resume is not None:
            self._resume.cancel()
        with contextlib.suppress(ValueError):  # closed already
            self._loop.remove_reader(self._sock)
        self._sock.close()

    def _open(self) -> None:
        self._resume = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_BURST):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, most likely
                self._complain.warning(f"can't accept connections: {error}")
                self._loop.remove_reader(self._sock)
                self._resume = self._loop.call_later(_PAUSE_S, self._open)
                return
            sock.setblocking(False)
            self._arrived(sock, f"{address[0]}:{address[1]}")
