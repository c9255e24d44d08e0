"""Group errors: which exception a failure becomes, and how it travels in ABORT frames.

Each text names the ranks, the nodes, the operation and the step, so that the log of one rank tells
what happened on another. ``GroupState`` is a group's state: alive, or over with an error.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Protocol

from potluck._core.engine.fingerprint import describe
from potluck._core.types import Group
from potluck._core.wire.dtypes import dtype_of
from potluck._core.wire.frames import MAX_CONTROL, Abort
from potluck._core.wire.greeting import Refusal
from potluck.errors import (
    Desync,
    Evicted,
    GroupClosed,
    GroupError,
    LinkError,
    OperationTimeout,
    PeerLost,
    Refused,
    RemoteError,
)


class GroupState:
    """Holds the error that ended the group, None while it is alive. Set once; for any thread."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    def error(self) -> BaseException | None:
        return self._error

    def fail(self, error: BaseException) -> None:
        """End the group with ``error``; the first one wins."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once the group is over, on whatever thread ends it; or now."""
        with self._lock:
            if self._error is None:
                self._watchers.append(callback)
                return
        callback()

    def closed(self) -> GroupClosed:
        """What calls raise after an orderly close."""
        return GroupClosed(
            f"the group of epoch {self.group.epoch} was closed on this rank",
            rank=self.group.rank,
            epoch=self.group.epoch,
        )


_EQUAL = "all ranks must make the same calls: operation, dtype, shape, op, root, algorithm, order"

_OVER = re.compile(r"over:([A-Za-z]{1,40}):(-?[0-9]{1,5}):([01])")
"""The code of a refusal that tells why a group is over: class, rank, certain."""


class Awaiting(Protocol):
    """An operation under way, and the ranks that it waits for."""

    def awaited(self) -> list[tuple[int, str]]: ...


_BY_NAME: dict[str, type[GroupError]] = {
    cls.__name__: cls
    for cls in (PeerLost, OperationTimeout, Desync, RemoteError, Evicted, GroupClosed, GroupError)
}


def peer_lost(group: Group, rank: int, cause: Exception, item: Awaiting | None) -> GroupError:
    """The link to ``rank`` ended or could not be made."""
    told = _told_by(group, cause, item) if isinstance(cause, Refused) else None
    is_about_me = isinstance(told, PeerLost | OperationTimeout) and told.rank == group.rank
    if told is not None and not is_about_me:
        error = told
    elif is_about_me or (isinstance(cause, Refused) and cause.code == "stale"):
        error = Evicted(
            f"the others have gone on without {group.describe(group.rank)}: {cause}",
            rank=group.rank,
            epoch=group.epoch,
            operation=_name(item),
        )
    else:
        certain = isinstance(cause, LinkError) and not isinstance(cause, Refused)
        error = PeerLost(
            f"lost {group.describe(rank)} in epoch {group.epoch}{_during(group, item)}: "
            f"{PeerLost.PHRASE}: {cause}",
            rank=rank,
            epoch=group.epoch,
            operation=_name(item),
            certain=certain,
        )
    error.__cause__ = cause
    return error


def refusal_of(group: Group, error: BaseException) -> Refusal:
    """What to answer to a peer that wants a link to this rank now that its group is over."""
    if not isinstance(error, GroupError) or isinstance(error, GroupClosed):
        return Refusal("left", f"{group.describe(group.rank)} left the group of this epoch")
    code = f"over:{type(error).__name__}:{error.rank}:{int(error.certain)}"
    return Refusal(code, str(error)[: MAX_CONTROL // 4])


def _told_by(group: Group, cause: Refused, item: Awaiting | None) -> GroupError | None:
    """The error in a refusal made by ``refusal_of``."""
    told = _OVER.fullmatch(cause.code)
    if told is None:
        return None
    name, rank, certain = told.groups()
    return error_of(group, Abort(name, str(cause), int(rank), certain=certain == "1"), item)


def overdue(group: Group, item: Awaiting, blocking_rank: int = -1) -> OperationTimeout:
    """``item`` has passed its deadline; ``blocking_rank`` holds it up, -1 if that is unknown."""
    waits = item.awaited()
    rank = (
        blocking_rank if blocking_rank >= 0 else next((peer for peer, _ in waits if peer >= 0), -1)
    )
    missing = "; ".join(
        f"{'any rank' if peer < 0 else group.describe(peer)} ({what})" for peer, what in waits
    )
    blame = (
        f"{group.describe(blocking_rank)} has not made this call; " if blocking_rank >= 0 else ""
    )
    return OperationTimeout(
        f"{item} in epoch {group.epoch} exceeded its timeout on {group.describe(group.rank)}; "
        f"{blame}it still waits for {missing or 'its own last segment'}",
        rank=rank,
        epoch=group.epoch,
        operation=str(item),
    )


def desync(group: Group, peer: int, item: object, theirs: int) -> Desync:
    """``peer`` made another call than this rank: the one with the fingerprint ``theirs``."""
    called = describe(theirs)
    return _desync(
        group, peer, item, f"called {called} ({_EQUAL})" if called else f"another one ({_EQUAL})"
    )


def closed_before(group: Group, peer: int, item: object) -> Desync:
    """``peer`` closed the sub-group on which this rank called ``item``."""
    return _desync(group, peer, item, "closed the sub-group of this call without making it")


def message_mismatch(group: Group, peer: int, item: object, nbytes: int, dtype: int) -> Desync:
    """``peer`` sent a message of other ``nbytes`` or another ``dtype`` than this rank expects."""
    known = dtype_of(dtype)
    return _desync(group, peer, item, f"sent {nbytes} bytes of {known or 'an unknown dtype'}")


def _desync(group: Group, peer: int, item: object, theirs: str) -> Desync:
    return Desync(
        f"ranks disagree in epoch {group.epoch}: {group.describe(group.rank)} called {item}, but "
        f"{group.describe(peer)} {theirs}",
        rank=peer,
        epoch=group.epoch,
        operation=str(item),
    )


def broke(group: Group, what: str, cause: str) -> GroupError:
    """``what`` of this rank, one of potluck's own threads, ended by an error of its own."""
    return GroupError(
        f"{what} on {group.describe(group.rank)} broke: {cause}. The script is not to blame: start "
        "it again, and please report this with the traceback in that worker's output",
        rank=group.rank,
        epoch=group.epoch,
    )


def abort_of(error: GroupError) -> Abort:
    """What to tell the peers."""
    return Abort(
        error=type(error).__name__,
        text=str(error),
        rank=error.rank,
        operation=error.operation,
        certain=error.certain,
    )


def error_of(group: Group, abort: Abort, item: Awaiting | None) -> GroupError:
    """What to raise when a peer told us. An unknown class name becomes a plain GroupError."""
    error = _BY_NAME.get(abort.error, GroupError)
    text = abort.text
    if error is Desync and item is not None and abort.rank != group.rank:
        text += f"; this rank, {group.rank}, called {item}"
    if error is Evicted and abort.rank != group.rank:
        error = PeerLost
    rank = abort.rank if -1 <= abort.rank < group.world_size else -1
    return error(
        text,
        rank=rank,
        epoch=group.epoch,
        operation=abort.operation or _name(item),
        certain=abort.certain,
    )


def _name(item: Awaiting | None) -> str:
    return "" if item is None else str(item)


def _during(group: Group, item: Awaiting | None) -> str:
    if item is None:
        return ""
    waits = item.awaited()
    what = f", at {waits[0][1]}" if waits else ""
    return f" during {item} on {group.describe(group.rank)}{what}"
