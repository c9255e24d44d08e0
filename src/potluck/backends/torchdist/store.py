"""The store in which ranks meet, and through which they tell why a group ends."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

from potluck.backends.launchers import LaunchedRank
from potluck.backends.tcp import taking_master_port
from potluck.background import start_thread, why
from potluck.errors import GroupError, LinkError, PeerLost, PotluckError, RemoteError
from potluck.optional import require
from potluck.transport.acceptor import listening_socket
from potluck.waiting import Reminder, reminding

_ROLL_CALL_S = 0.4


def open_store(launched: LaunchedRank, timeout_s: float, *, is_client: bool = False) -> Any:
    """torch's TCPStore at the world's address; rank 0 hosts it, unless torchrun does.

    ConfigurationError if the port is taken, LinkError if no process listens there.
    """
    dist: Any = require("torch.distributed", "torch")

    is_host = launched.rank == 0 and not launched.uses_agent_store and not is_client
    options: dict[str, Any] = {}
    if is_host:  # a port that is taken is our error then, and torch has opened nothing
        with taking_master_port(launched.port):
            options["master_listen_fd"] = listening_socket("", launched.port).detach()
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
    """What one rank tells another through the store.

    ``kind`` is ``error`` (this rank's own code failed), ``lost`` (``rank`` is gone), ``roll`` (say
    that you are there) or ``end`` (to oneself: stop listening).
    """

    kind: str
    rank: int = -1
    text: str = ""


class Word:
    """Words between the ranks about the end of their group: each listens on a thread.

    When the store is gone no words arrive; the links then show which rank is lost.
    """

    def __init__(self, launched: LaunchedRank, store: Any, job: str, timeout_s: float) -> None:
        self.rank = launched.rank
        self._launched = launched
        self._store = store
        self._prefix = f"{job}/word"
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def listen(self, on_error: Callable[[PotluckError], None]) -> None:
        """Begin to listen; ``on_error`` is called with what ends the group."""
        # Waiting keeps a connection busy, so this one is not the store's that others use.
        ear = open_store(self._launched, self._timeout_s, is_client=True)
        mine = f"{self._prefix}/{self._launched.rank}"

        def run() -> None:
            for number in itertools.count(1):
                try:
                    ear.wait([f"{mine}/{number}"], timedelta(days=365))
                    said = msgspec.json.decode(ear.get(f"{mine}/{number}"), type=StoreMessage)
                    if said.kind == "roll":
                        ear.set(f"{mine}/here", "1")
                except RuntimeError:
                    return
                except msgspec.MsgspecError:  # no word of ours
                    continue
                if said.kind == "end":
                    return
                if said.kind == "lost":
                    on_error(PeerLost(said.text, rank=said.rank, certain=True))
                if said.kind == "error":
                    on_error(RemoteError(said.text, rank=said.rank))

        def broken(error: BaseException) -> None:
            on_error(GroupError(f"the thread that hears of lost ranks broke ({why(error)})"))

        self._thread = start_thread(run, name="potluck-word", on_broken=broken)

    def tell(self, said: StoreMessage) -> None:
        """Tell all other ranks, as far as the store is there."""
        with contextlib.suppress(RuntimeError):
            for rank in range(self._launched.world_size):
                if rank != self._launched.rank:
                    self._say(rank, said)

    def find_lost(self) -> int:
        """Ask all ranks whether they are there; the first that does not answer, -1 if all do."""
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
        except RuntimeError:  # the store is gone, and with it its host
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
