"""``TcpBase``: the listener and the communicators of a backend over TCP."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from potluck._core.cluster.trust.credentials import load_credentials
from potluck._core.collectives.plan import Operation
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.loop.native import engine_of
from potluck._core.engine.mesh import Mesh, Switchboard
from potluck._core.engine.request import Request
from potluck._core.metrics import Metrics
from potluck._core.settings import Settings
from potluck._core.transport.binding import address_for_others
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.listener import Limits, Listener, is_port_taken
from potluck._core.types import Engine, Group, Member
from potluck._core.waiting import Reminder, reminding
from potluck.errors import ConfigurationError, GroupError

_log = logging.getLogger(__name__)


class TcpBase:
    """The listener of this process, and its communicators, one after the other.

    If the listener breaks, the present group ends on all ranks with that error, and no other group
    can be opened, because no rank could connect to this process.
    """

    def __init__(
        self,
        host: str,
        port: int,
        settings: Settings,
        credentials: Credentials | None = None,
    ) -> None:
        self.settings = settings
        self.credentials = credentials or load_credentials(settings)
        self.metrics = Metrics()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._on_broken: Callable[[GroupError], None] | None = None
        self._mesh: Mesh | None = None
        self._newest: Callable[[], Communicator | None] = lambda: None
        self.listener = Listener(
            host or settings.bind,
            port,
            self.credentials,
            limits=Limits(settings.max_pending, settings.hello_timeout_s),
            use_shared_memory=settings.use_shared_memory,
            on_broken=self._broken,
        )
        self.switchboard = Switchboard(
            self.listener, self.credentials, wait_s=settings.connection_timeout_s
        )

    @classmethod
    def on_port_or_any(cls, host: str, port: int, settings: Settings) -> TcpBase:
        """Listen on ``port``, or on any free port if another program listens there."""
        try:
            return cls(host, port, settings)
        except ConfigurationError as error:
            if not is_port_taken(error):
                raise
            return cls(host, 0, settings)

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def address_for_others(self) -> str:
        """The address on which this process was told to listen; empty if on all."""
        return address_for_others(self.settings.bind)

    @property
    def engine(self) -> Engine:
        """The engine of this process."""
        return engine_of(self.credentials.is_native)

    def member(self, worker: str, host: str = "", local_rank: int = 0) -> Member:
        """This process as a member of a group."""
        return Member(
            worker,
            self.credentials.node_id,
            host,
            self.port,
            local_rank,
            self.engine,
            site=self.settings.site,
        )

    def open(self, group: Group, *, are_listening: bool = True) -> Communicator:
        """Open the communicator of ``group``; connections for earlier groups are refused then.

        ``are_listening``: all members listen, so a refused connection means that the member has
        died. Otherwise the member may not have been started yet, and this rank retries until the
        deadline. GroupError if the listener of this process has broken.
        """
        settings = self.settings
        with self._lock:
            if self._failure is not None:
                raise self._error(self._failure, group)
        mesh = Mesh(
            group,
            self.switchboard,
            connect_s=settings.peer_timeout_s,
            max_retries=settings.max_retries if are_listening else None,
            memory=(settings.shared_memory_slots, settings.shared_memory_slot_bytes)
            if settings.use_shared_memory
            else None,
        )
        self._mesh = mesh
        communicator = Communicator.open(
            group,
            mesh,
            metrics=self.metrics,
            segment_bytes=settings.segment_bytes,
            max_early_bytes=settings.max_early_bytes,
            use_shared_memory=settings.use_shared_memory,
        )
        with self._lock:
            self._newest = weakref.ref(communicator)
            failure = self._failure
        if failure is not None:
            communicator.abort(self._error(failure, group))
        return communicator

    def unreachable(self, epoch: int) -> frozenset[int]:
        """The ranks of the newest group, if that is of ``epoch``, to which no link could be made
        since they did not answer."""
        mesh = self._mesh
        if mesh is None or mesh.group.epoch != epoch:
            return frozenset()
        return mesh.unreachable()

    def open_linked(
        self,
        group: Group,
        timeout_s: float,
        *,
        are_listening: bool = True,
        missing: Callable[[Communicator], str] = lambda communicator: "",
    ) -> Communicator:
        """``open``, and wait until every pair of ranks has a link: from then on all ranks notice
        the death of a member. ``missing(communicator)`` describes the missing ranks for
        reminders."""
        communicator = self.open(group, are_listening=are_listening)
        try:
            meeting = communicator.run(
                Request(Operation.BARRIER, algorithm="direct", timeout_s=timeout_s)
            )
            deadline = time.monotonic() + timeout_s
            with reminding(Reminder(lambda: missing(communicator), deadline)):
                meeting.wait()
        except BaseException:
            communicator.close()
            raise
        return communicator

    def when_broken(self, on_broken: Callable[[GroupError], None]) -> None:
        """Call ``on_broken(error)`` when the listener breaks, on its thread; now if it has
        broken."""
        with self._lock:
            self._on_broken = on_broken
            failure = self._failure
        if failure is not None:
            on_broken(self._error(failure, None))

    def close(self) -> None:
        self.switchboard.close()

    def _broken(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = failure
            communicator, on_broken = self._newest(), self._on_broken
        error = self._error(failure, None if communicator is None else communicator.group)
        if communicator is not None:
            communicator.abort(error)
        if on_broken is not None:
            on_broken(error)

    def _error(self, failure: BaseException, group: Group | None) -> GroupError:
        me = "this worker" if group is None else group.describe(group.rank)
        error = GroupError(
            f"no rank can connect to {me} any more: {failure}. The script is not to blame: start "
            "it again, and please report this with the traceback in that worker's output",
            rank=-1 if group is None else group.rank,
            epoch=-1 if group is None else group.epoch,
        )
        error.__cause__ = failure
        return error


@contextlib.contextmanager
def taking_master_port(port: int) -> Iterator[None]:
    """Name MASTER_PORT in the error of a port that is taken."""
    try:
        yield
    except ConfigurationError as error:
        if not is_port_taken(error):
            raise
        raise ConfigurationError(
            f"rank 0 can't listen at MASTER_PORT={port}: another program does, maybe an earlier "
            "run that has not ended; set another MASTER_PORT on all ranks"
        ) from error
