"""torch's Work and Future, made of one or more works of the engine.

Futures are completed by a small pool of threads, never by the progress loop: a callback of a future
(``then`` in a communication hook) may wait for another collective.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.autograd.profiler import record_function

from potluck._core.engine.work import Work
from potluck.errors import ForkedProcess


class ProfileRecord:
    """An asynchronous event of torch's profiler, with a name like ``potluck:all_reduce``, from the
    call of an operation to its end on another thread.

    Without shapes: torch lets only C++ code record shapes for an event that ends on another thread.
    """

    def __init__(self, name: str) -> None:
        self.ended = threading.Event()
        self._end: torch.futures.Future[None] = torch.futures.Future()
        with record_function(name) as event:
            event._call_end_callbacks_on_future(self._end)

    def end(self) -> None:
        """End the event, on any thread."""
        try:
            self._end.set_result(None)
        finally:
            self.ended.set()


_Class = TypeVar("_Class", bound=type)


def untraced(kind: _Class) -> _Class:
    """Exclude all plain methods of ``kind``, and the functions that they call, from torch.compile.

    While a compiled model runs, dynamo traces every Python frame, also a group's methods when
    torch's C++ code (DDP) calls them. It can't trace threads and sockets.
    """
    dynamo: Any = eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):  # older torch is refused later, in creation.py
        skip = dynamo._FrameAction.SKIP
        for value in vars(kind).values():
            if isinstance(value, types.FunctionType):
                strategy = dynamo._FrameExecStrategy(skip, skip)
                dynamo.set_code_exec_strategy(value.__code__, strategy)
    return kind


_NO_LIMIT = timedelta(0)


class Completions:
    """The threads that complete futures, started at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = False

    def submit(self, complete: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_closed:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(4, thread_name_prefix="potluck-future")
                self._pool.submit(complete)
                return
        complete()

    def close(self) -> None:
        """Join the threads. Later submissions run in the thread that submits."""
        with self._lock:
            self._is_closed = True
            pool = self._pool
        if pool is not None:
            pool.shutdown(wait=True)


@untraced
class GroupWork(dist.Work):
    """The work of an operation of a process group.

    ``wait`` returns True when ``tensors`` hold the result, or raises the error of the operation,
    for example ``PeerLost`` with the lost rank in ``rank``.
    """

    def __init__(
        self,
        works: Sequence[Work],
        tensors: Any,
        completions: Completions,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """``settle()`` copies the results from host memory to the caller's tensors."""
        super().__init__()
        self._works = works
        self._tensors = tensors
        self._completions = completions
        self._settle = settle
        self._lock = threading.Lock()
        self._future: GroupFuture | None = None
        self._record: ProfileRecord | None = None
        self.settles_itself = False
        """Whether ``settle`` waits for the works itself, to overlap them with its copies."""

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for the end of the operation, at most ``timeout`` (0: only the operation's
        deadline).

        The work's future, if there is one, is then complete, too.
        """
        try:
            self._finish(timeout)
        finally:
            if self._future is not None and self._has_ended():
                self._future.complete_now()
        return True

    def _finish(self, timeout: timedelta = _NO_LIMIT) -> None:
        seconds = timeout.total_seconds() if timeout else None
        if seconds is not None and seconds <= 0:
            seconds = None
        if not (self.settles_itself and seconds is None):
            for work in self._works:
                work.wait(seconds)
        if self._record is not None:
            self._record.ended.wait()
        self._settle_once()

    def _has_ended(self) -> bool:
        return all(work.done() for work in self._works)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended, also by an error; otherwise results are in place."""
        if not self._has_ended():
            return False
        if self.is_success():
            for work in self._works:
                work.wait()  # here what follows it is computed (``Work.then``)
            self._settle_once()
        return True

    def is_success(self) -> bool:
        return all(work.done() and work.exception() is None for work in self._works)

    def exception(self) -> BaseException | None:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[Tensor]:
        """Wait, and return the tensors that hold the result."""
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        """The rank, in the group, of the sender of the message that a receive got."""
        self.wait()
        return self._works[0].source

    _source_rank = source_rank

    def get_future(self) -> GroupFuture:
        """A future of the list of result tensors, or of the operation's error.

        If the operation has ended, the future is complete when it is returned, as with Gloo
        (torchft adds callbacks that must run immediately).
        """
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = GroupFuture(self)
        if torch._C._current_graph_task_id() != -1:
            # C++ code that waits for a future (torch's DDP) converts every error to its own. So a
            # callback of the present backward raises the original error just before that code
            # waits. The callback may also complete the future, which saves a switch between
            # threads.
            torch.autograd.Variable._execution_engine.queue_callback(future.end_backward)
        if self._has_ended():
            future.complete()
        else:
            self.when_done(lambda: self._completions.submit(future.complete))
        return future

    getFuture = get_future

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when all works have ended: on the progress loop, or now."""
        left = len(self._works)
        lock = threading.Lock()

        def one_less(_: Work) -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                callback()

        if not left:
            callback()
        for work in self._works:
            work.add_done_callback(one_less)

    def ends(self, record: ProfileRecord) -> None:
        """Let the profiler's event end with this work."""
        self._record = record
        self.when_done(lambda: self._completions.submit(record.end))

    def _settle_once(self) -> None:
        if self._settle is None:
            return
        with self._lock:
            if self._settle is not None:
                with torch.no_grad():
                    self._settle()
                self._settle = None


@untraced
class GroupFuture(torch.futures.Future[Any]):
    """The future of a GroupWork. A Python thread that waits for the future also completes it."""

    def __init__(self, work: GroupWork) -> None:
        super().__init__()
        self._work = work
        self._once = threading.Lock()

    def complete(self) -> None:
        """Set the outcome of the work, which has ended. Only the first call has an effect."""
        if not self._once.acquire(blocking=False):
            return
        try:
            self._work._finish()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(self._work._tensors)

    def complete_now(self) -> None:
        """Complete the future, or wait for the thread that completes it. Never raises."""
        self.complete()
        with contextlib.suppress(Exception):
            super().wait()

    def end_backward(self) -> None:
        """Wait for the work in the thread of the backward, and raise the work's error."""
        self._work.wait()

    def wait(self) -> Any:
        try:
            self._work.wait()
        except ForkedProcess:
            raise  # nobody completes the future here
        except Exception:
            pass  # the future raises it again below
        return super().wait()


def combine(works: Sequence[GroupWork], completions: Completions) -> GroupWork:
    """One work of several, which ends when all have ended."""

    def settle() -> None:
        for work in works:
            work.wait()

    tensors = [tensor for work in works for tensor in work._tensors]
    return GroupWork([each for work in works for each in work._works], tensors, completions, settle)
