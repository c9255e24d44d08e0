"""How a context gets its group and its communicator.

On potluck's own links: ``ring.py`` (a list of peers, no agent), ``discovery.py`` (processes that
find each other on the network, no agent), ``environment.py`` (the variables of torchrun, mpirun,
Slurm or Kubernetes), ``inprocess.py`` (threads of one process), ``agent.py`` (the agent that
started this worker), ``local.py`` (one worker, no network). On links of other libraries:
``torchdist/`` (Gloo and NCCL, through torch), ``mpi.py`` (mpi4py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from potluck.engine.arrays.layout import Array
from potluck.engine.mesh import Switchboard
from potluck.engine.request import FastPath, Request
from potluck.engine.work import Work
from potluck.errors import GroupError, PotluckError
from potluck.metrics import Metrics
from potluck.types import Group


class Communicator(Protocol):
    """One rank's access to one immutable group: the operations that a context needs.

    Arrays are C-contiguous; those of collectives may have any shape. Every operation returns a
    Work at once, has a deadline ``timeout_s`` after the call, and must be called by all ranks in
    the same order. After the first GroupError every call raises the same error. An encoding is for
    potluck's own links; others raise ValueError.
    ``engine.communicator`` is potluck's own; ``backends.external`` makes one of another library.
    """

    @property
    def group(self) -> Group:
        """The whole group; this communicator's ranks may be some of its members."""

    @property
    def rank(self) -> int:
        """This process's number among the ranks of this communicator."""

    @property
    def world_size(self) -> int:
        """How many ranks this communicator joins."""

    @property
    def device(self) -> str | None:
        """None: arrays are NumPy's. Else they are torch tensors on this device (``cuda:0``)."""

    @property
    def fast_path(self) -> FastPath | None:
        """A shorter way for blocking collectives, tried before ``run``; None: there is none now."""

    def run(self, request: Request) -> Work:
        """Begin a collective."""

    def send(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        """Send ``array`` to ``peer``; done when its memory may be reused."""

    def recv(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        """Fill ``array`` with a message of exactly its size; ``peer`` -1 takes any sender's.

        The work's ``source`` is then the sender's rank in this communicator.
        """

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some of the ranks, None on the others. Every rank must call it."""

    @property
    def error(self) -> BaseException | None:
        """Why the group is over, None while it is not."""

    @property
    def metrics(self) -> Metrics:
        """Counts of bytes, messages and seconds so far, by operation."""

    def abort(self, error: PotluckError) -> None:
        """End the group with ``error``, here and on every rank that can be reached."""

    def close(self) -> None:
        """Leave in order, within about a second. Idempotent."""


class Backend(Protocol):
    @property
    def elastic(self) -> bool:
        """Whether ``form`` can give another group after the first."""

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Communicator:
        """The communicator of the next group with an epoch above ``after_epoch``.

        Blocks until every member can be expected to come, at most ``timeout_s``. ``cause`` is why
        the last group ended, None if it was left in agreement. Raises PotluckError if there will
        be no such group.
        """

    def next_epoch(self) -> int:
        """The highest epoch announced so far; above the current one, a new group waits."""

    def begin_step(self, step: int) -> None:
        """Training step ``step`` begins (where a launcher may inject a fault)."""

    def report(self, facts: dict[str, Any]) -> None:
        """Report progress to the launcher; never blocks, never fails."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class StaticBackend:
    """What backends with one unchanging group have in common."""

    elastic = False
    switchboard: Switchboard | None = None
    """Delivers further links between this world's processes; None where there is one process."""

    def next_epoch(self) -> int:
        return 0

    def begin_step(self, step: int) -> None:
        return None

    def report(self, facts: dict[str, Any]) -> None:
        return None
