"""``Calls``: a worker's calls of all servers of a parameter server, over losses and new groups."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from potluck.context import DistributedContext
from potluck.errors import (
    CheckpointError,
    HandlerError,
    PotluckError,
    ServiceLost,
    ServiceTimeout,
    UnknownService,
)
from potluck.parameter_server.remotes import CONNECT_S, Remotes
from potluck.parameter_server.signals import AskAgain
from potluck.services.asking import raise_local
from potluck.waiting import checked_seconds

_LOCAL = {each.__name__: each for each in (ValueError, TypeError, CheckpointError)}
"""Errors of a server that are raised here as they are: mistakes of this script, and lost state."""

_PAUSE_S = 0.05


class Calls:
    """For one thread. Every call may be made twice: pushes have numbers, all others change nothing
    then."""

    def __init__(self, ctx: DistributedContext, name: str, servers: tuple[str, ...]) -> None:
        self.servers = servers
        self._ctx = ctx
        self._remotes = Remotes(ctx, name)

    def ask(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """One call of the first server. What it raises for a mistake of this script is raised
        here."""
        first = self.servers[0]
        return self.ask_each(method, {first: args}, timeout=timeout)[first]

    def ask_each(
        self,
        method: str,
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """The same call of several servers at once; the replies by server."""
        seconds = self._ctx.timeout_s if timeout is None else checked_seconds(timeout)
        deadline = time.monotonic() + seconds
        replies: dict[str, Any] = {}
        while len(replies) < len(arguments):
            left = {server: args for server, args in arguments.items() if server not in replies}
            connect_s = max(0.0, deadline - time.monotonic())
            if self._ctx.elastic:
                connect_s = min(connect_s, CONNECT_S)
            found, errors = self._remotes.call_each(
                method, left, connect_s=connect_s, timeout=timeout
            )
            replies |= found
            if errors:
                self._bear(errors[0], deadline)
        return replies

    def reform_if_due(self) -> bool:
        """Enter the next group of an elastic context, if one waits."""
        if not self._ctx.elastic or not self._ctx.reform_due:
            return False
        self._ctx.reform(self._ctx.communicator.error)
        return True

    # -- inside

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
        elif isinstance(error, UnknownService):  # it was started again, and does not serve yet
            if not self._ctx.elastic or is_late:
                raise error
            time.sleep(_PAUSE_S)
            self.reform_if_due()
        elif not isinstance(error, ServiceLost) or not self._enter_next_group(deadline):
            raise error

    def _enter_next_group(self, deadline: float) -> bool:
        """Wait for a group in which the server may be back; False without one by ``deadline``."""
        while self._ctx.elastic and time.monotonic() < deadline:
            if self.reform_if_due():
                return True
            time.sleep(_PAUSE_S)
        return False
