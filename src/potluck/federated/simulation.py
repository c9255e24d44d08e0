"""A federation in one process: the same functions, with clients that a pool calls in turn."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from potluck.federated.definition import Site, load
from potluck.federated.federation import Clients, Federation, Reply
from potluck.federated.participant import Participant


class SimulatedClients(Clients):
    """Clients of this process, called by ``num_threads`` threads."""

    is_simulated = True

    def __init__(self, participants: Mapping[str, Participant], num_threads: int) -> None:
        self._participants = dict(participants)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="potluck-client")
        self._lock = threading.Lock()
        self._calls: dict[str, deque[Callable[[], None]]] = {each: deque() for each in participants}
        """The calls of each client, the running call first."""

    def wait(self, num: int, timeout_s: float) -> Sequence[str]:
        return list(self._participants)

    def start(
        self,
        method: str,
        arguments: Mapping[str, Mapping[str, Any]],
        timeout_s: float | None,
        put: Callable[[Reply], None],
    ) -> Callable[[], None]:
        is_over = threading.Event()

        def call(client: str) -> None:
            if not is_over.is_set():
                answer = self._participants[client].answer(method, arguments[client])
                put(Reply(client, answer))

        for client in arguments:
            self._pool.submit(self._in_turn, client, partial(call, client))
        return is_over.set

    def _in_turn(self, client: str, call: Callable[[], None]) -> None:
        """Run ``call``, or leave it to the thread in which this client is still called."""
        with self._lock:
            calls = self._calls[client]
            calls.append(call)
            if len(calls) > 1:
                return
        while True:
            calls[0]()
            with self._lock:
                calls.popleft()
                if not calls:
                    return

    def close(self) -> None:
        """End the threads, after the calls that run."""
        self._pool.shutdown(cancel_futures=True)


def simulate(
    server: str | Path | Callable[..., Any],
    client: str | Path | Callable[..., Any],
    *,
    num_clients: int,
    data_dirs: Sequence[Path | str] | None = None,
    num_threads: int | None = None,
    seed: int = 0,
) -> Any:
    """Run a federation in this process; returns what the server's function returns.

    ``server`` and ``client`` are functions, or files that hold them. A pool of ``num_threads``
    threads (default: one for each processor) calls the ``num_clients`` clients in turn, so 1,000
    clients take the memory of their updates, not of 1,000 processes. Clients are
    named ``0``, ``1``, ...; ``site().index`` is their number, ``site().data_dir`` their entry of
    ``data_dirs``. The same seed gives the same result, whatever the number of threads, as long as
    ``Patience.wait_for`` is 1.0 and no deadline is given: adaptive deadlines are for clients on
    other machines, and a simulated client's function runs to its end.

    ValueError for numbers that do not fit, ConfigurationError for files.
    """
    if isinstance(num_clients, bool) or not isinstance(num_clients, int) or num_clients < 1:
        raise ValueError(f"num_clients is {num_clients!r}; a whole number from 1 is needed")
    if data_dirs is not None and len(data_dirs) != num_clients:
        raise ValueError(f"there are {len(data_dirs)} data_dirs for {num_clients} clients")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads!r}; 1 or more are needed")
    function, lead = load(client, "client"), load(server, "server")
    participants = {}
    for index in range(num_clients):
        folder = None if data_dirs is None else Path(data_dirs[index])
        place = Site(str(index), index, num_clients, folder)
        participants[str(index)] = Participant(function, place, sends_texts=True)
    clients = SimulatedClients(participants, num_threads or os.cpu_count() or 1)
    try:
        return lead(Federation(clients, seed=seed))
    finally:
        clients.close()
