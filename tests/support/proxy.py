"""A TCP proxy that writes down what passes, and can change it: what does a wire really carry?"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

Alter = Callable[[bool, int, bytes], bytes]
"""``alter(to_server, offset, data) -> data``: what goes on instead; ``offset`` counts from 0."""


@dataclass(slots=True, eq=False)
class Recording:
    """The bytes of one connection, in both directions, as they came in."""

    to_server: bytearray = field(default_factory=bytearray)
    to_client: bytearray = field(default_factory=bytearray)


class RecordingProxy:
    """Forwards connections to ``host:port``; ``recordings`` has one entry for each, in order.

    Bytes are recorded before they are forwarded, so what a peer has received is on record; ends are
    forwarded too. A context manager; ``port`` is where to connect instead.
    """

    def __init__(self, host: str, port: int, *, alter: Alter | None = None) -> None:
        self.recordings: list[Recording] = []
        self._target = (host, port)
        self._alter = alter
        self._lock = threading.Lock()
        self._closing = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> RecordingProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def cut(self) -> None:
        """End all connections that are open now."""
        with self._lock:
            for sock in self._sockets:
                _shut(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut all connections and stop. Idempotent."""
        with self._lock:
            self._closing = True
        _shut(self._listening, socket.SHUT_RDWR)  # wakes accept
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listening.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="recording-proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                if self._closing:
                    client.close()
                    server.close()
                    return
                self._sockets |= {client, server}
                recording = Recording()
                self.recordings.append(recording)
                self._start(self._connection, client, server, recording)

    def _connection(
        self, client: socket.socket, server: socket.socket, recording: Recording
    ) -> None:
        back = threading.Thread(
            target=self._forward, args=(server, client, recording.to_client, False)
        )
        back.start()
        self._forward(client, server, recording.to_server, True)
        back.join()
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _forward(
        self, source: socket.socket, target: socket.socket, log: bytearray, to_server: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 * 1024):
                offset = len(log)
                log += data
                if self._alter is not None:
                    data = self._alter(to_server, offset, data)
                target.sendall(data)
        _shut(target, socket.SHUT_WR)


def _shut(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(how)
