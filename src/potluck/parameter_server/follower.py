"""``Follower``: a server that is not the first. It keeps its shard, and carries out the log."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from potluck.checkpoint import CheckpointStore
from potluck.checkpoint.writer import BackgroundWriter
from potluck.errors import CheckpointError, ProtocolError
from potluck.parameter_server.checkpoints import checked_servers
from potluck.parameter_server.entries import Close, Save, decode
from potluck.parameter_server.optimizers import Optimizer
from potluck.parameter_server.shard import Shard
from potluck.parameter_server.shard_calls import ShardCalls
from potluck.parameter_server.signals import AskAgain, OutOfStep
from potluck.services.waits import WaitingCalls


class Follower:
    """For any number of threads. ``server``, one of ``servers``, is this one."""

    def __init__(
        self,
        optimizer: Optimizer,
        server: str,
        servers: tuple[str, ...],
        store: CheckpointStore | None,
    ) -> None:
        self._servers = servers
        self._store = store
        self._shard = Shard(optimizer, server, servers)
        self._writer = BackgroundWriter("parameter-server-writer")
        self._changed = threading.Condition(threading.RLock())
        self._waits = WaitingCalls(self._changed, self._on_time, thread="potluck-parameter-server")
        self.calls = ShardCalls(self._shard, self._changed, self._waits, self._open_as)
        self._incarnation: int | None = None
        """None: it has no state yet."""
        self._index = 0
        self._saved = 0
        self._failure = ""
        self._is_closed = False

    # -- the first server

    def follow(self, incarnation: int, first: int, data: bytes) -> dict[str, Any]:
        """Carry out entries, of which the first has number ``first``; those that were carried out
        before are skipped. The number of the newest checkpoint, and why one failed.

        OutOfStep if entries before these have not been carried out here.
        """
        with self._changed:
            if incarnation != self._incarnation or first > self._index + 1:
                raise OutOfStep(f"this server has carried out {self._index} entries")
            for entry in decode(data)[self._index + 1 - first :]:
                self._index += 1
                try:
                    self._shard.carry_out(entry)
                except ProtocolError as error:
                    self._incarnation = None
                    raise OutOfStep(str(error)) from error
                if isinstance(entry, Save):
                    self._save()
                elif isinstance(entry, Close):
                    self._is_closed = True
            self._waits.look()
            self._changed.notify_all()
            failure, self._failure = self._failure, ""
            return {"saved": self._saved, "failure": failure}

    def checkpoints(self) -> dict[str, Any]:
        """The highest number of an entry that is known here, and the numbers of the checkpoints.
        Calls are not answered until ``load``."""
        with self._changed:
            self._incarnation = None
            steps = [] if self._store is None else self._store.steps()
            return {"index": max([self._index, *steps]), "steps": steps}

    def load(self, checkpoint: int | None, incarnation: int, index: int) -> None:
        """Be as a checkpoint says, or without models; entries after ``index`` follow.
        CheckpointError if it is damaged, or of other servers."""
        state: Any = {"shard": {}}
        if checkpoint is not None:
            if self._store is None:
                raise CheckpointError("this server has no directory for checkpoints")
            found = self._store.load(checkpoint)
            state = checked_servers(found.state, self._servers, self._store)
        with self._changed:
            self._shard.restore(state["shard"])
            self._incarnation, self._index, self._saved = incarnation, index, 0
            self._waits.look()
            self._changed.notify_all()

    # -- the end

    def await_closed(self, timeout_s: float) -> bool:
        """Wait for the end of all workers; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed, timeout_s)

    def close(self) -> None:
        """Wait for the last checkpoint. CheckpointError if it could not be written."""
        self._writer.wait()

    # -- inside

    def _open_as(self) -> int:
        if self._incarnation is None:
            raise AskAgain("the servers have not agreed on a state yet")
        return self._incarnation

    def _on_time(self) -> None:
        self._waits.look()

    def _save(self) -> None:
        if self._store is None:
            self._failure = "it has no directory for checkpoints"
            return
        state = {"servers": list(self._servers), "shard": self._shard.state()}
        # The one before has ended: the first server has heard so.
        self._writer.submit(partial(self._write, self._store, self._index, state))

    def _write(self, store: CheckpointStore, index: int, state: Any) -> None:
        try:
            store.save(state, index)
        except CheckpointError as error:
            self._failure = str(error)
        else:
            self._saved = index
