"""A communicator over another library (Gloo, NCCL, MPI).

Blocking calls of the library become Works with deadlines. Collectives run on one thread per group,
in the order of the calls. Messages are started by the caller, and a thread for each waits for its
end. The first error ends the group, since the libraries can't go on after an error either.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from potluck._core.backends.base import NUM_ASIDE_TAGS, Communicator, PointToPoint
from potluck._core.backends.library import ANY_SOURCE, FlatCall, Library, Waiter, exchange
from potluck._core.backends.serial_executor import BoundedWork, SerialExecutor
from potluck._core.background import start_thread
from potluck._core.checks import check_peer, check_within
from potluck._core.engine.arrays import reduction
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.request import NOTHING, FastPath, Request, checked_ranks
from potluck._core.engine.work import Work
from potluck._core.forks import Owner
from potluck._core.metrics import Metrics
from potluck._core.types import Group, ReduceOp
from potluck.errors import GroupClosed, GroupError, PotluckError

_CLOSE_S = 1.0


@dataclass(slots=True)
class _Resources:
    """The resources that a communicator and its sub-groups share."""

    metrics: Metrics
    owner: Owner = field(default_factory=lambda: Owner("this group"))
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Re-entrant: the garbage collector may release a sub-group at any moment."""
    works: dict[BoundedWork, None] = field(default_factory=dict)
    members: list[tuple[Library, SerialExecutor]] = field(default_factory=list)
    error: BaseException | None = None

    def release(self, member: tuple[Library, SerialExecutor]) -> None:
        if not self.owner.is_here:
            return
        with self.lock:
            if member not in self.members:
                return
            self.members.remove(member)
        library, executor = member
        executor.close(0.0)
        library.close(is_orderly=True)

    def begin(self, work: BoundedWork) -> BaseException | None:
        """Register ``work``; returns the error that ended the group, if it has ended."""
        with self.lock:
            if self.error is None:
                self.works[work] = None
            return self.error

    def end(self, work: BoundedWork) -> None:
        with self.lock:
            self.works.pop(work, None)
        work.finish()

    def fail(self, error: BaseException) -> None:
        """End the group by ``error``, which unfinished and later operations raise. Idempotent."""
        with self.lock:
            if self.error is None:
                self.error = error
            works = list(self.works)
            self.works.clear()
        for work in works:
            self.metrics.failed(work.call.partition("(")[0], type(self.error).__name__)
            work.finish(self.error)


