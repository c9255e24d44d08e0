"""``EnvironmentBackend``: the world of a launcher's variables, on potluck's own links.

The launcher is torchrun, mpirun, Slurm, Kubernetes, or a user who sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT (``launchers.py``). Rank 0 listens at MASTER_ADDR:MASTER_PORT. The other
ranks connect to it, send their addresses, and receive the roster of all members when all ranks have
connected. After that links connect all pairs of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from potluck._core.backends.base import StaticBackend
from potluck._core.backends.launchers import placed, read_launched_rank
from potluck._core.backends.rendezvous import Rendezvous
from potluck._core.backends.store_rendezvous import meet
from potluck._core.backends.tcp import TcpBase, taking_master_port
from potluck._core.engine.communicator import Communicator
from potluck._core.settings import Settings, load_settings
from potluck._core.transport.handshake import connect
from potluck._core.transport.link import receive, send_all
from potluck._core.transport.tcp import TcpLink
from potluck._core.types import Group, Member
from potluck._core.waiting import Reminder, reminding
from potluck._core.wire.gathering import ROSTER
from potluck._core.wire.greeting import Hello, Refusal
from potluck.errors import ConfigurationError, LinkError, OperationTimeout, Refused

_EPOCH = 1
_CHECK = "are all ranks started, with the same MASTER_ADDR and MASTER_PORT?"


class EnvironmentBackend(StaticBackend[Communicator]):
    """One rank of a fixed group that environment variables describe.

    ConfigurationError names a variable that is missing or invalid.
    """

    no_next_group = (
        "a group made from environment variables has no next group; start the script with "
        "`potluck run` to survive the loss of a worker"
    )

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings or load_settings()
        self._launched = launched = read_launched_rank(environment)
        self._rank, self._world_size = launched.rank, launched.world_size
        is_host = launched.rank == 0 and not launched.uses_agent_store
        if is_host:
            with taking_master_port(launched.port):
                self._base = TcpBase("", launched.port, self._settings)
        else:
            self._base = TcpBase("", 0, self._settings)
        self.switchboard = self._base.switchboard

    def _form(self, timeout_s: float) -> Communicator:
        if self._launched.uses_agent_store:
            return self._base.open(self._meet(timeout_s))
        deadline = time.monotonic() + timeout_s
        members = self._host(deadline) if self._rank == 0 else self._call(deadline)
        return self._base.open(Group(_EPOCH, self._rank, members))

    def _meet(self, timeout_s: float) -> Group:
        """The group under torchrun, whose store listens at MASTER_PORT: the ranks meet through
        it."""
        from potluck._core.backends.torchdist.store import open_store

        return meet(
            open_store(self._launched, timeout_s),
            self._rank,
            self._world_size,
            base=self._base,
            local_rank=self._launched.local_rank,
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        self._base.close()

    # -- rank 0

    def _host(self, deadline: float) -> tuple[Member, ...]:
        rendezvous = world_rendezvous(self._world_size)
        self._base.switchboard.answer("rendezvous", rendezvous.admit)
        try:
            links, members = self._gather(rendezvous, deadline)
            roster = ROSTER.encode(members)
            for link in links:
                send_all(link, roster, deadline)
            return members
        finally:
            rendezvous.close()

    def _gather(
        self, rendezvous: Rendezvous[None], deadline: float
    ) -> tuple[list[TcpLink], tuple[Member, ...]]:
        """Wait for all other ranks; their links, and the members in rank order."""
        where = f"{self._launched.host}:{self._launched.port}"
        here = rendezvous.arrivals

        def missing() -> str:
            ranks = set(range(1, self._world_size)) - set(map(int, here()))
            return f"{placed(ranks)} (of {self._world_size} ranks)"

        reminder = Reminder(lambda: f"rank 0 waits at {where} for {missing()}; {_CHECK}", deadline)
        while len(here()) < self._world_size - 1:
            if reminder.is_overdue:
                raise OperationTimeout(
                    f"{missing()} did not connect to rank 0 at {where} in time; {_CHECK} "
                    "(several on a machine: `potluck run --workers N` under these variables)"
                )
            rendezvous.wait_for(self._world_size - 1, reminder.patience())
            reminder.tick()
        others = sorted(here().values(), key=lambda each: int(each.member.worker))
        me = self._base.member("0", self._launched.host, self._launched.local_rank)
        return [each.link for each in others], (me, *(each.member for each in others))

    # -- other ranks

    def _call(self, deadline: float) -> tuple[Member, ...]:
        hello = Hello(
            kind="rendezvous",
            rank=self._rank,
            to_rank=0,
            worker=str(self._rank),
            port=self._base.port,
            world_size=self._world_size,
            local_rank=self._launched.local_rank,
            engine=self._base.engine,
            site=self._base.settings.site,
        )
        where = f"rank 0 at MASTER_ADDR:MASTER_PORT {self._launched.host}:{self._launched.port}"
        try:
            with self._reminding(f"{where}, which it can't reach; is it started?", deadline):
                link, _ = connect(
                    self._launched.host,
                    self._launched.port,
                    hello,
                    self._base.credentials,
                    deadline=deadline,
                    max_retries=None,
                )
        except Refused:
            raise
        except LinkError as error:
            raise LinkError(
                f"{where} could not be reached; is rank 0 started, and the port right? ({error})"
            ) from None
        try:
            roster = f"{where} to send the members; rank 0 names the ranks that are missing"
            with self._reminding(roster, deadline):
                members = receive(link, ROSTER, deadline)
        except LinkError as error:
            raise LinkError(
                f"{where} did not send the members; are all {self._world_size} ranks started? "
                f"({error})"
            ) from None
        finally:
            link.close()
        if len(members) != self._world_size:
            raise ConfigurationError(
                f"rank 0 has a world of {len(members)}, this rank one of {self._world_size}"
            )
        return members

    def _reminding(self, what: str, deadline: float) -> AbstractContextManager[None]:
        """Write lines about the wait for ``what`` while the body blocks, on one rank per
        machine."""
        text = "" if self._launched.local_rank else f"rank {self._rank} waits for {what}"
        return reminding(Reminder(lambda: text, deadline))


def world_rendezvous(world_size: int) -> Rendezvous[None]:
    """The rendezvous on rank 0, at which each other rank may arrive once."""

    def objection(hello: Hello) -> Refusal | None:
        rank = hello.rank
        if rendezvous.is_closed:
            return Refusal("closed", "the group has been formed with all its ranks")
        if hello.world_size != world_size:
            return Refusal(
                "world",
                f"rank 0 has WORLD_SIZE={world_size}, rank {rank} has {hello.world_size}; "
                "give all ranks the same WORLD_SIZE",
            )
        if not 0 < rank < world_size or hello.worker != str(rank):
            return Refusal("rank", f"rank {rank} is taken or outside 0 to {world_size - 1}")
        if rendezvous.knows(hello.worker):
            return Refusal("duplicate", f"another process has already connected as rank {rank}")
        return None

    rendezvous: Rendezvous[None] = Rendezvous(objection, read=lambda link: None)
    rendezvous.open()
    return rendezvous
