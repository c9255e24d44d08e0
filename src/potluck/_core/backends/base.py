"""Backends: the interface by which a context gets its group and its communicator.

On potluck's own links: ``ring.py`` (a list of peers, no agent), ``discovery.py`` (processes that
find each other on the network, no agent), ``environment.py`` (the variables of torchrun, mpirun,
Slurm or Kubernetes), ``inprocess.py`` (threads of one process), ``agent.py`` (the agent that
started this worker), ``local.py`` (one worker, no network). On links of other libraries:
``torchdist/`` (Gloo and NCCL, through torch), ``mpi.py`` (mpi4py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from potluck._core.backends.service_transport import ServiceTransport, TcpServiceTransport
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.mesh import Switchboard
from potluck._core.engine.request import FastPath, Request
from potluck._core.engine.work import Work
from potluck._core.metrics import Metrics
from potluck._core.types import Group, Member
from potluck.errors import ConfigurationError, GroupError, PotluckError

NUM_ASIDE_TAGS = 4096


class PointToPoint(Protocol):
    """Messages between the ranks of a group, told apart by their tags."""

    def send(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        """Send ``array`` to ``peer``; the work ends when the memory may be reused."""

    def recv(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        """Receive a message of exactly the size of ``array`` from ``peer``, or from any rank if
        ``peer`` is -1.

        The work's ``source`` is the rank of the sender in this communicator.
        """


class Communicator(PointToPoint, Protocol):
    """One rank's access to an immutable group: the operations that a context needs.

    Arrays are C-contiguous; those of collectives may have any shape. Every operation returns a
    Work immediately, has a deadline ``timeout_s`` seconds after the call, and must be called by all
    ranks in the same order. After the first GroupError every call raises the same error. Encodings
    need potluck's own links; other communicators raise ValueError. Implemented by
    ``engine.communicator`` (potluck) and ``backends.external`` (other libraries).
    """

    @property
    def group(self) -> Group:
        """The whole group; the ranks of a sub-group's communicator are some of its members."""

    @property
    def rank(self) -> int:
        """The rank of this process in this communicator."""

    @property
    def world_size(self) -> int:
        """The number of ranks of this communicator."""

    @property
    def device(self) -> str | None:
        """The device of arrays: torch tensors on that device (``cuda:0``); None: NumPy arrays."""

    @property
    def fast_path(self) -> FastPath | None:
        """A fast path for blocking collectives, tried before ``run``; None if there is none now."""

    def run(self, request: Request) -> Work:
        """Start a collective."""

    def aside(self) -> PointToPoint:
        """Messages of potluck's own between the same ranks, with the tags 0 to NUM_ASIDE_TAGS - 1,
        which no message of a script matches."""

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of ``ranks``; None on other ranks. A collective call. Its ``close``, or
        the last reference to it, releases what it holds, and touches no other group."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended the group; None while it is intact."""

    @property
    def metrics(self) -> Metrics:
        """The metrics of the group's calls and links."""

    def abort(self, error: PotluckError) -> None:
        """End the group with ``error``, here and on every rank that can be reached."""

    def close(self) -> None:
        """Leave the group; takes at most about a second. Idempotent."""


class Backend(Protocol):
    @property
    def elastic(self) -> bool:
        """Whether ``form`` can form another group after the first."""

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Communicator:
        """The communicator of the next group with an epoch above ``after_epoch``.

        Blocks until all members are known, at most ``timeout_s`` seconds. ``cause`` is the error
        that ended the previous group, None if its members agreed to leave it. PotluckError if there
        will be no such group.
        """

    @property
    def service_transport(self) -> ServiceTransport | None:
        """Connections to and from services; None on links of other libraries."""

    def next_epoch(self) -> int:
        """The highest epoch of a group that this worker was told of so far; if it is above the
        present epoch, a new group waits."""

    def next_members(self) -> tuple[Member, ...]:
        """The members of that group; none if no group was told of beside the first."""

    def begin_step(self, step: int) -> None:
        """Note the start of a training step, where a launcher may inject a fault."""

    def report(self, facts: dict[str, Any]) -> None:
        """Report facts to the launcher. Never blocks and never raises."""

    def close(self) -> None:
        """Release all resources. Idempotent."""


Own = TypeVar("Own", bound=Communicator)


class StaticBackend(Generic[Own]):
    """The base of backends with a single, fixed group."""

    elastic = False
    no_next_group: str
    """Why there is no second group, and what to do."""
    switchboard: Switchboard | None = None
    """Delivers other links between this world's processes; None in a world of one process."""

    @property
    def service_transport(self) -> ServiceTransport | None:
        """Connections to and from services; None in a world without a listener of its own."""
        return None if self.switchboard is None else TcpServiceTransport(self.switchboard)

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Own:
        """The communicator of the only group; ConfigurationError for another."""
        if after_epoch:
            raise ConfigurationError(self.no_next_group) from cause
        return self._form(timeout_s)

    def _form(self, timeout_s: float) -> Own:
        raise NotImplementedError

    def next_epoch(self) -> int:
        return 0

    def next_members(self) -> tuple[Member, ...]:
        return ()

    def begin_step(self, step: int) -> None:
        return None

    def report(self, facts: dict[str, Any]) -> None:
        return None

    def close(self) -> None:
        return None
