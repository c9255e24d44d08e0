"""Calls of the servers of a parameter server: ``Remotes`` calls several at once, ``Calls`` calls on
over losses and new groups."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from potluck._core.checks import Duration, checked_seconds
from potluck._core.context import DistributedContext
from potluck._core.engine.work import again
from potluck._core.forks import Owner
from potluck.errors import (
    CheckpointError,
    HandlerError,
    PeerLost,
    PotluckError,
    ServiceLost,
    ServiceTimeout,
    UnknownService,
)
from potluck.parameter_server.layout import Placement
from potluck.parameter_server.replica import AskAgain
from potluck.services import Remote
from potluck.services.waits import raise_local

CONNECT_S = 2.0
"""For finding a service whose worker may be lost: then it is seen whether the group has changed."""

_LOCAL = {each.__name__: each for each in (ValueError, TypeError, CheckpointError)}
"""Errors of a server that are raised here under their own type: mistakes, and lost state."""

_PAUSE_S = 0.05


class Remotes:
    """The services of all servers, for one thread. Each is connected at its first call."""

    def __init__(self, ctx: DistributedContext, name: str) -> None:
        """``name``: of the service on every server."""
        self._ctx = ctx
        self._name = name
        self._remotes: dict[str, Remote] = {}

    def call_each(
        self,
        method: str,
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        connect_s: float,
        timeout: Duration | None = None,
    ) -> tuple[dict[str, Any], list[PotluckError]]:
        """The replies of the servers in ``arguments``, called at once, and the errors, a server's
        own first. ``connect_s`` is for finding a server, ``timeout`` for each call."""
        replies: dict[str, Any] = {}
        errors: list[PotluckError] = []
        works = {}
        for server, args in arguments.items():
            try:
                call = getattr(self._found(server, connect_s), method)
                if len(arguments) > 1:
                    works[server] = call.start(*args, timeout=timeout)
                else:
                    replies[server] = call(*args, timeout=timeout)
            except PotluckError as error:
                errors.append(error)
        for server, work in works.items():
            try:
                replies[server] = work.wait()
            except PotluckError as error:
                errors.append(error)
        # A mistake of the caller counts whatever became of the other calls.
        return replies, sorted(errors, key=lambda each: not isinstance(each, HandlerError))

    def _found(self, server: str, connect_s: float) -> Remote:
        """UnknownService if ``server`` does not serve in time, ServiceLost if it is not in the
        group."""
        remote = self._remotes.get(server)
        if remote is None:
            rank = self._ctx.group.rank_of(server)
            if rank < 0:
                there = ", ".join(member.worker for member in self._ctx.members)
                raise ServiceLost(
                    f"worker {server}, a parameter server, is not in the group, which has worker "
                    f"{there}"
                )
            remote = self._ctx.connect(self._name, rank=rank, timeout=connect_s)
            self._remotes[server] = remote
        return remote


class Calls:
    """For one thread. Every call may be made twice: pushes have numbers, and a repeat of any other
    call changes nothing."""

    def __init__(
        self, ctx: DistributedContext, name: str, servers: tuple[str, ...], copies: int = 1
    ) -> None:
        """``copies`` of the servers have each tensor. With several copies the other servers go on
        without a lost server; with one copy the calls wait for it."""
        self._servers = servers
        self._copies = copies
        self._ctx = ctx
        self._name = name
        self._remotes = Remotes(ctx, name)
        self.owner = Owner("this ParameterServer")
        self.reforms = True
        """Whether a waiting call enters the next group when one is due; else it raises."""
        self.has_ended = False
        """Whether this worker has closed its ParameterServer."""

    @property
    def present(self) -> tuple[str, ...]:
        """The live servers, the primary first."""
        if self._copies > 1:
            group = self._ctx.group
            there = tuple(each for each in self._servers if group.rank_of(each) >= 0)
            return there or self._servers
        return self._servers

    def placement(self, present: Iterable[str]) -> Placement:
        """Placement over the servers that were ``present`` in a reply and are still live."""
        there = self.present
        return Placement(self._servers, self._copies, tuple(s for s in present if s in there))

    def ask(self, method: str, *args: Any, timeout: Duration | None = None) -> Any:
        """Call the primary. Its errors for mistakes of this script are raised here."""
        if method != "leave":
            self.check_open()
        deadline = self._deadline(timeout)
        while True:
            primary = self.present[0]
            replies = self._ask_once(method, {primary: args}, deadline, timeout)
            if replies:
                return replies[primary]

    def ask_each(
        self,
        method: str,
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        timeout: Duration | None = None,
    ) -> dict[str, Any] | None:
        """The same call of several servers at once; the replies by server. None if one was lost and
        the others go on."""
        self.check_open()
        deadline = self._deadline(timeout)
        replies: dict[str, Any] = {}
        while len(replies) < len(arguments):
            left = {server: args for server, args in arguments.items() if server not in replies}
            replies |= self._ask_once(method, left, deadline, timeout)
            if not set(arguments) <= set(self.present):
                return None
        return replies

    def check_open(self) -> None:
        """RuntimeError after ``close``: the last checkpoint may be written, and the servers wait
        for this worker no more. ForkedProcess in a forked child."""
        self.owner.check()
        if self.has_ended:
            raise RuntimeError(
                f"the ParameterServer {self._name!r} was closed by this worker: call it before "
                "close(), or inside its 'with' block"
            )

    def reform_if_due(self) -> bool:
        """Enter the next group of an elastic context, if one waits; without ``reforms`` raise
        instead."""
        if not self.reforms:
            error = self._ctx.communicator.error
            if error is None and self._ctx.elastic and self._ctx.reform_due:
                error = PeerLost("another group waits: a worker was lost, or comes in")
            if error is not None:
                raise again(error)
            return False
        if not self._ctx.elastic or not self._ctx.reform_due:
            return False
        self._ctx.reform(self._ctx.communicator.error)
        return True

    # -- inside

    def _deadline(self, timeout: Duration | None) -> float:
        seconds = self._ctx.timeout_s if timeout is None else checked_seconds(timeout)
        return time.monotonic() + seconds

    def _ask_once(
        self,
        method: str,
        arguments: Mapping[str, tuple[Any, ...]],
        deadline: float,
        timeout: Duration | None,
    ) -> dict[str, Any]:
        """The replies so far. Raises errors after which a repeat makes no sense."""
        connect_s = max(0.001, deadline - time.monotonic())
        if self._ctx.elastic:
            connect_s = min(connect_s, CONNECT_S)
        found, errors = self._remotes.call_each(
            method, arguments, connect_s=connect_s, timeout=timeout
        )
        if errors:
            self._bear(errors[0], deadline)
        return found

    def _bear(self, error: PotluckError, deadline: float) -> None:
        """Return if the call is to be made again."""
        is_late = time.monotonic() >= deadline
        if isinstance(error, HandlerError):
            if error.type != AskAgain.__name__:
                raise_local(error, _LOCAL)
            if is_late:
                raise ServiceTimeout(error.text) from error
            time.sleep(_PAUSE_S)
            self.reform_if_due()
        elif isinstance(error, UnknownService):  # a restarted worker, which does not serve yet
            if not self._ctx.elastic or is_late:
                raise error
            time.sleep(_PAUSE_S)
            self.reform_if_due()
        elif not isinstance(error, ServiceLost) or not self._enter_next_group(deadline):
            raise error

    def _enter_next_group(self, deadline: float) -> bool:
        """Wait for a group in which the server may be back; False if none forms by ``deadline``."""
        while self._ctx.elastic and time.monotonic() < deadline:
            if self.reform_if_due():
                return True
            time.sleep(_PAUSE_S)
        return False
