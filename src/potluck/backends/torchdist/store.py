"""The store in which ranks meet, and through which they tell why a group ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

from potluck.backends.launchers import Seat
from potluck.errors import ConfigurationError, LinkError, PotluckError, RemoteError
from potluck.optional import require


def open_store(seat: Seat, timeout_s: float, *, is_client: bool = False) -> Any:
    """torch's TCPStore at the seat's address; rank 0 hosts it, unless torchrun does.

    ConfigurationError if the port is taken, LinkError if nobody listens there.
    """
    dist: Any = require("torch.distributed", "torch")

    is_host = seat.rank == 0 and not seat.uses_agent_store and not is_client
    try:
        store = dist.TCPStore(
            seat.host,
            seat.port,
            is_master=is_host,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if is_host:
            raise ConfigurationError(
                f"rank 0 can't listen at MASTER_PORT={seat.port}: another program does, maybe an "
                f"earlier run that has not ended; set another MASTER_PORT on all ranks ({error})"
            ) from error
        raise LinkError(
            f"rank 0 at MASTER_ADDR:MASTER_PORT {seat.host}:{seat.port} could not be reached; is "
            f"it started, and the port right? ({error})"
        ) from error
    return dist.PrefixStore(f"potluck/{seat.attempt}", store)


class _Said(msgspec.Struct):
    """Why a group ends, as one rank tells another through the store. Empty: it leaves in order."""

    text: str = ""
    rank: int = -1


class Word:
    """Word of why the group ends: each rank waits for its own key of the store on a thread.

    A store that is gone says nothing: then the links tell who is lost.
    """

    def __init__(self, seat: Seat, store: Any, job: str, timeout_s: float) -> None:
        self._seat = seat
        self._store = store
        self._prefix = f"{job}/word"
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def listen(self, on_error: Callable[[PotluckError], None]) -> None:
        # Waiting keeps a connection busy, so this one is not the store's that others use.
        ear = open_store(self._seat, self._timeout_s, is_client=True)

        def run() -> None:
            key = f"{self._prefix}/{self._seat.rank}"
            try:
                ear.wait([key], timedelta(days=365))
                said = msgspec.json.decode(ear.get(key), type=_Said)
            except (RuntimeError, msgspec.MsgspecError):
                return
            if said.text:
                on_error(RemoteError(said.text, rank=said.rank))

        self._thread = threading.Thread(target=run, name="potluck-word", daemon=True)
        self._thread.start()

    def tell(self, error: PotluckError) -> None:
        said = _Said(str(error), self._seat.rank)
        for rank in range(self._seat.world_size):
            if rank != self._seat.rank:
                self._say(rank, said)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread is not None:
            self._say(self._seat.rank, _Said())
            self._thread.join(1.0)

    def _say(self, rank: int, said: _Said) -> None:
        try:
            self._store.set(f"{self._prefix}/{rank}", msgspec.json.encode(said).decode())
        except RuntimeError:
            return  # the store is gone, and its host with it
