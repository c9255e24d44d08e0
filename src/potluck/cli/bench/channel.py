"""The control channel between a comparison and its workers: lines of JSON over a blocking socket.

mpirun forwards stdin to rank 0 only, so stdin can't be used. A Unix socket reaches into other
network namespaces, and other users can't open it; on Windows it is a TCP socket on the loopback. In
both cases a worker must send the token that was put into its environment.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from potluck._core.system import need_posix

_HELLO_S = 10.0
_LOOK_S = 0.2


class ChannelClosed(Exception):
    """The other end closed the channel, or its process ended."""


class Channel:
    """One end of a control channel."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""

    @classmethod
    def connect(cls, address: str, **hello: Any) -> Channel:
        """The worker's end, connected to a listener's ``address``; ``hello`` is its first
        message."""
        kind, _, where = address.partition(":")
        if kind == "unix":
            need_posix("a Unix socket")
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(where)
        else:
            sock = socket.create_connection(("127.0.0.1", int(where)))
        channel = cls(sock)
        channel.send(**hello)
        return channel

    def send(self, **message: Any) -> None:
        """Send one message; ChannelClosed if the other end is closed."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. ChannelClosed at the end of the channel; TimeoutError if no message is
        complete after ``timeout_s`` seconds (None: wait without a limit)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(0.001, deadline - time.monotonic())
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:  # an OSError, too
                raise
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the other end closed it")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._socket.close()


class WorkerListener:
    """The socket that the workers of one peer connect to. ``address`` and ``token`` go into their
    environment."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(16)
        if sys.platform != "win32":
            path = folder / f"{secrets.token_hex(4)}.sock"
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(str(path))
            self._socket.listen(64)
            self.address = f"unix:{path}"
        else:
            self._socket = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp:{self._socket.getsockname()[1]}"

    def gather(
        self, ranks: Sequence[int], timeout_s: float, check: Callable[[], None]
    ) -> list[tuple[Channel, dict[str, Any]]]:
        """Accept the workers of ``ranks``: the channel and the first message of each, in that
        order.

        ``check`` is called every 0.2 s meanwhile, and may raise. TimeoutError, with the ranks that
        are missing, after ``timeout_s`` seconds.
        """
        found: dict[int, tuple[Channel, dict[str, Any]]] = {}
        deadline = time.monotonic() + timeout_s
        self._socket.settimeout(_LOOK_S)
        while len(found) < len(ranks):
            check()
            if time.monotonic() > deadline:
                absent = [rank for rank in ranks if rank not in found]
                ranks_absent = ", ".join(map(str, absent))
                raise TimeoutError(f"rank {ranks_absent} did not start within {timeout_s:g} s")
            with contextlib.suppress(TimeoutError):
                channel = Channel(self._socket.accept()[0])
                with contextlib.suppress(ChannelClosed, ValueError, KeyError):
                    hello = channel.receive(_HELLO_S)
                    is_ours = hmac.compare_digest(str(hello["token"]), self.token)
                    if is_ours and hello["rank"] in ranks:
                        found[hello["rank"]] = channel, hello
                        continue
                channel.close()
        return [found[rank] for rank in ranks]

    def close(self) -> None:
        self._socket.close()
