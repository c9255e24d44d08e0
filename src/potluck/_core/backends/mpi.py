"""``MpiBackend``: MPI, through mpi4py, as the backend of a DistributedContext.

MPI's blocking calls have no deadline, so every call is started without blocking and polled until
its end or its deadline. Only one thread is in MPI at a time. When a rank dies, mpirun ends all
others.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from potluck._core import forks
from potluck._core.backends.base import StaticBackend
from potluck._core.backends.external import ExternalCommunicator
from potluck._core.backends.launchers import detect
from potluck._core.backends.library import ANY_SOURCE, Collective, FlatCall, Library, Waiter
from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.optional import require
from potluck._core.settings import Settings, load_settings
from potluck._core.types import Group, Member, ReduceOp
from potluck.errors import (
    ConfigurationError,
    Desync,
    GroupError,
    MissingDependency,
    OperationTimeout,
    PotluckError,
    RemoteError,
)

_EPOCH = 1
_NAME_BYTES = 256
_MAX_ERROR = 16 * 1024
_APT = ", and an MPI library (Debian, Ubuntu: apt-get install openmpi-bin)"

_GRACE_S = 5.0
_TURN_S = 0.3
"""Seconds that a rank of a failed group waits for the end of other ranks, and per rank before its
MPI_Abort."""

_SPIN_S = 0.001
_LONGEST_PAUSE_S = 0.001

_NATIVE = frozenset(
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
) | frozenset({"float32", "float64", "complex64", "complex128"})
_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)


class MpiBackend(StaticBackend[ExternalCommunicator]):
    """One rank of MPI_COMM_WORLD; start the script with mpirun.

    MissingDependency if mpi4py or an MPI library is missing, ConfigurationError if MPI sees
    another world than the launcher.
    """

    no_next_group = (
        "a group of MPI has no next group; start the script with `potluck run` to survive the loss "
        "of a worker"
    )

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings or load_settings()
        self._mpi = _load()
        world = self._mpi.COMM_WORLD
        launched = detect(environment)
        if launched is not None and launched.world_size != world.size:
            raise ConfigurationError(
                f"MPI sees a world of {world.size}, but {launched.launcher} started "
                f"{launched.world_size} ranks; start the script with the mpirun of the MPI library "
                "that mpi4py uses "
                f"({self._mpi.Get_library_version().splitlines()[0].split(',')[0]})"
            )

    def _form(self, timeout_s: float) -> ExternalCommunicator:
        state = _State(self._mpi)
        _states.append(state)
        library = _Mpi(state, self._mpi.COMM_WORLD.Dup())
        group = _meet(library, time.monotonic() + timeout_s)
        return ExternalCommunicator.open(group, library, timeout_s=timeout_s)


def _load() -> Any:
    """mpi4py's MPI, initialized for threads, and finalized by ``_finalize``."""
    is_first = "mpi4py.MPI" not in sys.modules
    mpi4py: Any = require("mpi4py", "mpi", also=_APT)
    if is_first:
        mpi4py.rc.finalize = False
        mpi4py.rc.thread_level = "serialized"
    try:
        mpi = require("mpi4py.MPI", "mpi", also=_APT)
    except MissingDependency:
        raise
    except (ImportError, RuntimeError) as error:
        raise MissingDependency(
            f"mpi4py finds no MPI library ({str(error).splitlines()[0]}); install one (Debian, "
            "Ubuntu: apt-get install openmpi-bin)"
        ) from error
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise ConfigurationError(
            "MPI was started for one thread only; import potluck before mpi4py, or set "
            "MPI4PY_RC_THREAD_LEVEL=serialized"
        )
    if is_first:
        forks.at_exit(partial(_finalize, mpi))
    return mpi


_unfinished: list[Any] = []
"""Abandoned requests with their arrays, into which MPI may still write."""

_states: list[_State] = []
_lock = threading.Lock()
"""Held by the thread that is in MPI."""


def _finalize(mpi: Any) -> None:
    """Leave MPI at the end of the process: by MPI_Finalize, or by MPI_Abort if a group has failed.

    MPI_Finalize waits for every rank, for ever if a rank never calls it, and mpirun waits for a
    rank that ends without it. So a failed job is aborted, after other ranks had time to see and
    report the error. All ranks first agree on one of the two: Open MPI's mpirun hangs or crashes if
    a rank aborts while another is in MPI_Finalize.
    """
    if mpi.Is_finalized():
        return
    error = getattr(sys, "last_value", None)  # the exception that ends this process
    if error is not None:
        for state in _states:
            state.tell_if_first(error)
    is_well = not _unfinished and not any(state.is_broken for state in _states)
    for state in _states[-1:]:
        is_well = state.agree(is_well)
    if is_well:
        _lock.acquire()
        mpi.Finalize()
        return
    for stream in (sys.stdout, sys.stderr):  # MPI_Abort would discard their buffers
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    _lock.acquire()  # never released, so that waiting threads stay out of MPI
    # A single abort is enough, and mpirun can hang if several ranks abort at the same time.
    time.sleep(min(mpi.COMM_WORLD.Get_rank() * _TURN_S, _GRACE_S))
    mpi.COMM_WORLD.Abort(1)


