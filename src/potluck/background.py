"""Background threads and tasks, which serve other parts as long as they are needed: none breaks in
silence.

The caller that starts one says what follows if it ends by an exception. The parts that it serves
would else wait for something that can't come any more, and blame the wrong part.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

OnBroken = Callable[[BaseException], None]
"""``on_broken(error)`` is called where the service ran, after its last line. It must not block."""

_log = logging.getLogger(__name__)


def start_thread(run: Callable[[], None], *, name: str, on_broken: OnBroken) -> threading.Thread:
    """A daemon thread that runs ``run()``. If that raises, the traceback is logged, then
    ``on_broken(error)`` called. RuntimeError if the system has no thread left."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            _log.exception("the thread %s broke", name)
            on_broken(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def start_task(
    run: Callable[[], Coroutine[Any, Any, None]], *, name: str, on_broken: OnBroken
) -> asyncio.Task[None]:
    """The same for a task of the running loop. Being cancelled is an end in order."""

    async def guarded() -> None:
        try:
            await run()
        except Exception as error:
            _log.exception("the task %s broke", name)
            on_broken(error)

    return asyncio.get_running_loop().create_task(guarded(), name=name)


async def stop(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel ``tasks``, but for None, and wait for their end; what they raise is dropped."""
    present = [task for task in tasks if task is not None]
    for task in present:
        task.cancel()
    await asyncio.gather(*present, return_exceptions=True)


class Tasks:
    """The tasks that one object has under way: an event loop alone would not keep them alive."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel all that are under way."""
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancel all that are under way, and wait until they have ended."""
        await stop(*self._tasks)

    async def ended(self) -> None:
        """Wait until all that are under way have ended; what they raise is dropped."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(list(self._tasks))


class Alarm:
    """One timer of the running loop: it calls ``ring()`` at the time that was set last."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Ring at ``at``, in the time of the loop, and not before; None: not at all."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if at is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._ring)


def why(error: BaseException) -> str:
    """``ValueError: what it says``, for the text of the error that follows."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
