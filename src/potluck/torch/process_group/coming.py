"""What ranks say while torch's own rendezvous waits: ``env://`` and ``tcp://``.

There rank 0 serves torch's TCPStore, whose constructor waits, in C++, until all ranks have called
it; the others' constructors wait until rank 0 is there. Neither names the missing ranks. So each
rank sets a key in the store once it has come; rank 0 looks for these on a second connection.
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

from potluck.backends.places import placed
from potluck.waiting import Reminder, reminding

_LOOK_S = 2.0

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def come(
    handler: Handler, url: str, *, timeout: timedelta, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    """Run torch's own ``handler`` for ``url``, and name the missing ranks while it waits."""
    meeting = _Meeting(url)
    reminder = Reminder(meeting.describe, time.monotonic() + timeout.total_seconds())
    found = handler(url, timeout=timeout, **options)
    try:
        with reminding(reminder):
            store, rank, world_size = next(found)
    except Exception as error:
        if meeting.rank > 0:
            error.add_note(meeting.unreached)
        raise
    with suppress(RuntimeError):
        store.set(f"potluck/came/{rank}", "1")
    yield store, rank, world_size
    yield from found


class _Meeting:
    """Where the ranks meet, and which of them this is; -1 or empty what is not said."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        given = parse_qs(parts.query)

        def number(name: str) -> int:
            text = given.get(name.lower(), [os.environ.get(name, "")])[0]
            return int(text) if text.isdigit() else -1

        is_env = parts.scheme == "env"
        self.rank = number("RANK")
        self.world_size = number("WORLD_SIZE")
        self.host = os.environ.get("MASTER_ADDR", "") if is_env else parts.hostname or ""
        self.port = number("MASTER_PORT") if is_env else parts.port or -1
        self._client: TCPStore | None = None

    @property
    def unreached(self) -> str:
        """What a rank says that can't reach rank 0."""
        return (
            f"rank {self.rank} can't reach rank 0 at {self.host}:{self.port}; is rank 0 started, "
            "with the same MASTER_ADDR and MASTER_PORT?"
        )

    def describe(self) -> str:
        if self.rank > 0:
            return "" if int(os.environ.get("LOCAL_RANK") or 0) else self.unreached
        try:
            missing = self._missing()
        except RuntimeError:  # the store is not there yet
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
            rank for rank in range(1, self.world_size) if not client.check([f"potluck/came/{rank}"])
        ]
