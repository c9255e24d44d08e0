"""``Followers``: brings the log of the first server to the others, and all servers to one state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from potluck.background import start_thread
from potluck.errors import (
    CheckpointError,
    HandlerError,
    PotluckError,
    ServiceLost,
    ServiceTimeout,
    UnknownService,
)
from potluck.parameter_server.entries import encode
from potluck.parameter_server.host import Host, new_incarnation
from potluck.parameter_server.remotes import CONNECT_S, Remotes
from potluck.parameter_server.signals import OutOfStep

_PAUSE_S = 0.1
_POLL_S = 0.2
"""While a checkpoint is under way."""
_IDLE_S = 0.5
_AWAY = (ServiceLost, ServiceTimeout, UnknownService)

_log = logging.getLogger(__name__)


class Followers:
    """A thread on the first server, from ``start`` until ``is_over()``.

    Whenever a server begins, the first one also, all go to the newest checkpoint that is intact on
    every server, or to none if the first server has none. A checkpoint of the first server is
    written after those of the others, so what it has is whole. Numbers of entries are never used
    twice, so that checkpoints of one number are of one history.
    """

    def __init__(
        self,
        host: Host,
        remotes: Remotes,
        is_over: Callable[[], bool],
    ) -> None:
        """``remotes`` are the thread's own."""
        self._host = host
        self._is_over = is_over
        self._others = host.servers[1:]
        self._remotes = remotes
        self._incarnation: int | None = None
        self._asks = False

    def start(self) -> None:
        """Begin, by agreeing on a state."""
        start_thread(self._run, name="potluck-parameter-server-log", on_broken=self._broken)

    def ask(self) -> None:
        """A server began: ask all whether they are in step."""
        self._asks = True
        self._host.log.wake()

    # -- inside

    def _run(self) -> None:
        while not self._is_over():
            try:
                if self._incarnation is None:
                    self._agree()
                else:
                    self._bring(self._incarnation)
            except _AWAY as error:
                _log.debug("another server is away: %s", error)
                self._asks = True
                time.sleep(_PAUSE_S)
            except HandlerError as error:
                if error.type != OutOfStep.__name__:
                    raise
                _log.warning("the servers begin anew: %s", error)
                self._incarnation = None
            except CheckpointError as error:
                self._host.fail(error)
                return

    def _bring(self, incarnation: int) -> None:
        """The entries that are not everywhere, to all other servers."""
        first, entries = self._host.log.entries(_POLL_S if self._host.is_saving else _IDLE_S)
        if not entries and not self._asks and not self._host.is_saving:
            return
        self._asks = False
        data = encode(entries)
        replies = self._each("follow", incarnation, first, data)
        self._host.log.carried_out(len(entries))
        for server, reply in replies.items():
            if reply["failure"]:
                self._host.failed_elsewhere(f"on worker {server}: {reply['failure']}")
        self._host.saved_elsewhere(min(int(reply["saved"]) for reply in replies.values()))

    def _agree(self) -> None:
        """On the state of all servers."""
        index, own = self._host.begin_opening()
        known = self._each("checkpoints")
        index = 1 + max(index, *(int(reply["index"]) for reply in known.values()))
        why = "the other servers have no checkpoint of the same time"
        for checkpoint in own:
            if all(checkpoint in reply["steps"] for reply in known.values()):
                try:
                    return self._load(checkpoint, index)
                except CheckpointError as error:
                    why = str(error)
                    _log.warning("checkpoint %d is not used: %s", checkpoint, error)
        if own:
            raise CheckpointError(
                f"none of the {len(own)} checkpoints of worker {self._host.servers[0]} can be "
                f"used: {why}"
            )
        self._load(None, index)

    def _load(self, checkpoint: int | None, index: int) -> None:
        incarnation = new_incarnation()
        self._host.load(checkpoint)
        try:
            self._each("load", checkpoint, incarnation, index)
        except HandlerError as error:
            if error.type != CheckpointError.__name__:
                raise
            raise CheckpointError(error.text) from error
        self._host.open(index, incarnation)
        self._incarnation = incarnation

    def _each(self, method: str, *args: Any) -> Mapping[str, Any]:
        """The replies of all other servers, asked at once. Every call may be made twice."""
        replies, errors = self._remotes.call_each(
            method, dict.fromkeys(self._others, args), connect_s=CONNECT_S
        )
        if errors:
            raise errors[0]
        return replies

    def _broken(self, error: BaseException) -> None:
        text = f"the parameter server broke down: {error}"
        self._host.fail(error if isinstance(error, PotluckError) else PotluckError(text))
