"""The files of a node's agent: its incarnation, its record of views, and its port for commands.

``<home>/node_state`` (mode 0600) is written before a view is used, so that no epoch is used twice.
``<home>/node_agent.json`` holds the process id and port of the running agent. At most one agent
runs for each home.

The private agent of a ``potluck run`` has one file, ``<home>/run/<pid>.json`` (mode 0600): its
port, for ``potluck status``. It exists, and is locked, as long as the agent runs. The kernel
releases the lock when the process ends, so an unlocked file belongs to a killed agent, and a reader
removes it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from potluck._core import system
from potluck._core.cluster.home.keyfile import make_private, read_private, replace_private
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


_MAX_RECORD_BYTES = 64 * 1024


class PrivateState:
    """The counterpart of ``NodeState`` for a private agent. Views are kept in memory: the agent is
    their only member, and its only job ends with it. The first view has epoch 0, so the first group
    of the job has epoch 1."""

    incarnation = 1

    def __init__(self, home: Path) -> None:
        self.record = StableRecord(installed=-1)
        self._path = home / "run" / f"{os.getpid()}.json"
        self._file = -1

    def write(self, record: StableRecord) -> None:
        """Keep ``record`` in memory: no later agent needs it."""
        self.record = record

    def listening(self, port: int) -> None:
        """Record the agent's ``port`` for the commands of this machine; ConfigurationError if the
        home can't be written to."""
        folder = self._path.parent
        temporary = self._path.with_suffix(".tmp")
        try:
            make_private(folder)
            self._file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            system.lock(self._file)
            os.write(self._file, msgspec.json.encode(AgentRecord(os.getpid(), port)))
            os.replace(temporary, self._path)  # locked before a reader can find it
        except OSError as error:
            raise ConfigurationError(
                f"can't write to {folder}: {error}; POTLUCK_HOME chooses another directory"
            ) from error

    def close(self) -> None:
        """Remove the file. Idempotent."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def private_agents(home: Path) -> list[AgentRecord]:
    """The process ids and ports of the private agents of ``home``. Removes the files of killed
    agents."""
    records = (_read(path) for path in sorted((home / "run").glob("*.json")))
    return [record for record in records if record is not None]


def _read(path: Path) -> AgentRecord | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        file = os.open(path, os.O_RDONLY)
        try:
            system.lock(file, shared=True)
            path.unlink()
        except BlockingIOError:  # the agent still holds the lock
            return msgspec.json.decode(os.read(file, _MAX_RECORD_BYTES), type=AgentRecord)
        finally:
            os.close(file)
    return None