class ExternalCommunicator:
    """One rank's access to a group of another library; see ``backends.base.Communicator``."""

    fast_path: FastPath | None = None

    def __init__(
        self, group: Group, library: Library, resources: _Resources, *, timeout_s: float
    ) -> None:
        self.group = group
        self.rank = library.rank
        self.world_size = library.world_size
        self.device = library.device
        self._library = library
        self._shared = resources
        self._timeout_s = timeout_s
        self._groups = itertools.count(1)
        self._executor = SerialExecutor(
            f"potluck-{library.name}-{len(resources.members)}", resources.fail
        )
        resources.members.append((library, self._executor))
        self._release: weakref.finalize[..., ExternalCommunicator] | None = None
        """Of a sub-group."""
        self._is_left = False

    @classmethod
    def open(
        cls, group: Group, library: Library, *, timeout_s: float, metrics: Metrics | None = None
    ) -> ExternalCommunicator:
        """The communicator of a whole group. ``timeout_s`` limits the creation of sub-groups."""
        meter = metrics or Metrics()
        meter.group(group.epoch, group.world_size)
        resources = _Resources(meter)
        library.listen(resources.fail)
        return cls(group, library, resources, timeout_s=timeout_s)

    def run(self, request: Request) -> Work:
        """See ``Communicator.run``."""
        self._check(request)
        operation, op = request.operation, request.op
        source, result = _flat(request.source), _flat(request.result)
        is_mean = op is ReduceOp.MEAN and self.world_size > 1
        combined = ReduceOp.SUM if op in (None, ReduceOp.MEAN) else op
        call = FlatCall(source, result, combined, request.root)
        own = self._library.collectives.get(operation)
        if op is not None:
            is_widened = is_mean and isinstance(source, np.ndarray) and source.dtype == np.float16
            within = np.dtype(np.float32) if is_widened else source.dtype
            if own is None or not self._library.can_reduce(combined, within):
                own = partial(exchange, self._library, operation)
        assert own is not None

        def carry_out(deadline: float) -> None:
            if not is_mean:
                own(call, deadline)
                return
            terms, divisor = _terms(call, self.world_size, request.source is request.result)
            own(terms, deadline)
            if result is not None:
                _divide(terms.result, divisor)
                if terms.result is not result:
                    result[...] = terms.result

        return self._collective(
            operation, request.described, request.result, carry_out, request.timeout_s
        )

    # -- point to point

    def send(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        self._check_tag(tag)
        return self._send(array, peer, tag, timeout_s=timeout_s)

    def recv(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        self._check_tag(tag)
        return self._recv(array, peer, tag, timeout_s=timeout_s)

    def aside(self) -> PointToPoint:
        return _Aside(self._send, self._recv, self._highest_tag + 1 if self._highest_tag else 0)

    def _send(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        check_peer(peer, self.rank, self.world_size)
        self._library.check_message(peer, tag)
        call = f"send({array.dtype}, shape {tuple(array.shape)}, to rank {peer}, tag {tag})"
        return self._message(
            call, array, lambda: self._library.send(array.reshape(-1), peer, tag), timeout_s
        )

    def _recv(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        if peer != ANY_SOURCE:
            check_peer(peer, self.rank, self.world_size)
        self._library.check_message(peer, tag)
        source = "any rank" if peer == ANY_SOURCE else f"rank {peer}"
        call = f"recv({array.dtype}, shape {tuple(array.shape)}, from {source}, tag {tag})"
        return self._message(
            call, array, lambda: self._library.recv(array.reshape(-1), peer, tag), timeout_s
        )

    # -- groups

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """See ``Communicator.subgroup``. Blocks until all ranks have called it, as in MPI."""
        chosen = checked_ranks(ranks, self.world_size)
        number = next(self._groups)
        made: list[Library | None] = []

        def run(deadline: float) -> None:
            made.append(self._library.split(chosen, number, deadline))

        self._collective("new_group", NOTHING, None, run, self._timeout_s).wait()
        library = made[0]
        if library is None:
            return None
        part = ExternalCommunicator(self.group, library, self._resources, timeout_s=self._timeout_s)
        # A sub-group has a thread and sockets of its own, released with the last reference to it.
        member = (library, part._executor)
        part._release = weakref.finalize(part, self._resources.release, member)
        part._release.atexit = False
        return part

    # -- lifetime

    @property
    def error(self) -> BaseException | None:
        return self._resources.error

    @property
    def metrics(self) -> Metrics:
        return self._resources.metrics

    def abort(self, error: PotluckError) -> None:
        if self._shared.owner.is_here and self._resources.error is None:
            self._library.tell(error)
            self._resources.fail(error)

    def close(self) -> None:
        if not self._shared.owner.is_here:
            return
        if self._release is not None:
            if not self._is_left:
                self._is_left = True
                self._executor.submit(self._release)  # after the calls under way
            return
        resources = self._resources
        deadline = time.monotonic() + _CLOSE_S
        is_orderly = resources.error is None
        with resources.lock:
            works = list(resources.works)
        for work in works:  # so that sent messages arrive
            is_orderly &= work.ends_within(max(0.0, deadline - time.monotonic()))
        resources.fail(GroupClosed("this group was closed here", epoch=self.group.epoch))
        members, resources.members = resources.members, []
        for library, executor in reversed(members):
            executor.close(max(0.0, deadline - time.monotonic()) if is_orderly else 0.0)
            library.close(is_orderly)

    # -- inside

    @property
    def _resources(self) -> _Resources:
        self._shared.owner.check()
        return self._shared

    def _collective(
        self,
        name: str,
        described: Array,
        result: Array | None,
        run: Callable[[float], None],
        timeout_s: float,
    ) -> Work:
        nbytes, started = described.nbytes, time.monotonic()
        call = f"{name}({described.dtype}, shape {tuple(described.shape)})"
        work = self._begin(call, result, started + timeout_s)

        def task() -> None:
            if work.done():
                return
            try:
                run(started + timeout_s)
            except BaseException as error:
                self._failed(error, call)
            else:
                seconds = time.monotonic() - started
                self._resources.metrics.observe(name, self._library.name, nbytes, seconds)
                self._resources.end(work)

        if not work.done():
            self._library.settle()
            self._executor.submit(task)
        return work

    def _message(
        self, call: str, array: Array, begin: Callable[[], Waiter], timeout_s: float
    ) -> Work:
        deadline = time.monotonic() + timeout_s
        work = self._begin(call, array, deadline)
        if work.done():
            return work
        try:
            self._library.settle()
            waiter = begin()
        except GroupError as error:
            self._failed(error, call)
            return work

        def wait() -> None:
            try:
                work.source = waiter(deadline)
            except BaseException as error:
                self._failed(error, call)
            else:
                self._resources.end(work)

        start_thread(wait, name=f"potluck-{call}", on_broken=self._resources.fail)
        return work

    def _begin(self, call: str, result: Any, deadline: float) -> BoundedWork:
        if self._is_left:
            raise GroupClosed("this sub-group was closed here", epoch=self.group.epoch)
        work = BoundedWork(call, result, deadline, self._resources.fail)
        error = self._resources.begin(work)
        if error is not None:
            work.finish(error)
        return work

    def _failed(self, error: BaseException, call: str) -> None:
        if isinstance(error, GroupError):
            told = type(error)(
                f"{call} in epoch {self.group.epoch}: {error}",
                rank=error.rank,
                epoch=self.group.epoch,
                operation=call,
                certain=error.certain,
            )
            told.__cause__ = error.__cause__
            error = told
        self._resources.fail(error)

    def _check(self, request: Request) -> None:
        """TypeError or ValueError for a request that this library can't carry out."""
        if request.encoding is not None:
            raise ValueError(
                f"codec={request.encoding.codec.name!r} needs potluck's own links, and this group "
                f"runs on {self._library.name}; omit the codec, or choose backend='ring'"
            )
        check_within("root", request.root, self.world_size)
        if request.op is not None and request.source is not None:
            reduction.check(request.op, _dtype_of(request.source))

    @property
    def _highest_tag(self) -> int:
        """Of a script's messages; those above are for ``aside``."""
        return max(0, self._library.tag_limit - NUM_ASIDE_TAGS)

    def _check_tag(self, tag: int) -> None:
        if tag > self._highest_tag:
            name, last = self._library.name, self._highest_tag
            if not last:
                raise ValueError(
                    f"messages of {name} have no tags, only an order: leave the tag at 0"
                )
            raise ValueError(f"tags of {name} end at {last}, not {tag}")


class _Aside:
    """Messages with the library's highest tags, or in the order of all where it has no tags."""

    def __init__(self, send: Callable[..., Work], recv: Callable[..., Work], first: int) -> None:
        self._send, self._recv, self._first = send, recv, first

    def send(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        return self._send(array, peer, self._tag(tag), timeout_s=timeout_s)

    def recv(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        return self._recv(array, peer, self._tag(tag), timeout_s=timeout_s)

    def _tag(self, tag: int) -> int:
        return self._first + tag if self._first else 0


def _terms(call: FlatCall, world_size: int, in_place: bool) -> tuple[FlatCall, float]:
    """The sum of which a mean is made, and by what to divide its result. No sum of finite terms
    overflows: they are divided by a power of two first, and those of float16 are in float32."""
    source, result = call.source, call.result
    assert source is not None
    dtype = _dtype_of(source)
    if dtype == np.float16:
        wide: Any = source.astype(np.float32) if isinstance(source, np.ndarray) else source.float()
        into = wide if in_place or result is None else wide[: len(result)] * 0
        into = None if result is None else into
        return call._replace(source=wide, result=into), world_size
    scale, terms = reduction.scale_of(dtype, world_size), source
    if not in_place:
        terms = source.copy() if isinstance(source, np.ndarray) else source.clone()
    _divide(terms, scale)
    return call._replace(source=terms), world_size / scale


def _divide(array: Any, divisor: float) -> None:
    """``reduction.divide``, of tensors as well."""
    if isinstance(array, np.ndarray):
        with np.errstate(all="ignore"):
            reduction.divide(array, divisor)
        return
    was_finite = array.isfinite()
    array /= divisor
    if divisor < 1:
        array.copy_(array.nan_to_num().where(was_finite & ~array.isfinite(), array))


def _dtype_of(array: Any) -> np.dtype[Any]:
    """Also of a tensor on a GPU."""
    return np.dtype(str(array.dtype).removeprefix("torch."))


def _flat(array: Any) -> Any:
    return None if array is None else array.reshape(-1)
