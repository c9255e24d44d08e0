"""Background threads and tasks whose failure is reported.

The caller that starts a thread or task passes a function that is called if it ends by an exception.
Otherwise the parts that depend on it would wait without end, and blame another part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

OnBroken = Callable[[BaseException], None]
"""``on_broken(error)`` is called on the thread or event loop that failed. It must not block."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def start_thread(run: Callable[[], None], *, name: str, on_broken: OnBroken) -> threading.Thread:
    """Start a daemon thread that runs ``run()``. If that raises, the traceback is logged and
    ``on_broken(error)`` called. RuntimeError if the system can't create a thread."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            _log.exception("the thread %s broke", name)
            on_broken(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.__dict__["pydev_do_not_trace"] = True  # runs on while debugpy stops the script's threads
    thread.start()
    return thread


def start_task(
    run: Callable[[], Coroutine[Any, Any, None]], *, name: str, on_broken: OnBroken
) -> asyncio.Task[None]:
    """Start a task of the running event loop. If it raises, the traceback is logged and
    ``on_broken(error)`` called; a cancelled task is no failure."""

    async def guarded() -> None:
        try:
            await run()
        except Exception as error:
            _log.exception("the task %s broke", name)
            on_broken(error)

    return asyncio.get_running_loop().create_task(guarded(), name=name)


async def stop(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel ``tasks`` (None is ignored), and wait for their end. Their exceptions are dropped."""
    present = [task for task in tasks if task is not None]
    for task in present:
        task.cancel()
    await asyncio.gather(*present, return_exceptions=True)


async def in_thread(call: Callable[..., T], *given: object) -> T:
    """``call(*given)`` in a thread. Cancelled, this ends only after the thread, which nobody can
    cancel."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *given))
    try:
        return await asyncio.shield(running)
    finally:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.exception()  # the caller has it, or was cancelled


class Tasks:
    """The unfinished tasks of one object. Keeps references, since an event loop has only weak
    ones."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel all unfinished tasks."""
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancel all unfinished tasks, and wait for their end."""
        await stop(*self._tasks)

    async def ended(self) -> None:
        """Wait for the end of all unfinished tasks. Their exceptions are dropped."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(list(self._tasks))


class Alarm:
    """A timer of the running event loop, which calls ``ring()`` at the time that was set last."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Set the time of the call, in the time of the loop; None cancels the call."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if at is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._ring)


def why(error: BaseException) -> str:
    """The class and text of ``error``, for the text of another error: ``ValueError: no digits``."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
