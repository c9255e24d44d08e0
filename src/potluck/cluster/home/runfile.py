"""Where an agent leaves word of itself: ``<home>/run/<pid>.json``, mode 0600.

``potluck status`` finds running agents by it, and it holds the highest epoch that the agent may
have used: written before the epoch is announced, so that no epoch is ever used twice. The agent
removes the file when its job is over; one whose process is gone is stale and removed by a reader.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from potluck.errors import ConfigurationError

_MAX_BYTES = 64 * 1024
_SAME_PROCESS_S = 2.0


class RunRecord(msgspec.Struct, frozen=True):
    """What the file says. ``started`` is Unix time in seconds, ``process_started`` the moment the
    system gives for the process, which tells it from a later one with the same id."""

    pid: int
    process_started: float
    job: str
    node: str
    host: str
    port: int
    script: str
    started: float
    epoch: int = 0


@dataclass
class RunFile:
    """The file of the agent that runs in this process."""

    path: Path
    record: RunRecord

    @classmethod
    def create(
        cls, home: Path, *, job: str, node: str, host: str, port: int, script: str, started: float
    ) -> RunFile:
        """Write the file; ConfigurationError if the home can't be written to."""
        pid = os.getpid()
        record = RunRecord(
            pid=pid,
            process_started=psutil.Process(pid).create_time(),
            job=job,
            node=node,
            host=host,
            port=port,
            script=script,
            started=started,
        )
        folder = home / "run"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = cls(folder / f"{pid}.json", record)
            made._write()
        except OSError as error:
            raise ConfigurationError(
                f"can't write to {folder}: {error}; POTLUCK_HOME chooses another directory"
            ) from error
        return made

    def persist_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the highest one ever used, on disk, before it is used."""
        assert epoch > self.record.epoch, "an epoch would be used twice"
        self.record = msgspec.structs.replace(self.record, epoch=epoch)
        self._write()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self.record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)


def running_agents(home: Path) -> list[RunRecord]:
    """The agents of this home whose processes live, oldest first; stale files are removed."""
    found = []
    for path in sorted((home / "run").glob("*.json")):
        record = _read(path)
        if record is not None and _is_running(record):
            found.append(record)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                path.with_suffix(".tmp").unlink(missing_ok=True)
    return sorted(found, key=lambda record: record.started)


def _read(path: Path) -> RunRecord | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=RunRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def _is_running(record: RunRecord) -> bool:
    try:
        process = psutil.Process(record.pid)
        lives = process.status() != psutil.STATUS_ZOMBIE
        created: float = process.create_time()
        return lives and abs(created - record.process_started) < _SAME_PROCESS_S
    except psutil.NoSuchProcess:
        return False
