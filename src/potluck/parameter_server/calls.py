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
from potluck.parameter_server.signals import AskAgain
from potluck.services import Remote
from potluck.services.asking import raise_local
from potluck.waiting import checked_seconds

_LOCAL = {each.__name__: each for each in (ValueError, TypeError, CheckpointError)}
"""Errors of a server that are raised here as they are: mistakes of this script, and lost state."""

_PAUSE_S = 0.05
_CONNECT_S = 2.0
"""In an elastic context: then it is seen whether the group has changed."""


class Calls:
    """For one thread. Every call may be made twice: pushes have numbers, all others change nothing
    then."""

    def __init__(self, ctx: DistributedContext, name: str, servers: tuple[str, ...]) -> None:
        self.servers = servers
        self._ctx = ctx
        self._name = name
        self._remotes: dict[str, Remote] = {}

    def connect(self, server: str, timeout: float) -> Remote:
        """The service of ``server``; UnknownService if it does not start in time, ServiceLost if
        it is not in the group."""
        rank = self._ctx.group.rank_of(server)
        if rank < 0:
            raise ServiceLost(f"worker {server}, a parameter server, is not in the group")
        return self._ctx.connect(self._name, rank=rank, timeout=timeout)

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
            errors = self._try(method, left, replies, timeout, deadline)
            if errors:
                # A mistake first: it is one whatever the other servers say.
                errors.sort(key=lambda each: not isinstance(each, HandlerError))
                self._bear(errors[0], deadline)
        return replies

    def reform_if_due(self) -> bool:
        """Enter the next group of an elastic context, if one waits."""
        if not self._ctx.elastic or not self._ctx.reform_due:
            return False
        self._ctx.reform(self._ctx.communicator.error)
        return True

    # -- inside

    def _try(
        self,
        method: str,
        arguments: Mapping[str, tuple[Any, ...]],
        replies: dict[str, Any],
        timeout: float | None,
        deadline: float,
    ) -> list[PotluckError]:
        """One call of each; what went wrong."""
        errors: list[PotluckError] = []
        works = {}
        for server, args in arguments.items():
            try:
                if server not in self._remotes:
                    left = max(0.0, deadline - time.monotonic())
                    left = min(left, _CONNECT_S) if self._ctx.elastic else left
                    self._remotes[server] = self.connect(server, left)
                call = getattr(self._remotes[server], method)
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
        return errors

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
