"""``Remotes``: the services of the servers of one parameter server, called several at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from potluck._core.checks import Duration
from potluck._core.context import DistributedContext
from potluck.errors import HandlerError, PotluckError, ServiceLost
from potluck.services import Remote

CONNECT_S = 2.0
"""For finding a service that may have been lost: then it is seen whether the group has changed."""


class Remotes:
    """For one thread. A server is looked for when it is first called."""

    def __init__(self, ctx: DistributedContext, name: str) -> None:
        """``name`` is that of the service on every server."""
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
        """The replies of the servers in ``arguments``, called at once, and what went wrong, the
        errors that a server raised first. ``connect_s`` is for finding a server, ``timeout`` for
        each call."""
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
        # A server's own first: a mistake is one whatever the other servers say.
        return replies, sorted(errors, key=lambda each: not isinstance(each, HandlerError))

    def _found(self, server: str, connect_s: float) -> Remote:
        """UnknownService if it does not serve in time, ServiceLost if it is not in the group."""
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
