"""The only file of the private agent of a ``potluck run``: its port, for ``potluck status``.

``<home>/run/<pid>.json`` (mode 0600) exists, and is locked, as long as the agent runs. The kernel
releases the lock when the process ends, so an unlocked file is of a killed agent, and a reader
removes the file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from potluck._core import system
from potluck._core.cluster.home.directory import make_private
from potluck._core.cluster.home.node_state import AgentRecord
from potluck._core.wire.nodes import StableRecord
from potluck.errors import ConfigurationError

_MAX_BYTES = 64 * 1024


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
            return msgspec.json.decode(os.read(file, _MAX_BYTES), type=AgentRecord)
        finally:
            os.close(file)
    return None