def _meet(library: _Mpi, deadline: float) -> Group:
    mine = np.zeros(_NAME_BYTES + 4, dtype=np.uint8)
    name = library.state.mpi.Get_processor_name().encode()[:_NAME_BYTES]
    mine[: len(name)] = np.frombuffer(name, dtype=np.uint8)
    gathered = np.zeros((library.world_size, len(mine)), dtype=np.uint8)
    gather = library.collectives[Operation.ALL_GATHER]
    gather(FlatCall(mine, gathered.reshape(-1)), deadline)
    nodes = [row[:_NAME_BYTES].tobytes().rstrip(b"\0").decode() for row in gathered]
    members = tuple(
        Member(str(rank), node=node, local_rank=nodes[:rank].count(node))
        for rank, node in enumerate(nodes)
    )
    return Group(_EPOCH, library.rank, members)


class _ErrorMessage(msgspec.Struct):
    """The error that ends the group, as one rank sends it to another."""

    text: str
    rank: int


class _State:
    """The state that all groups of a world share: its error, and the channel for error messages."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.channel = mpi.COMM_WORLD.Dup()
        self.tag_limit: int = self.channel.Get_attr(mpi.TAG_UB)
        self.error: PotluckError | None = None
        self.on_error: Callable[[PotluckError], None] | None = None
        self.is_broken = False
        """Whether a group of this world has ended by an error, on any rank."""

    def finish(self, start: Callable[[], Any], keep: object, deadline: float) -> Any:
        """Start a call and wait for its end; its status."""
        return self.wait(self.begin(start), keep, deadline)

    def begin(self, start: Callable[[], Any]) -> Any:
        with self._mpi_errors(), _lock:
            return start()

    def wait(self, request: Any, keep: object, deadline: float) -> Any:
        """Wait for the end of ``request``; its status. ``keep`` holds its arrays. OperationTimeout
        after ``deadline``; RemoteError if another rank has ended the group."""
        status = self.mpi.Status()
        began = time.monotonic()
        pause = 0.0
        while True:
            with self._mpi_errors(), _lock:
                if request.Test(status):
                    return status
                if pause:
                    self._hear()
            now = time.monotonic()
            if self.error is not None or now > deadline:
                _unfinished.append((request, keep))
                if self.error is not None:
                    raise self.error
                raise OperationTimeout("MPI has not ended it in time: a rank did not take part")
            pause = 0.0 if now - began < _SPIN_S else min(_LONGEST_PAUSE_S, pause + 1e-5)
            time.sleep(pause)  # MPI has no wait with a deadline

    def tell(self, error: PotluckError) -> None:
        """Send ``error`` to the other ranks; returns when MPI has taken the messages, or after 1
        s."""
        self.is_broken = True
        rank = self.channel.rank
        encoded = msgspec.msgpack.encode(_ErrorMessage(str(error), rank))
        data = np.frombuffer(encoded, dtype=np.uint8)
        peers = [peer for peer in range(self.channel.size) if peer != rank]
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(GroupError):
            for peer in peers:
                send = lambda peer=peer: self.channel.Isend([data, self.mpi.BYTE], peer)  # noqa: E731
                self.finish(send, data, deadline)

    def tell_if_first(self, error: BaseException) -> None:
        """Tell the other ranks ``error``, which ends this process, unless an error is known."""
        if not self.is_broken:
            text = f"rank {self.channel.rank} failed: {type(error).__name__}: {error}"
            self.tell(RemoteError(text[:_MAX_ERROR]))

    def agree(self, is_well: bool) -> bool:
        """The same answer on all ranks: True if ``is_well`` is True on every rank.

        A rank with True waits without a limit, as MPI_Finalize does. A rank with False waits at
        most ``_GRACE_S``. Never raises.
        """
        deadline = time.monotonic() + (math.inf if is_well else _GRACE_S)
        words = np.array([is_well], dtype=np.int32)
        with contextlib.suppress(GroupError):
            reduction = self.begin(
                lambda: self.channel.Iallreduce(self.mpi.IN_PLACE, words, op=self.mpi.MIN)
            )
            while time.monotonic() < deadline:
                with self._mpi_errors(), _lock:
                    if reduction.Test():
                        return bool(words[0])
                time.sleep(_LONGEST_PAUSE_S)  # as in wait()
        return False

    def _hear(self) -> None:
        status = self.mpi.Status()
        if self.error is not None or not self.channel.Iprobe(status=status):
            return
        count = status.Get_count(self.mpi.BYTE)
        data = bytearray(count)
        self.channel.Recv([data, self.mpi.BYTE], status.source)  # does not block: it has arrived
        message = msgspec.msgpack.decode(data, type=_ErrorMessage)
        self.is_broken = True
        self.error = RemoteError(message.text, rank=message.rank)
        if self.on_error is not None:
            self.on_error(self.error)

    @contextlib.contextmanager
    def _mpi_errors(self) -> Any:
        try:
            yield
        except self.mpi.Exception as error:
            if error.Get_error_class() == self.mpi.ERR_TRUNCATE:
                raise Desync("MPI received a message that is longer than its array") from error
            raise GroupError(f"MPI says: {error.Get_error_string()}") from error


class _Mpi:
    """One MPI communicator as a ``Library``."""

    name = "mpi"
    device: str | None = None

    def __init__(self, state: _State, comm: Any, is_part: bool = False) -> None:
        self.state = state
        self.rank: int = comm.rank
        self.world_size: int = comm.size
        self.tag_limit = state.tag_limit
        self._comm = comm
        self._is_part = is_part
        self._byte = state.mpi.BYTE
        self.collectives: dict[Operation, Collective] = {
            operation: partial(self._run, begin) for operation, begin in self._table().items()
        }

    def can_reduce(self, op: ReduceOp, dtype: Any) -> bool:
        """See ``Library``. False for MIN and MAX of floats, where MPI drops NaN."""
        return dtype.name in _NATIVE and op in _OPS and (op not in _ORDERED or dtype.kind in "iu")

    def _table(self) -> dict[Operation, Callable[[FlatCall], Any]]:
        """The functions that start each operation. Operations without a reduction use bytes."""
        comm, own, data, op = self._comm, self.state.mpi.IN_PLACE, self._bytes, self._op
        return {
            Operation.ALL_REDUCE: lambda c: comm.Iallreduce(own, c.result, op(c.op)),
            Operation.REDUCE: lambda c: comm.Ireduce(
                c.source if c.result is None else own, c.result, op(c.op), c.root
            ),
            Operation.REDUCE_SCATTER: lambda c: comm.Ireduce_scatter_block(
                c.source, c.result, op(c.op)
            ),
            Operation.ALL_GATHER: lambda c: comm.Iallgather(data(c.source), data(c.result)),
            Operation.BROADCAST: lambda c: comm.Ibcast(data(c.source), c.root),
            Operation.SCATTER: lambda c: comm.Iscatter(data(c.source), data(c.result), c.root),
            Operation.GATHER: lambda c: comm.Igather(data(c.source), data(c.result), c.root),
            Operation.ALL_TO_ALL: lambda c: comm.Ialltoall(data(c.source), data(c.result)),
            Operation.BARRIER: lambda c: comm.Ibarrier(),
        }

    # -- messages

    def settle(self) -> None:
        return None

    def check_message(self, peer: int, tag: int) -> None:
        return None

    def send(self, array: Array, peer: int, tag: int) -> Waiter:
        request = self.state.begin(lambda: self._comm.Isend(self._bytes(array), peer, tag))

        def wait(deadline: float) -> int:
            self.state.wait(request, array, deadline)
            return peer

        return wait

    def recv(self, array: Array, peer: int, tag: int) -> Waiter:
        source = self.state.mpi.ANY_SOURCE if peer == ANY_SOURCE else peer
        request = self.state.begin(lambda: self._comm.Irecv(self._bytes(array), source, tag))

        def wait(deadline: float) -> int:
            status = self.state.wait(request, array, deadline)
            count = status.Get_count(self._byte)
            if count != array.nbytes:
                raise Desync(
                    f"rank {status.source} sent a message of {count} bytes for an array of "
                    f"{array.nbytes}",
                    rank=status.source,
                )
            source: int = status.source
            return source

        return wait

    # -- groups and lifetime

    def split(self, ranks: tuple[int, ...], number: int, deadline: float) -> Library | None:
        barrier = self.collectives[Operation.BARRIER]
        # Create has no deadline, and would wait for ever for a missing rank.
        barrier(FlatCall(None, None), deadline)
        with _lock:
            comm = self._comm.Create(self._comm.Get_group().Incl(ranks))
        return None if comm == self.state.mpi.COMM_NULL else _Mpi(self.state, comm, is_part=True)

    def listen(self, on_error: Callable[[PotluckError], None]) -> None:
        self.state.on_error = on_error

    def tell(self, error: PotluckError) -> None:
        self.state.tell(error)

    def close(self, is_orderly: bool) -> None:
        # Freeing a communicator is a collective call; MPI_Finalize frees it as well.
        self.state.is_broken |= not is_orderly

    # -- inside

    def _run(self, begin: Callable[[FlatCall], Any], call: FlatCall, deadline: float) -> None:
        self.state.finish(lambda: begin(call), call, deadline)

    def _bytes(self, array: Array | None) -> list[Any] | None:
        return None if array is None else [array.view(np.uint8), self._byte]

    def _op(self, op: ReduceOp) -> Any:
        return getattr(self.state.mpi, _OPS[op])
