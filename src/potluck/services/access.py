"""``Services``: the services that one worker of a job serves, and its remotes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from potluck._core.backends.service_transport import Caller, ServiceTransport
from potluck._core.transport.bulk import BulkLink
from potluck._core.types import Group, Member
from potluck._core.wire.payload import pack
from potluck._core.wire.services import Request
from potluck.errors import ConfigurationError, LinkError, PotluckError, UnknownService
from potluck.services.channel import Blocks
from potluck.services.client import Connection, Remote, Remotes
from potluck.services.definition import services_of
from potluck.services.server import Server
from potluck.services.waits import attempts

_PAUSE_S = 0.05
_ANSWER_S = 2.0
"""Seconds for one rank's reply to the question for its services, before the next rank is asked."""


class Services:
    """The services that one worker offers, and its remotes. For any number of threads."""

    def __init__(
        self,
        transport: ServiceTransport | None,
        group: Callable[[], Group],
        next_members: Callable[[], Sequence[Member]] = tuple,
        *,
        timeout_s: float,
        max_bytes: int,
    ) -> None:
        """``transport`` is None on links of other libraries, where there are no services. Workers
        of the present ``group()`` and of the announced next group, ``next_members()``, may call."""
        self._transport = transport
        self._group = group
        self._next_members = next_members
        self._max_bytes = max_bytes
        self._memory = Blocks()
        self._remotes = Remotes(timeout_s=timeout_s, max_bytes=max_bytes, memory=self._memory)
        self._server = Server(
            rank_of=self._rank_of,
            max_bytes=max_bytes,
            memory=self._memory,
            objects_to=(lambda node: None) if transport is None else transport.objects_to,
        )
        if transport is not None:
            transport.open(self._objection, self._server.take)

    def serve(self, *things: Any) -> None:
        """See ``DistributedContext.serve``."""
        self._checked_transport()
        self._server.add(services_of(*things))

    def withdraw(self, *names: str) -> None:
        """See ``DistributedContext.withdraw``."""
        self._server.remove(names)

    def connect(self, name: str, rank: int | None, timeout_s: float) -> Remote:
        """See ``DistributedContext.connect``."""
        transport = self._checked_transport()
        return self.remote(name, self._find(transport, name, rank, timeout_s))

    def remote(self, name: str, worker: str) -> Remote:
        """The service ``name`` of a worker of the group, without a check that it exists."""
        transport = self._checked_transport()

        def dial(deadline: float) -> BulkLink:
            group = self._group()
            for member in group.members:
                if member.worker == worker:
                    return transport.connect(group, member, deadline)
            raise LinkError(f"worker {worker} is not in the group of epoch {group.epoch}")

        def may_use() -> bool:
            for each in self._group().members:
                if each.worker == worker and transport.objects_to(each.node) is not None:
                    return False
            return True

        return self._remotes.make(name, f"worker {worker}", dial, may_use)

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._remotes.close()
        self._server.close()

    # -- inside

    def _checked_transport(self) -> ServiceTransport:
        if self._transport is None:
            raise ConfigurationError(
                "services need potluck's own links, and this context's backend uses another "
                "library; choose backend='auto', 'env' or 'ring'"
            )
        return self._transport

    def _rank_of(self, worker: str) -> int:
        return self._group().rank_of(worker)

    def _objection(self, caller: Caller) -> str | None:
        """The reason to refuse a connection of ``caller``, whose node is admitted to the cluster;
        None: it is accepted."""
        group = self._group()
        if caller.job != group.job:
            return f"this worker is in job {group.job!r}, not {caller.job!r}"
        # A worker that was started again may be in the next group before this one is.
        members = (*group.members, *self._next_members())
        nodes = [each.node for each in members if each.worker == caller.worker]
        if not nodes:
            return f"job {group.job!r} has no worker {caller.worker!r:.80} that is known here yet"
        if "" not in nodes and caller.node not in nodes:
            return f"worker {caller.worker} is on node {nodes[-1][:12]}, not on {caller.node[:12]}"
        return self._server.objection(caller)

    def _find(
        self, transport: ServiceTransport, name: str, rank: int | None, timeout_s: float
    ) -> str:
        """The worker that serves ``name``: of the ranks in order, the first that does."""
        seen: dict[str, str] = {}
        for deadline in attempts(timeout_s, _PAUSE_S):
            group = self._group()
            members = group.members if rank is None else (group.members[rank],)
            for position, member in enumerate(members):
                left = deadline - time.monotonic()
                share = min(_ANSWER_S, left / (len(members) - position))
                until = time.monotonic() + (left if len(members) == 1 else share)
                try:
                    names = self._names_at(transport, group, member, until)
                except (PotluckError, TimeoutError) as error:
                    # keep the earlier reason: the last attempt may only have timed out
                    reason = str(error) or "it does not answer"
                    seen.setdefault(str(member), f"can't be asked ({reason})")
                    continue
                if name in names:
                    return member.worker
                seen[str(member)] = ", ".join(map(repr, names)) or "none"
        found = "; ".join(f"{member}: {what}" for member, what in seen.items())
        raise UnknownService(f"nobody served {name!r} within {timeout_s:g} s. Services of {found}")

    def _names_at(
        self, transport: ServiceTransport, group: Group, member: Member, deadline: float
    ) -> list[str]:
        link = transport.connect(group, member, deadline)
        connection = Connection(link, self._max_bytes, self._memory)
        try:
            left = max(0.001, deadline - time.monotonic())
            _, names = connection.call(Request("", "", left), pack({}, "arguments"), deadline)
        finally:
            connection.close()
        return [str(each) for each in names]
