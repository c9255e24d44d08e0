"""The files of a node's agent: its incarnation, its record of views, and its port for commands.

``<home>/node_state`` (mode 0600) is written before a view is used, so that no epoch is used twice.
``<home>/node_agent.json`` holds the process id and port of the running agent. At most one agent
runs for each home.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from potluck._core import system
from potluck._core.cluster.home.directory import make_private
from potluck._core.cluster.home.keyfile import read_private, replace_private
from potluck._core.wire.nodes import MAX_HISTORIES, MAX_VIEW_BYTES, StableRecord
from potluck.errors import ConfigurationError, IdentityError

STATE_FILE = "node_state"
AGENT_FILE = "node_agent.json"

_LOCK_FILE = ".node_agent.lock"
_WHAT = "the state of this node's agent"
_LOOKING_S = 0.5
_MAX_BYTES = 2 * MAX_HISTORIES * 2 * MAX_VIEW_BYTES
"""Room for all histories, each with two views of the largest size: what can be written can be read
back."""


class _NodeRecord(msgspec.Struct, frozen=True):
    incarnation: int = 0
    record: StableRecord = StableRecord()


class AgentRecord(msgspec.Struct, frozen=True):
    """The process id of the agent of this home, and the TCP port on which it listens."""

    pid: int
    port: int


class NodeState:
    """The state of the agent that runs in this process, from construction to ``close``.

    ConfigurationError if another agent runs with this home; IdentityError if the state is damaged
    or can't be written. ``incarnation`` is higher than in all earlier runs, and stored on disk.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        make_private(home)
        self._lock = os.open(home / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _take(self._lock, home)
            before = self._read()
            self.incarnation = before.incarnation + 1
            self.record = before.record
            self.write(self.record)
        except BaseException:
            os.close(self._lock)
            raise

    def write(self, record: StableRecord) -> None:
        """Store ``record`` on disk before returning. Takes some milliseconds."""
        data = msgspec.msgpack.encode(_NodeRecord(self.incarnation, record))
        replace_private(self._home / STATE_FILE, _WHAT, data)
        self.record = record

    def listening(self, port: int) -> None:
        """Record the agent's ``port`` for the commands of this machine."""
        data = msgspec.json.encode(AgentRecord(os.getpid(), port))
        replace_private(self._home / AGENT_FILE, _WHAT, data)

    def close(self) -> None:
        """Release the lock, so that another agent may start. Idempotent."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                (self._home / AGENT_FILE).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def _read(self) -> _NodeRecord:
        path = self._home / STATE_FILE
        try:
            data = read_private(path, _WHAT, max_bytes=_MAX_BYTES)
            return msgspec.msgpack.decode(data, type=_NodeRecord)
        except FileNotFoundError:
            return _NodeRecord()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise IdentityError(
                f"{_WHAT} {path} is damaged: {error}. Restore it, or remove it together with "
                "node_keypair: the node then comes in as a new one"
            ) from error


def _take(lock: int, home: Path) -> None:
    """Take the agent's lock; ConfigurationError if another agent holds it. Waits for ``_LOOKING_S``
    because ``find_agent`` holds the lock for a moment, too."""
    deadline = time.monotonic() + _LOOKING_S
    while True:
        try:
            return system.lock(lock)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"an agent runs on this machine already, with {home}; `potluck status` shows it"
                ) from None
        time.sleep(0.01)  # a file lock has no wait with a deadline


def find_agent(home: Path) -> AgentRecord | None:
    """The process id and port of the agent of ``home``; None if no agent runs."""
    try:
        lock = os.open(home / _LOCK_FILE, os.O_RDWR)
    except OSError:
        return None
    try:
        # A shared lock, so that a concurrent find_agent does not count as an agent.
        system.lock(lock, shared=True)
        return None  # no agent holds the lock
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
    try:
        return msgspec.json.decode(
            read_private(home / AGENT_FILE, "the address of this machine's agent"), type=AgentRecord
        )
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
