"""torch's TCPStore as the rendezvous of ranks, and as the channel for errors that end a group."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

from potluck._core.backends.launchers import LaunchedRank
from potluck._core.backends.tcp import taking_master_port
from potluck._core.background import start_thread, why
from potluck._core.optional import require
from potluck._core.transport.listener import listening_at
from potluck._core.waiting import Reminder, reminding
from potluck._core.wire.format import decoded
from potluck.errors import (
    GroupError,
    LinkError,
    PeerLost,
    PotluckError,
    ProtocolError,
    RemoteError,
)

_ROLL_CALL_S = 0.4


def open_store(launched: LaunchedRank, timeout_s: float, *, is_client: bool = False) -> Any:
    """Open torch's TCPStore at the world's address. Rank 0 serves it, or torchrun.

    ConfigurationError if the port is taken, LinkError if no process listens there.
    """
    dist: Any = require("torch.distributed", "torch")

    is_host = launched.rank == 0 and not launched.uses_agent_store and not is_client
    options: dict[str, Any] = {}
    if is_host:  # binding the port here gives a clear error if it is taken
        with taking_master_port(launched.port):
            options["master_listen_fd"] = listening_at("", launched.port).detach()
    address = f"{launched.host}:{launched.port}"
    unreached = f"rank {launched.rank} can't reach rank 0 at {address}; is it started?"
    reminder = Reminder(
        lambda: "" if launched.local_rank else unreached, time.monotonic() + timeout_s
    )
    try:
        with reminding(reminder):
            store = dist.TCPStore(
                launched.host,
                launched.port,
                is_master=is_host,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                **options,
            )
    except RuntimeError as error:
        raise LinkError(
            f"rank 0 at MASTER_ADDR:MASTER_PORT {address} could not be reached; is it started, and "
            f"the port right? ({error})"
        ) from error
    return dist.PrefixStore(f"potluck/{launched.attempt}", store)


class StoreMessage(msgspec.Struct):
    """A message from one rank to another through the store.

    ``kind`` is ``error`` (the sender's script failed), ``lost`` (``rank`` is lost), ``roll`` (a
    request to confirm that the receiver runs) or ``end`` (from a rank to itself: stop listening).
    """

    kind: str
    rank: int = -1
    text: str = ""


_messages = msgspec.json.Decoder(StoreMessage)


class ErrorChannel:
    """Messages between the ranks about the end of their group; each rank listens on a thread.

    When the store has ended, no messages arrive; the library's links then show the lost rank.
    """

    def __init__(self, launched: LaunchedRank, store: Any, job: str, timeout_s: float) -> None:
        self.rank = launched.rank
        self._launched = launched
        self._store = store
        self._prefix = f"{job}/errors"
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def listen(self, on_error: Callable[[PotluckError], None]) -> None:
        """Start listening; ``on_error(error)`` is called with an error that ends the group."""
        # A wait occupies a connection, so the listener has one of its own.
        client = open_store(self._launched, self._timeout_s, is_client=True)
        mine = f"{self._prefix}/{self._launched.rank}"

        def run() -> None:
            for number in itertools.count(1):
                try:
                    client.wait([f"{mine}/{number}"], timedelta(days=365))
                    said = decoded(_messages, client.get(f"{mine}/{number}"), "a message of a rank")
                    if said.kind == "roll":
                        client.set(f"{mine}/here", "1")
                except RuntimeError:
                    return
                except ProtocolError:
                    continue
                if said.kind == "end":
                    return
                if said.kind == "lost":
                    on_error(PeerLost(said.text, rank=said.rank, certain=True))
                if said.kind == "error":
                    on_error(RemoteError(said.text, rank=said.rank))

        def broken(error: BaseException) -> None:
            on_error(GroupError(f"the thread that listens for lost ranks broke ({why(error)})"))

        self._thread = start_thread(run, name="potluck-errors", on_broken=broken)

    def tell(self, said: StoreMessage) -> None:
        """Send ``said`` to all other ranks, if the store is available."""
        with contextlib.suppress(RuntimeError):
            for rank in range(self._launched.world_size):
                if rank != self._launched.rank:
                    self._say(rank, said)

    def find_lost(self) -> int:
        """The first rank that does not confirm that it runs; -1 if all do."""
        others = [rank for rank in range(self._launched.world_size) if rank != self._launched.rank]
        keys = {rank: f"{self._prefix}/{rank}/here" for rank in others}
        deadline = time.monotonic() + _ROLL_CALL_S
        try:
            for rank in others:
                self._say(rank, StoreMessage("roll"))
            for rank, key in keys.items():
                left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
                with contextlib.suppress(RuntimeError):
                    self._store.wait([key], left)
                    continue
                if not self._store.check([key]):
                    return rank
        except RuntimeError:  # the store has ended, and so has the process that served it
            return -1 if self._launched.uses_agent_store else 0
        return -1

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._say(self._launched.rank, StoreMessage("end"))
            self._thread.join(1.0)
        self._store = None

    def _say(self, rank: int, said: StoreMessage) -> None:
        number = self._store.add(f"{self._prefix}/{rank}/count", 1)
        self._store.set(f"{self._prefix}/{rank}/{number}", msgspec.json.encode(said).decode())
