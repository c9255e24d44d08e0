"""An in-process world whose workers die, and newcomers join, at chosen moments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from potluck._core.backends.inprocess import InProcessBackend
from potluck._core.context import DistributedContext

T = TypeVar("T")


class Killed(BaseException):
    """Ends the thread of a worker whose links were cut. A BaseException, so that an ``except
    Exception`` of the tested code does not catch it."""


class MortalContext(DistributedContext):
    """A context that can kill its worker before and after the start of each collective.

    ``dies(name, moment)`` decides. ``name`` is the operation's; ``moment`` counts from 0 on this
    worker: the moment before an operation starts is even, the moment after its start (not its end)
    is odd.
    """

    def __init__(
        self,
        backend: InProcessBackend,
        dies: Callable[[str, int], bool],
        *,
        timeout_s: float,
    ) -> None:
        self._dies = dies
        self._moment = 0
        self.backend = backend
        super().__init__(backend, timeout_s=timeout_s)

    def all_reduce(self, array: Any, *args: Any, **kwargs: Any) -> Any:
        return self._mortal("all_reduce", array, *args, **kwargs)

    def all_gather(self, array: Any, *args: Any, **kwargs: Any) -> Any:
        return self._mortal("all_gather", array, *args, **kwargs)

    def broadcast(self, array: Any, *args: Any, **kwargs: Any) -> Any:
        return self._mortal("broadcast", array, *args, **kwargs)

    def neighbor_all_reduce(self, array: Any, *args: Any, **kwargs: Any) -> Any:
        return self._mortal("neighbor_all_reduce", array, *args, **kwargs)

    def die(self) -> None:
        """Kill this worker: cut its links and raise Killed."""
        self.backend.hub.kill(self.backend.worker)
        raise Killed(f"worker {self.backend.worker}")

    def _mortal(self, name: str, array: Any, *args: Any, **kwargs: Any) -> Any:
        self._pass_moment(name)
        blocking = not kwargs.pop("async_op", False)
        work = getattr(super(), name)(array, *args, async_op=True, **kwargs)
        self._pass_moment(name)
        return work.wait() if blocking else work

    def _pass_moment(self, name: str) -> None:
        moment, self._moment = self._moment, self._moment + 1
        if self._dies(name, moment):
            self.die()


class ElasticWorld(Generic[T]):
    """Workers that run ``work(ctx)``, each in a thread; ``join`` adds a worker.

    ``dies(worker, name, moment)`` is as in MortalContext. ``results`` and ``errors`` map workers to
    the result of ``work`` or to the exception that it raised.
    """

    def __init__(
        self,
        world_size: int,
        work: Callable[[MortalContext], T],
        *,
        dies: Callable[[str, str, int], bool] = lambda worker, name, number: False,
        timeout_s: float = 200.0,
    ) -> None:
        self.results: dict[str, T] = {}
        self.errors: dict[str, BaseException] = {}
        self._work = work
        self._dies = dies
        self._timeout_s = timeout_s
        self._backends = InProcessBackend.world(world_size)
        self.hub = self._backends[0].hub
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def run(self, *, limit_s: float = 150.0) -> dict[str, T]:
        """Run all workers; returns the results of those that were not killed.

        Raises the first exception of a worker, TimeoutError after ``limit_s`` seconds. The limit is
        below the deadline of operations, so no operation may run into its deadline.
        """
        deadline = time.monotonic() + limit_s
        for backend in self._backends:
            self._start(backend)
        position = 0
        while position < len(self._threads):
            thread = self._threads[position]
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} still runs after {limit_s} s: {self.errors}")
            position += 1
        for error in self.errors.values():
            raise error
        return self.results

    def join(self) -> str:
        """Start a new worker, from any thread; returns its name."""
        backend = self.hub.join()
        self._start(backend)
        return backend.worker

    def _start(self, backend: InProcessBackend) -> None:
        thread = threading.Thread(
            target=self._run, args=(backend,), name=f"worker-{backend.worker}", daemon=True
        )
        with self._lock:
            self._threads.append(thread)
            thread.start()

    def _run(self, backend: InProcessBackend) -> None:
        def dies(name: str, number: int) -> bool:
            return self._dies(backend.worker, name, number)

        context: MortalContext | None = None
        try:
            context = MortalContext(backend, dies, timeout_s=self._timeout_s)
            self.results[backend.worker] = self._work(context)
        except Killed:
            pass
        except BaseException as error:
            self.errors[backend.worker] = error
        finally:
            if context is not None:
                context.close()
            backend.close()
