"""torch's own rendezvous (``env://``, ``tcp://``): messages about missing ranks while it waits, and
in a worker of ``potluck run`` a meeting at the agents before it.

Rank 0 serves torch's TCPStore, whose constructor waits, in C++, until all ranks have connected; the
constructors of the other ranks wait for rank 0. Neither names the missing ranks. So each rank sets
a key in the store after it connected, and rank 0 looks for these keys on a second connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch._C._distributed_c10d import TCPStore

from potluck._core.backends.fixed import is_our_world, join_world
from potluck._core.backends.launchers import placed
from potluck._core.waiting import Reminder, reminding

_LOOK_S = 2.0

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def watch(
    handler: Handler, url: str, *, timeout: timedelta, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    """Run torch's ``handler`` for ``url``; every few seconds a line on stderr names missing
    ranks."""
    ranks = _Ranks(url)
    reminder = Reminder(ranks.describe, time.monotonic() + timeout.total_seconds())
    found = handler(url, timeout=timeout, **options)
    try:
        with reminding(reminder):
            store, rank, world_size = next(found)
    except Exception as error:
        if ranks.rank > 0:
            error.add_note(ranks.unreached)
        raise
    with suppress(RuntimeError):
        store.set(f"potluck/arrived/{rank}", "1")
    yield store, rank, world_size
    yield from found


class _Ranks:
    """The address of the store, the world size and this rank, from the URL or the environment;
    -1 or empty where they are unknown."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        is_env = parts.scheme == "env"
        self.rank = given(url, "rank", "RANK")
        self.world_size = given(url, "world_size", "WORLD_SIZE")
        self.host = os.environ.get("MASTER_ADDR", "") if is_env else parts.hostname or ""
        self.port = given(url, "master_port", "MASTER_PORT") if is_env else parts.port or -1
        self._client: TCPStore | None = None

    @property
    def unreached(self) -> str:
        """The message of a rank that can't reach rank 0."""
        return (
            f"rank {self.rank} can't reach rank 0 at {self.host}:{self.port}; is rank 0 started, "
            "with the same MASTER_ADDR and MASTER_PORT?"
        )

    def describe(self) -> str:
        if self.rank > 0:
            return "" if int(os.environ.get("LOCAL_RANK") or 0) else self.unreached
        try:
            missing = self._missing()
        except RuntimeError:  # the store does not listen yet
            missing = []
        if not missing:
            return ""
        return (
            f"rank 0 waits at {self.host}:{self.port} for {placed(missing)} (of {self.world_size} "
            "ranks) to call init_process_group; are all started, with the same MASTER_ADDR, "
            "MASTER_PORT and WORLD_SIZE?"
        )

    def _missing(self) -> list[int]:
        if self._client is None:
            self._client = TCPStore(
                self.host,
                self.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_LOOK_S),
            )
        client = self._client
        return [
            rank
            for rank in range(1, self.world_size)
            if not client.check([f"potluck/arrived/{rank}"])
        ]


_DEFAULT = timedelta(minutes=30)
"""torch's default timeout of a rendezvous."""


def is_our(url: str) -> bool:
    """Whether ``url`` describes the world of this worker's job."""
    rank, world_size = given(url, "rank", "RANK"), given(url, "world_size", "WORLD_SIZE")
    return is_our_world(os.environ, rank, world_size)


def meet(url: str, timeout: timedelta | None) -> None:
    """If ``url`` describes the world of this worker's job, wait for all its ranks at the agent,
    which can name missing ranks and ends the world when a rank is lost, and set MASTER_ADDR and
    MASTER_PORT to the address of the store that rank 0 will serve. Other worlds, for example of
    processes that a worker spawns, are left to torch."""
    if is_our(url):
        host, port = join_world((timeout or _DEFAULT).total_seconds())
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)


def given(url: str, name: str, variable: str = "") -> int:
    """A number that ``init_process_group`` was given, which torch puts into ``url``; else that of
    the environment ``variable``; -1 without either."""
    text = parse_qs(urlsplit(url).query).get(name, [os.environ.get(variable, "")])[0]
    return int(text) if text.isdigit() else -1
