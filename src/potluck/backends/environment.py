"""``EnvironmentBackend``: the world that a launcher's variables describe, on potluck's own links.

The launcher is torchrun, mpirun, Slurm, Kubernetes, or a user who sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT (``launchers.py``). Rank 0 listens at MASTER_ADDR:MASTER_PORT. The
others call there, say where they listen, and get the roster of all members once everyone has
called. After that all links are between peers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from potluck.backends.base import StaticBackend
from potluck.backends.launchers import read_seat
from potluck.backends.places import placed
from potluck.backends.rendezvous import meet
from potluck.backends.tcp import TcpBase, taking_master_port
from potluck.engine.communicator import Communicator
from potluck.errors import ConfigurationError, GroupError, LinkError, OperationTimeout, Refused
from potluck.settings import Settings, load_settings
from potluck.transport.blocking import receive, send_all
from potluck.transport.handshake import connect
from potluck.transport.listener import Admission
from potluck.transport.tcp import TcpLink
from potluck.types import Group, Member
from potluck.waiting import Reminder, reminding
from potluck.wire.messages import Hello, Refusal, Welcome
from potluck.wire.roster import ROSTER, checked

_EPOCH = 1
_CHECK = "are all ranks started, with the same MASTER_ADDR and MASTER_PORT?"


class EnvironmentBackend(StaticBackend):
    """One rank of a fixed group described by environment variables.

    ConfigurationError names the variable that is missing or can't be read.
    """

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings or load_settings()
        self._seat = seat = read_seat(environment)
        self._rank, self._world_size = seat.rank, seat.world_size
        is_host = seat.rank == 0 and not seat.uses_agent_store
        if is_host:
            with taking_master_port(seat.port):
                self._base = TcpBase("", seat.port, self._settings)
        else:
            self._base = TcpBase("", 0, self._settings)
        self.switchboard = self._base.switchboard

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Communicator:
        if after_epoch >= _EPOCH:
            raise ConfigurationError(
                "a group made from environment variables has no next group; start the script with "
                "`potluck run` to survive the loss of a worker"
            ) from cause
        if self._seat.uses_agent_store:
            return self._base.open(self._meet(timeout_s))
        deadline = time.monotonic() + timeout_s
        members = self._host(deadline) if self._rank == 0 else self._call(deadline)
        return self._base.open(Group(_EPOCH, self._rank, members))

    def _meet(self, timeout_s: float) -> Group:
        """Under torchrun: its own store listens at MASTER_PORT, so the ranks meet in that."""
        from potluck.backends.torchdist.store import open_store

        return meet(
            open_store(self._seat, timeout_s),
            self._rank,
            self._world_size,
            base=self._base,
            local_rank=self._seat.local_rank,
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        self._base.close()

    # -- rank 0

    def _host(self, deadline: float) -> tuple[Member, ...]:
        rendezvous = _Rendezvous(self._world_size)
        self._base.switchboard.answer("rendezvous", rendezvous.admit)
        try:
            links = rendezvous.wait(deadline, f"{self._seat.host}:{self._seat.port}")
            me = Member(
                "0",
                node=self._base.credentials.node_id,
                host=self._seat.host,
                port=self._base.port,
                local_rank=self._seat.local_rank,
            )
            members = (me, *(rendezvous.members[rank] for rank in sorted(rendezvous.members)))
            roster = ROSTER.encode(members)
            for link in links:
                send_all(link, roster, deadline)
            return members
        finally:
            rendezvous.close()

    # -- the others

    def _call(self, deadline: float) -> tuple[Member, ...]:
        hello = Hello(
            kind="rendezvous",
            namespace=self._base.credentials.namespace,
            rank=self._rank,
            to_rank=0,
            worker=str(self._rank),
            port=self._base.port,
            world_size=self._world_size,
            local_rank=self._seat.local_rank,
        )
        where = f"rank 0 at MASTER_ADDR:MASTER_PORT {self._seat.host}:{self._seat.port}"
        try:
            with self._reminding(f"{where}, which it can't reach; is it started?", deadline):
                link, _ = connect(
                    self._seat.host,
                    self._seat.port,
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
            ) from error
        try:
            others = f"{where} to tell who is in; it names the ranks that have not called it yet"
            with self._reminding(others, deadline):
                members = checked(receive(link, ROSTER, deadline))
        except LinkError as error:
            raise LinkError(
                f"{where} did not tell who is in; are all {self._world_size} ranks started? "
                f"({error})"
            ) from error
        finally:
            link.close()
        if len(members) != self._world_size:
            raise ConfigurationError(
                f"rank 0 has a world of {len(members)}, this rank one of {self._world_size}"
            )
        return members

    def _reminding(self, what: str, deadline: float) -> AbstractContextManager[None]:
        """Say what this rank waits for while the body blocks; one rank of each machine does."""
        text = "" if self._seat.local_rank else f"rank {self._rank} waits for {what}"
        return reminding(Reminder(lambda: text, deadline))


class _Rendezvous:
    """Rank 0's list of who has called."""

    def __init__(self, world_size: int) -> None:
        self.members: dict[int, Member] = {}
        self._world_size = world_size
        self._changed = threading.Condition()
        self._links: dict[int, TcpLink] = {}
        self._is_closed = False

    def admit(self, hello: Hello, node: str) -> Admission:
        world, rank = self._world_size, hello.rank
        with self._changed:
            if self._is_closed:
                return _refuse("closed", "everyone is in; the group has been formed")
            if hello.world_size != world:
                return _refuse(
                    "world",
                    f"rank 0 has WORLD_SIZE={world}, rank {rank} has {hello.world_size}; "
                    "give all ranks the same",
                )
            if not 0 < hello.port < 65536:
                return _refuse("port", f"rank {rank} listens nowhere: {hello.port} is no port")
            if not 0 < rank < world:
                return _refuse("rank", f"rank {rank} is taken or outside 0 to {world - 1}")
            if rank in self.members:
                return _refuse("duplicate", f"rank {rank} has called already from another process")
            self.members[rank] = Member(
                str(rank), node=node, port=hello.port, local_rank=hello.local_rank
            )
        return Admission(
            Welcome(rank=0), lambda link: self._take(rank, link), lambda: self._withdraw(rank)
        )

    def _take(self, rank: int, link: TcpLink) -> None:
        with self._changed:
            if self._is_closed:
                link.close()
                return
            member = self.members[rank]
            self.members[rank] = Member(
                member.worker,
                node=member.node,
                host=link.peer_host,
                port=member.port,
                local_rank=member.local_rank,
            )
            self._links[rank] = link
            self._changed.notify_all()

    def _withdraw(self, rank: int) -> None:
        """``rank`` hung up before it was told that it is in; it may call again."""
        with self._changed:
            if rank not in self._links:
                self.members.pop(rank, None)

    def wait(self, deadline: float, where: str) -> list[TcpLink]:
        """The links of all others, once all have called ``where``, the master's address."""
        reminder = Reminder(
            lambda: f"rank 0 waits at {where} for {self._missing()}; {_CHECK}", deadline
        )
        with self._changed:
            while len(self._links) < self._world_size - 1:
                if reminder.is_overdue:
                    raise OperationTimeout(
                        f"{self._missing()} did not call rank 0 in time at {where}; {_CHECK}"
                    )
                self._changed.wait(reminder.patience())
                reminder.tick()
            return list(self._links.values())

    def _missing(self) -> str:
        missing = set(range(1, self._world_size)) - set(self._links)
        return f"{placed(missing)} (of {self._world_size} ranks)"

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for link in self._links.values():
                link.close()


def _refuse(code: str, reason: str) -> Admission:
    return Admission(Refusal(code, reason))
