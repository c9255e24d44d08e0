"""Lines out of a worker's pipes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from potluck.system import need_posix

MAX_LINE = 64 * 1024
_READ = 64 * 1024
_PAUSE_S = 0.05


class LineSplitter:
    """Bytes in, lines out. A carriage return ends a line as well (progress bars), and so does
    ``MAX_LINE``. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are whole now, without their ends."""
        data = self._rest + data
        held = data[-1:] if data.endswith(b"\r") else b""  # its line feed may follow
        text = data.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, last = text.split(b"\n")
        self._rest = last + held
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return [piece for line in lines for piece in _pieces(line)]

    def finish(self) -> list[str]:
        """What is left after the last line end."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return _pieces(rest) if rest else []


def _pieces(line: bytes) -> list[str]:
    """A line cut to the permitted length."""
    starts = range(0, max(len(line), 1), MAX_LINE)
    return [line[start : start + MAX_LINE].decode(errors="replace") for start in starts]


class PipeReader:
    """Reads one pipe of a worker into ``sink``, line by line, from the event loop."""

    def __init__(
        self,
        descriptor: int,
        loop: asyncio.AbstractEventLoop,
        sink: Callable[[str], None],
        is_behind: Callable[[], bool],
    ) -> None:
        """While ``is_behind()``, nothing is read."""
        self._descriptor = descriptor
        self._loop = loop
        self._sink = sink
        self._is_behind = is_behind
        self._pause: asyncio.TimerHandle | None = None
        self._splitter = LineSplitter()
        self.ended = asyncio.Event()
        need_posix("reading the output of workers")
        os.set_blocking(descriptor, False)
        self._resume()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> None:
        if self._is_behind():
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_PAUSE_S, self._resume)
            return
        try:
            data = os.read(self._descriptor, _READ)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        for line in self._splitter.feed(data):
            self._sink(line)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if not self.ended.is_set():
            self._loop.remove_reader(self._descriptor)
            if self._pause is not None:
                self._pause.cancel()
            for line in self._splitter.finish():
                self._sink(line)
            self.ended.set()
