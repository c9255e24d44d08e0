"""A link used the plain way, for a few bytes before the engine takes over: wait until done."""

from __future__ import annotations

import time
from typing import TypeVar

from potluck._core.system import wait_ready
from potluck._core.transport.tcp import TcpLink
from potluck._core.wire.format import PREFIX_BYTES, MessageFormat
from potluck.errors import LinkError

T = TypeVar("T")


def send_all(link: TcpLink, data: bytes, deadline: float) -> None:
    """Send all of ``data``; LinkError if that takes longer than ``deadline`` (monotonic)."""
    left = memoryview(data)
    while left:
        taken = link.send(left)
        left = left[taken:]
        if not taken:
            _wait(link, deadline, write=True)


def recv_exactly(link: TcpLink, count: int, deadline: float) -> bytes:
    """The next ``count`` bytes; LinkError if they do not come by ``deadline`` (monotonic)."""
    buffer = bytearray(count)
    left = memoryview(buffer)
    while left:
        taken = link.recv_into(left)
        left = left[taken:]
        if not taken and not link.readable:
            _wait(link, deadline, write=False)
    return bytes(buffer)


def receive(link: TcpLink, messages: MessageFormat[T], deadline: float) -> T:
    """The next message; LinkError if it does not come by ``deadline`` (monotonic), ProtocolError if
    it is none of these."""
    length = messages.length(recv_exactly(link, PREFIX_BYTES, deadline))
    return messages.decode(recv_exactly(link, length, deadline))


def has_come(link: TcpLink, seconds: float) -> bool:
    """Whether there is something to receive, or the link has ended, within so long."""
    return link.readable or wait_ready(link.fileno(), write=False, timeout_s=seconds)


def _wait(link: TcpLink, deadline: float, *, write: bool) -> None:
    left = deadline - time.monotonic()
    if left <= 0 or not wait_ready(link.fileno(), write=write, timeout_s=left):
        raise LinkError(f"{link.peer} did not answer in time")
