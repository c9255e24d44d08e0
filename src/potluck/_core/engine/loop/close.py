"""The end of a failed group: every peer learns why (ABORT) before its link is closed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from potluck._core.engine.failures.group_errors import GroupState, abort_of
from potluck._core.engine.loop.connection import Connection, Outgoing, Sink
from potluck._core.engine.loop.connections import Connections
from potluck._core.system import wait_ready
from potluck._core.transport.link import Link
from potluck._core.types import Group
from potluck._core.wire import frames
from potluck._core.wire.frames import IN_LINK_MEMORY, Frame, Kind
from potluck.errors import GroupClosed, GroupError, PotluckError

_FLUSH_S = 0.2
"""How long a failing group tries to tell its peers before it closes the links."""


def send_abort(state: GroupState, connections: Connections, drain_wake: Callable[[], None]) -> None:
    """Tell every linked peer why the group is over, within a bound.

    Until this returns, the callers' arrays belong to the loop: a half-written frame must be
    completed with the bytes that it began with, because a peer finds the ABORT only behind a whole
    frame. Each link is read until the peer's own ABORT or the link's end: closing it over unread
    bytes would reset the connection, and the peer would lose the reason and blame this rank.
    """
    error = state.error
    if not isinstance(error, GroupError) or isinstance(error, GroupClosed):
        return
    header, body = _abort_frame(state.group, error)
    for connection in connections.by_rank.values():
        connection.control.clear()
        connection.control.append(Outgoing(header, memoryview(body)))
    deadline = time.monotonic() + _FLUSH_S
    while connections.by_rank and (left := deadline - time.monotonic()) > 0:
        more = [
            _flush_abort(connections, connection)
            for connection in list(connections.by_rank.values())
        ]
        if connections.by_rank:
            connections.selector.select(0.0 if any(more) else left)
            drain_wake()


def reject(state: GroupState, link: Link) -> None:
    """Close a link that was made after the group ended: send the reason, and give the peer the time
    to read it."""
    until = time.monotonic() + _FLUSH_S
    scratch = memoryview(bytearray(64 * 1024))
    with contextlib.suppress(PotluckError):
        link.send(memoryview(_final_frame(state)))
        if link.fileno() >= 0:  # in-process links keep what was sent when they are closed
            while (left := until - time.monotonic()) > 0:
                wait_ready(link.fileno(), write=False, timeout_s=left)
                while link.recv_into(scratch):
                    pass
    link.close()


def _flush_abort(connections: Connections, connection: Connection) -> bool:
    """Write to the peer and read from it as far as possible; True if there is more to do at
    once."""
    try:
        more = connection.write(lambda _: None)
        if not connection.has_aborted:
            more |= connection.read(_discard) or connection.link.readable
    except PotluckError:
        connections.drop(connection)
        return False
    if connection.has_aborted and not connection.is_writing:
        connections.drop(connection)
        return False
    connections.watch(connection)
    return more


def _discard(connection: Connection, frame: Frame) -> Sink:
    """The sink of frames that come once the group is over: they are dropped."""
    if frame.kind is Kind.ABORT:
        connection.has_aborted = True
    is_small = frame.length <= frames.MAX_CONTROL
    buffer = None if is_small or frame.flags & IN_LINK_MEMORY else connection.scratch(frame.length)
    return Sink(buffer, lambda _: None)


def _final_frame(state: GroupState) -> bytes:
    error, group = state.error, state.group
    frame, body = Frame(Kind.CLOSE, group.epoch, source=group.rank), b""
    if isinstance(error, GroupError) and not isinstance(error, GroupClosed):
        frame, body = _abort_frame(group, error)
    return frames.encode(frame) + body


def _abort_frame(group: Group, error: GroupError) -> tuple[Frame, bytes]:
    body = frames.encode_abort(abort_of(error))
    return Frame(Kind.ABORT, group.epoch, length=len(body), source=group.rank), body
