"""How a rank leaves a group that failed: every peer learns why before its link is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from potluck.engine.failures.fate import Fate
from potluck.engine.failures.verdict import abort_of
from potluck.engine.loop.port import Outgoing, Port, Sink, as_bytes
from potluck.engine.loop.ports import Ports
from potluck.errors import GroupClosed, GroupError, PotluckError
from potluck.system import wait_ready
from potluck.transport.link import Link
from potluck.types import Group
from potluck.wire import frames
from potluck.wire.frames import IN_WINDOW, Frame, Kind

_FLUSH_S = 0.2
"""How long a failing group tries to tell its peers before it closes the links."""


def tell_all(fate: Fate, ports: Ports, drain_wake: Callable[[], None]) -> None:
    """Tell every linked peer why the group is over, within a bound.

    Until this returns user buffers are still ours, so frames half written stay what they were.
    Each link is read until the peer's own ABORT or its end: closing it over unread bytes would
    reset the connection, and the peer would lose the reason and blame this rank.
    """
    error = fate.error
    if not isinstance(error, GroupError) or isinstance(error, GroupClosed):
        return
    header, body = _abort_frame(fate.group, error)
    for port in ports.by_rank.values():
        port.control.clear()
        port.control.append(Outgoing(header, memoryview(body)))
    deadline = time.monotonic() + _FLUSH_S
    while ports.by_rank and (left := deadline - time.monotonic()) > 0:
        more = [_part(ports, port) for port in list(ports.by_rank.values())]
        if ports.by_rank:
            ports.selector.select(0.0 if any(more) else left)
            drain_wake()


def turn_away(fate: Fate, link: Link) -> None:
    """A link came too late: say why, and let the peer read that before the link is gone."""
    until = time.monotonic() + _FLUSH_S
    scratch = memoryview(bytearray(64 * 1024))
    with contextlib.suppress(PotluckError):
        link.send(memoryview(_last_words(fate, link)))
        if link.fileno() >= 0:  # in-process links keep what was sent when they are closed
            while (left := until - time.monotonic()) > 0:
                wait_ready(link.fileno(), write=False, timeout_s=left)
                while link.recv_into(scratch):
                    pass
    link.close()


def _part(ports: Ports, port: Port) -> bool:
    """Go on with telling the peer and hearing it; True if there is more to do at once."""
    try:
        more = port.write(lambda _: None)
        if port.is_garbled:
            more |= port.drain()
        elif not port.said_abort:
            more |= port.read(_discard) or port.link.readable
    except PotluckError:
        ports.drop(port)
        return False
    if port.said_abort and not port.is_writing:
        ports.drop(port)
        return False
    ports.watch(port)
    return more


def _discard(port: Port, frame: Frame) -> Sink:
    """Where a frame goes once the group is over."""
    if frame.kind is Kind.ABORT:
        port.said_abort = True
    is_small = frame.length <= frames.MAX_CONTROL
    buffer = None if is_small or frame.flags & IN_WINDOW else port.scratch(frame.length)
    return Sink(buffer, lambda _: None)


def _last_words(fate: Fate, link: Link) -> bytes:
    error, group = fate.error, fate.group
    frame, body = Frame(Kind.GOODBYE, group.epoch, source=group.rank), b""
    if isinstance(error, GroupError) and not isinstance(error, GroupClosed):
        frame, body = _abort_frame(group, error)
    return as_bytes(frame, body, are_checked=link.needs_checksums)


def _abort_frame(group: Group, error: GroupError) -> tuple[Frame, bytes]:
    body = frames.encode_abort(abort_of(error))
    return Frame(Kind.ABORT, group.epoch, length=len(body), source=group.rank), body
