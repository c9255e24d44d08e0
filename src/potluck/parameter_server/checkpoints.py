"""``Checkpoints``: the checkpoints of one server. The primary writes its own once all other servers
have written theirs, which makes the checkpoint valid."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from potluck.checkpoint import CheckpointStore
from potluck.checkpoint.store import BackgroundWriter
from potluck.errors import CheckpointError
from potluck.parameter_server.replica import Replica

_log = logging.getLogger(__name__)


class Checkpoints:
    """Writes states of one server in a thread, each with the number of its ``Save`` entry. All
    methods are called with the replica's ``changed`` held."""

    def __init__(self, store: CheckpointStore, replica: Replica) -> None:
        self.store = store
        self._servers = replica.servers
        self._copies = replica.copies
        self._changed = replica.changed
        self._writer = BackgroundWriter("parameter-server-writer")
        self._unsaved: tuple[int, Any] | None = None
        self._failure = ""
        self._saved = 0

    # -- on the primary

    @property
    def is_under_way(self) -> bool:
        """Whether other servers are still writing theirs."""
        return self._unsaved is not None

    def begin(self, number: int, state: Mapping[str, Any], *, is_alone: bool) -> None:
        """Write ``state``, which is immutable, when all other servers have written theirs."""
        self._failure = ""
        self._unsaved = number, state
        if is_alone:
            self.commit(number)

    def commit(self, number: int) -> None:
        """All other servers have written ``number``. Waits until the write before has ended."""
        if self._unsaved is None or number < self._unsaved[0]:
            return
        (number, state), self._unsaved = self._unsaved, None
        try:
            self._writer.submit(partial(self.store.save, state, number))
        except CheckpointError as error:  # of the write before; training goes on
            _log.error("%s", error)
        self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Another server could not write its checkpoint. Training goes on."""
        self._unsaved, self._failure = None, reason
        _log.error("%s", reason)
        self._changed.notify_all()

    def give_up(self) -> None:
        """Forget the checkpoint that is under way."""
        self._unsaved = None

    def await_others(self, timeout_s: float) -> None:
        """Wait for the checkpoint that is under way on other servers. CheckpointError after
        ``timeout_s``."""
        if not self._changed.wait_for(lambda: self._unsaved is None, timeout_s):
            raise CheckpointError(
                f"the other servers did not write their checkpoints within {timeout_s:g} s"
            )

    def await_written(self) -> None:
        """Wait until the last one is on the disk. CheckpointError if it can't be written."""
        if self._failure:
            raise CheckpointError(self._failure)
        self._writer.wait()

    # -- on another server

    def write(self, number: int, state: Mapping[str, Any]) -> None:
        """Write ``state``, which is immutable. ``saved`` says how that ended, before the primary
        asks for another."""

        def save() -> None:
            try:
                self.store.save(state, number)
            except CheckpointError as error:
                self._failure = str(error)
            else:
                self._saved = number

        try:
            self._writer.submit(save)
        except CheckpointError as error:  # of its last checkpoint as the primary
            _log.error("%s", error)

    def saved(self) -> tuple[int, str]:
        """The number of the last checkpoint that ``write`` has written, and why one failed since
        the last call."""
        failure, self._failure = self._failure, ""
        return self._saved, failure

    # -- at the beginning

    def load_latest(self) -> tuple[int, Mapping[str, Any]] | None:
        """The newest intact checkpoint of a server that is alone, with its number."""
        found = self.store.load_latest()
        if found is None:
            return None
        _log.info("parameters from %s", found.path)
        return found.step, self._checked(found.state)

    def load(self, number: int) -> Mapping[str, Any]:
        """The checkpoint ``number``. CheckpointError if it is damaged."""
        return self._checked(self.store.load(number).state)

    def _checked(self, state: Any) -> Mapping[str, Any]:
        """``state``; CheckpointError if servers with another placement of tensors wrote it."""
        found: Mapping[str, Any] = state if isinstance(state, dict) else {}
        wrote = tuple(found.get("servers", ()))
        if wrote != self._servers:
            raise CheckpointError(
                f"the checkpoints in {self.store.directory} are of a parameter server on worker "
                f"{', '.join(wrote) or '?'}, and this one is on worker {', '.join(self._servers)}: "
                "give it the same servers, or another directory"
            )
        copies = found.get("copies", 1)
        if copies != self._copies:
            raise CheckpointError(
                f"the checkpoints in {self.store.directory} were written with replicas="
                f"{copies - 1}, and this parameter server has replicas={self._copies - 1}: give it "
                "the same, or another directory"
            )
        return found
