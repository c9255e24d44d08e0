"""``AutoDiscoveryBackend``: scripts that find each other on the network, without an agent.

Each process listens, makes itself known by all ways of ``cluster.discovery``, and calls whoever it
hears of (``discovery_search.py``). Who holds the cluster's secret answers with its random id. The
process with the lowest id becomes rank 0: the others ask it to form the group, and it tells all of
them who is in.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections.abc import Callable, Sequence

from potluck.backends.base import StaticBackend
from potluck.backends.discovery_search import JOIN, MEET, Peer, Search, welcome_guest
from potluck.backends.tcp import TcpBase, is_port_taken
from potluck.cluster.discovery.advert import new_instance
from potluck.cluster.discovery.everywhere import all_finders
from potluck.cluster.discovery.finder import Finder
from potluck.engine.communicator import Communicator
from potluck.errors import ConfigurationError, GroupError, LinkError, OperationTimeout, Refused
from potluck.service import why
from potluck.settings import Settings, load_settings
from potluck.transport.blocking import receive, send_all
from potluck.transport.handshake import connect
from potluck.transport.listener import Admission
from potluck.transport.tcp import TcpLink
from potluck.types import Group, Member
from potluck.wire.messages import Hello, Refusal, Welcome
from potluck.wire.roster import ROSTER, checked

_EPOCH = 1
_AGAIN_S = 0.05


class AutoDiscoveryBackend(StaticBackend):
    """One rank of a group of ``world_size`` processes that find each other on the network.

    ``world_size`` defaults to POTLUCK_MIN_PEERS. All processes of the group must be given the same
    number and hold the cluster's secret. ``finders`` defaults to what POTLUCK_DISCOVERY names.
    Listens on ``port`` (0: any free one); by default on POTLUCK_GRADIENT_PORT, where POTLUCK_PEERS
    leads unless it names another, or on any free port if that is taken. ConfigurationError if a
    setting can't be used.
    """

    def __init__(
        self,
        world_size: int | None = None,
        *,
        settings: Settings | None = None,
        finders: Sequence[Finder] | None = None,
        port: int | None = None,
    ) -> None:
        self._settings = settings or load_settings()
        self.world_size = self._settings.min_peers if world_size is None else world_size
        if self.world_size < 1:
            raise ConfigurationError(f"a world has at least one process, not {self.world_size}")
        default_port = self._settings.gradient_port or self._settings.discovery_port
        ways = all_finders(self._settings, default_port) if finders is None else list(finders)
        self._base = self._listening(port)
        self._instance = new_instance()
        self._changed = threading.Condition()
        self._peers: dict[str, Peer] = {}
        self._broken: BaseException | None = None
        self._hall = _Hall(self.world_size)
        self._base.switchboard.answer(
            MEET, lambda hello, node: welcome_guest(hello, node, self._instance, self._found)
        )
        self._base.switchboard.answer(JOIN, self._hall.admit)
        self._search = Search(
            self._base.credentials,
            self._instance,
            self._base.port,
            ways,
            self._found,
            self._search_broke,
        )

    def _listening(self, port: int | None) -> TcpBase:
        if port is not None:
            return TcpBase("", port, self._settings)
        try:
            return TcpBase("", self._settings.gradient_port, self._settings)
        except ConfigurationError as error:
            if not is_port_taken(error):
                raise
            return TcpBase("", 0, self._settings)

    @property
    def port(self) -> int:
        """The TCP port this process listens on."""
        return self._base.port

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The other processes found so far, in the order of their ids."""
        with self._changed:
            return tuple(sorted(self._peers.values()))

    def wait_for_peers(self, n: int, timeout: float) -> tuple[Peer, ...]:
        """Block until at least ``n`` other processes are found; all that are found then.

        OperationTimeout says how many were found in ``timeout`` seconds, and what to look at.
        LinkError if the search itself has broken.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._broken or len(self._peers) >= n, timeout)
            found = len(self._peers)
            if found >= n:
                return tuple(sorted(self._peers.values()))
            if self._broken is not None:
                raise LinkError(
                    f"the search for other processes broke ({why(self._broken)}) when {found} of "
                    f"{n} were found. Start this process again, or name all addresses with "
                    "backend='ring'; please report this with the traceback above"
                ) from self._broken
        raise OperationTimeout(
            f"{found} of {n} other processes were found in {timeout:g} s. Do they run, on the same "
            "network, with the same cluster secret? Where multicast is blocked, write addresses "
            f"down: POTLUCK_PEERS=host:port,...{self._search.complaint()}",
            operation="wait_for_peers",
        )

    def establish_ring(self, timeout: float | None = None) -> Communicator:
        """The communicator of all ``world_size`` processes, once they have found each other.

        Rank 0 is the process with the lowest id; the others follow in the order of theirs. Blocks
        at most ``timeout`` seconds (POTLUCK_PEER_TIMEOUT_S); OperationTimeout if not all came,
        ConfigurationError if rank 0 gathers a world of another size.
        """
        return self.form(0, None, self._settings.peer_timeout_s if timeout is None else timeout)

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Communicator:
        if after_epoch >= _EPOCH:
            raise ConfigurationError(
                "a group found by discovery has no next group; start the script with `potluck run` "
                "to survive the loss of a worker"
            ) from cause
        deadline = time.monotonic() + timeout_s
        self.wait_for_peers(self.world_size - 1, timeout_s)
        names, members = self._agree(deadline)
        self._search.close()
        rank = names.index(self._instance.hex())
        communicator = self._base.open(Group(_EPOCH, rank, members))
        try:
            left = max(0.1, deadline - time.monotonic())
            communicator.barrier(algorithm="direct", timeout_s=left).wait()
        except BaseException:
            communicator.close()
            raise
        return communicator

    def close(self) -> None:
        self._search.close()
        self._hall.close()
        self._base.close()

    def _found(self, peer: Peer) -> None:
        with self._changed:
            self._peers[peer.instance] = peer
            self._changed.notify_all()

    def _search_broke(self, error: BaseException) -> None:
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    def _is_first(self) -> bool:
        peers = self.peers
        return not peers or self._instance.hex() < peers[0].instance

    def _agree(self, deadline: float) -> tuple[list[str], tuple[Member, ...]]:
        """The ids of all members and the members, both in rank order."""
        failure = "nobody was found"
        while time.monotonic() < deadline:
            if self._is_first():
                me = Member(self._instance.hex(), self._base.credentials.node_id, "", self.port)
                roster = self._hall.gather(me, deadline, self._is_first)
                if roster is not None:
                    return _ranked(roster, "")
                failure = "a process with a lower id was found late"
                continue
            first = self.peers[0]
            try:
                return _ranked(self._ask(first, deadline), first.host)
            except LinkError as error:
                failure = str(error)
                if isinstance(error, Refused) and error.code == "world":
                    raise ConfigurationError(failure) from error
                if not isinstance(error, Refused):
                    with self._changed:
                        self._peers.pop(first.instance, None)
                    self._search.lost(first.instance)
            with self._changed:
                self._changed.wait(_AGAIN_S)
        raise OperationTimeout(
            f"no group of {self.world_size} processes came about in time: {failure}",
            operation="establish_ring",
        )

    def _ask(self, first: Peer, deadline: float) -> tuple[Member, ...]:
        """Ask ``first`` who is in; blocks until it knows."""
        mine = self._instance.hex()
        hello = Hello(
            JOIN,
            self._base.credentials.namespace,
            worker=mine,
            port=self.port,
            world_size=self.world_size,
        )
        link, _ = connect(
            first.host, first.port, hello, self._base.credentials, deadline=deadline, max_retries=0
        )
        with contextlib.closing(link):
            members = checked(receive(link, ROSTER, deadline))
        if mine not in {member.worker for member in members}:
            raise LinkError(f"{first.host} formed a group without this process")
        return members


class _Hall:
    """Where the others wait, at the process with the lowest id, until all have come."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._changed = threading.Condition()
        self._guests: dict[str, tuple[Member, TcpLink]] = {}
        self._is_open = False
        self._is_full = False

    def admit(self, hello: Hello, node: str) -> Admission:
        """A process asks to be told who is in."""
        with self._changed:
            if self._is_full:
                return _refuse("full", "the group has been formed without this process")
            if hello.world_size != self._world_size:
                return _refuse(
                    "world",
                    f"the process with the lowest id wants a world of {self._world_size}, this one "
                    f"of {hello.world_size}; give all the same number",
                )
            if not self._is_open:
                return _refuse("not_ready", "that process does not gather a group yet")
            if not 0 < hello.port < 65536 or not hello.worker:
                return _refuse("port", "that process listens nowhere")
        return Admission(Welcome(), lambda link: self._take(hello, node, link))

    def gather(
        self, me: Member, deadline: float, is_first: Callable[[], bool]
    ) -> tuple[Member, ...] | None:
        """Wait for all, tell all who is in. None if a process with a lower id turned up."""
        with self._changed:
            self._is_open = True
            while len(self._guests) < self._world_size - 1:
                if not is_first() or time.monotonic() >= deadline:
                    self._is_open = False
                    self._send_away()
                    return None
                self._changed.wait(_AGAIN_S)
            self._is_full = True
            guests = dict(self._guests)
        members = (me, *(member for _, (member, _) in sorted(guests.items())))
        roster = ROSTER.encode(members)
        for _, link in guests.values():
            with contextlib.closing(link):
                send_all(link, roster, deadline)
        return members

    def close(self) -> None:
        with self._changed:
            self._is_open, self._is_full = False, True
            self._send_away()

    def _take(self, hello: Hello, node: str, link: TcpLink) -> None:
        member = Member(hello.worker, node, link.peer_host, hello.port)
        with self._changed:
            if not self._is_open or self._is_full:
                link.close()
                return
            old = self._guests.get(hello.worker)
            if old is not None:
                old[1].close()
            self._guests[hello.worker] = (member, link)
            self._changed.notify_all()

    def _send_away(self) -> None:
        for _, link in self._guests.values():
            link.close()
        self._guests.clear()


def _ranked(members: tuple[Member, ...], first_host: str) -> tuple[list[str], tuple[Member, ...]]:
    """Ids and members, with ranks for names; what is on the first one's machine is called there."""
    seen: dict[str, int] = {}
    ranked = []
    for rank, member in enumerate(members):
        local_rank = seen[member.node] = seen.get(member.node, -1) + 1
        host = member.host
        if first_host and (not host or _is_loopback(host)):
            host = first_host
        ranked.append(
            Member(str(rank), node=member.node, host=host, port=member.port, local_rank=local_rank)
        )
    return [member.worker for member in members], tuple(ranked)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _refuse(code: str, reason: str) -> Admission:
    return Admission(Refusal(code, reason))
