"""What a worker has of the trust of its node: a folder for each job, in place of the node's home.

``<home>/workers/<agent>/<job>/`` holds ``worker_credentials`` (a key made for the job,
its delegation by the node's key, and the eras of the cluster's secret) and ``admissions``, a copy
of the list of admitted keys. The agent makes the folder before the first worker of the job starts,
copies what changes, and removes it after the last has ended. Neither the node's key nor the
cluster's secret is in it, and neither can be computed from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core import system
from potluck._core.background import OnBroken, start_task, stop
from potluck._core.cluster.home.keyfile import make_private, read_private, replace_private, stamp
from potluck._core.cluster.trust.admission_file import (
    ADMISSIONS_FILE,
    MAX_LIST_BYTES,
    AdmissionFile,
)
from potluck._core.cluster.trust.secret import Keyring
from potluck._core.transport.credentials import Credentials, Era
from potluck._core.transport.delegation import Delegation, delegate
from potluck._core.waiting import Complaint
from potluck.errors import ConfigurationError, IdentityError, PotluckError

CREDENTIALS_FILE = "worker_credentials"
FOLDER = "workers"
LOOK_S = 0.1
"""How often the agent looks for changes (three stats)."""

_WHAT = "the credentials of this worker"
_MAX_NAME = 100


class _WorkerFile(msgspec.Struct, frozen=True):
    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    delegation: Delegation
    eras: tuple[Era, ...]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(job={self.delegation.job!r})"


class WorkerHomes:
    """The folders of the jobs that run under this agent, from construction to ``close``."""

    def __init__(
        self,
        home: Path,
        key: Ed25519PrivateKey,
        credentials: Credentials,
        admissions: AdmissionFile,
        *,
        on_note: Callable[[str], None],
        on_broken: OnBroken,
    ) -> None:
        """``key`` and ``credentials`` are the node's, ``admissions`` is its list."""
        self._key = key
        self._credentials = credentials
        self._list = admissions.path
        self._complain = Complaint(on_note)
        # In containers that share a home, agents may have the same process id.
        self._root = home.resolve() / FOLDER / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._fd = -1
        self._files: dict[Path, _WorkerFile] = {}
        self._copied: object = None
        self._watching = start_task(
            self._watch, name="copying credentials for workers", on_broken=on_broken
        )

    def make(self, job: str) -> Path:
        """A new folder, with a new key, for workers of ``job``. Takes some milliseconds.
        ConfigurationError if it can't be written."""
        # The job may be ordered again while what is left of its workers here still ends.
        folder = self._root / f"{job[:_MAX_NAME]}-{secrets.token_hex(4)}"
        key = Ed25519PrivateKey.generate()
        delegation = delegate(self._key, key.public_key(), job)
        with self._lock:
            now = self._look()
            file = _WorkerFile(key.private_bytes_raw(), delegation, now[0])
            try:
                if self._fd < 0:
                    self._fd = _claim(self._root)
                if not self._files:  # else the other folders may still have to be changed
                    self._copied = now
                self._write(folder, file)
            except (OSError, IdentityError) as error:
                raise ConfigurationError(
                    f"the workers of job {job} can't be given credentials: {error}"
                ) from error
            self._files[folder] = file
        return folder

    def remove(self, folder: Path) -> None:
        """The workers that have ``folder`` have ended."""
        with self._lock:
            if self._files.pop(folder, None) is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def refresh(self) -> None:
        """Copy the list and the eras, if they have changed, into all folders. IdentityError if that
        is impossible."""
        with self._lock:
            now = self._look()
            if now == self._copied:
                return
            for folder, file in self._files.items():
                changed = msgspec.structs.replace(file, eras=now[0])
                self._write(folder, changed)
                self._files[folder] = changed
            self._copied = now

    async def close(self) -> None:
        """Remove all folders."""
        await stop(self._watching)
        with self._lock:
            self._files.clear()
            if self._fd >= 0:
                shutil.rmtree(self._root, ignore_errors=True)
                os.close(self._fd)
                self._fd = -1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._files and self._look() != self._copied:
                try:
                    await asyncio.to_thread(self.refresh)
                    self._complain.over()
                except (PotluckError, OSError) as error:
                    self._complain(f"workers here do not hear of changes in the cluster: {error}")

    def _look(self) -> tuple[tuple[Era, ...], object]:
        return (self._credentials.eras, stamp(self._list))

    def _write(self, folder: Path, file: _WorkerFile) -> None:
        with contextlib.suppress(FileNotFoundError):  # open clusters have no list
            found = read_private(self._list, "the list of admitted keys", max_bytes=MAX_LIST_BYTES)
            replace_private(folder / ADMISSIONS_FILE, _WHAT, found)
        replace_private(folder / CREDENTIALS_FILE, _WHAT, msgspec.msgpack.encode(file))


def load_worker_credentials(home: Path) -> Credentials:
    """The credentials in the folder ``home`` of a job. IdentityError if the job is over, or the
    file is damaged."""
    file = _read(home)
    keyring = Keyring(lambda: _read(home).eras, home / CREDENTIALS_FILE)
    return Credentials(
        Ed25519PrivateKey.from_private_bytes(file.key),
        keyring.eras,
        AdmissionFile(home).objects_to,
        delegation=file.delegation,
    )


def _read(home: Path) -> _WorkerFile:
    path = home / CREDENTIALS_FILE
    try:
        return msgspec.msgpack.decode(read_private(path, _WHAT), type=_WorkerFile)
    except FileNotFoundError:
        raise IdentityError(
            f"{_WHAT} are not in {home} any more: its job is over. A program that is to outlive "
            "its job, and use potluck by itself, must be started without POTLUCK_WORKER_HOME"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise IdentityError(f"{_WHAT} in {path} are damaged: {error}") from error


def _claim(root: Path) -> int:
    """Make ``root``, and lock it until the descriptor that is returned is closed. Removes the
    folders of agents that were killed."""
    make_private(root.parent)
    # Another agent would remove the folder between the moment it is made and its lock.
    claiming = os.open(root.parent, os.O_RDONLY)
    try:
        system.lock(claiming, wait=True)
        make_private(root)
        mine = os.open(root, os.O_RDONLY)
        system.lock(mine)
        for other in root.parent.iterdir():
            with contextlib.suppress(OSError):
                fd = os.open(other, os.O_RDONLY)
                try:
                    system.lock(fd)  # BlockingIOError: its agent runs
                    shutil.rmtree(other, ignore_errors=True)
                finally:
                    os.close(fd)
    finally:
        os.close(claiming)
    return mine
