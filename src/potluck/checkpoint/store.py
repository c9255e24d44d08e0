"""Checkpoints in a directory: written whole or not at all, verified before they are used.

Checkpoint number 7, of step 120, is two files::

    000007-step-120.safetensors     the state (state.py)
    000007-step-120.json            the manifest: hashes of the whole and of every tensor

Both are written to a temporary name, flushed to the disk and renamed; the manifest comes last, so
a checkpoint without one does not count. Numbers only grow, so the newest checkpoint is the one
with the highest number, also when training went back to an earlier step. The one writer holds a
lock on the directory; what a killed writer left behind is removed by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.checkpoint.state import State, decode_entries, encode_entries, flatten, unflatten
from potluck.errors import CheckpointError

_log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{6,})-step-(\d+)\.(safetensors|json)")
_TEMPORARY = ".writing"
_FORMAT = 1
_MAX_MANIFEST = 64 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that was read and verified, and the step after which it was taken."""

    step: int
    state: State
    path: Path


class CheckpointStore:
    """The checkpoints in ``directory``, which is made if need be; the newest ``keep`` are kept.

    One process writes at a time (in a group: rank 0); any number may read.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
        self.directory = Path(directory)
        self.keep = keep

    def save(self, state: State, step: int) -> Path:
        """Write ``state`` as the newest checkpoint and return the file that holds it.

        Returns once everything is on the disk, then drops what is older than ``keep``. Raises
        CheckpointError if it can't be written (disk full, read-only, another writer): then the
        earlier checkpoints are as they were. TypeError for what a state can't hold.
        """
        tree, entries = flatten(state)
        data = encode_entries(tree, entries)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with _locked(self.directory) as directory_fd:
                names = self._names()
                self._sweep(names)
                number = 1 + max((number for number, _, _ in names), default=0)
                stem = f"{number:06d}-step-{step}"
                manifest = {
                    "format": _FORMAT,
                    "step": step,
                    "file": f"{stem}.safetensors",
                    "bytes": len(data),
                    "sha3_256": hashlib.sha3_256(data).hexdigest(),
                    "tensors": {name: entry.sha3_256() for name, entry in entries.items()},
                }
                path = self.directory / f"{stem}.safetensors"
                _write(path, data, directory_fd)
                _write(self.directory / f"{stem}.json", _seal(manifest), directory_fd)
                self._prune()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self.directory}: "
                f"{error.strerror or error}; earlier checkpoints are untouched"
            ) from error
        return path

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint that is intact, None if there is none.

        A damaged one is passed over with a warning that names the file and what is wrong.
        Raises CheckpointError if there are checkpoints and none of them is intact.
        """
        damaged = []
        for number, step, stem in self._manifests():
            try:
                return self._load(stem)
            except CheckpointError as error:
                _log.warning("checkpoint %d (step %d) is not used: %s", number, step, error)
                damaged.append(str(error))
        if damaged:
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {self.directory} is intact; "
                f"the newest: {damaged[0]}"
            )
        return None

    def _load(self, stem: str) -> Checkpoint:
        manifest_path = self.directory / f"{stem}.json"
        manifest = _unseal(_read(manifest_path, _MAX_MANIFEST), manifest_path)
        path = self.directory / f"{stem}.safetensors"
        data = _read(path, manifest["bytes"])
        if len(data) != manifest["bytes"]:
            raise CheckpointError(f"{path} has {len(data)} bytes; {manifest['bytes']} are expected")
        if hashlib.sha3_256(data).hexdigest() != manifest["sha3_256"]:
            raise CheckpointError(f"{path} is damaged: {_damage(data, manifest['tensors'])}")
        return Checkpoint(manifest["step"], unflatten(*decode_entries(data)), path)

    def _names(self) -> list[tuple[int, int, str]]:
        """(number, step, file name) of every file here that is a checkpoint's."""
        try:
            found = [_NAME.fullmatch(name) for name in os.listdir(self.directory)]
        except FileNotFoundError:
            return []
        return [(int(match[1]), int(match[2]), match[0]) for match in found if match]

    def _manifests(self) -> list[tuple[int, int, str]]:
        """(number, step, stem) of every checkpoint, the newest first."""
        names = self._names()
        stems = [(n, s, name.removesuffix(".json")) for n, s, name in names if name[-5:] == ".json"]
        return sorted(stems, reverse=True)

    def _sweep(self, names: list[tuple[int, int, str]]) -> None:
        """Remove what a writer left that was killed: temporary files, states without manifest."""
        complete = {name for _, _, name in names}
        for path in self.directory.glob(f"*{_TEMPORARY}"):
            path.unlink()
        for _, _, name in names:
            if name.endswith(".safetensors") and f"{Path(name).stem}.json" not in complete:
                (self.directory / name).unlink()

    def _prune(self) -> None:
        for _, _, stem in self._manifests()[self.keep :]:
            # The manifest first: a state without one is swept, one without a state misleads.
            (self.directory / f"{stem}.json").unlink()
            (self.directory / f"{stem}.safetensors").unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Hold the only writer's lock on ``directory``; yields a descriptor of it."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is writing a checkpoint to {directory}"
            ) from error
        yield fd
    finally:
        os.close(fd)


def _write(path: Path, data: bytes, directory_fd: int) -> None:
    """Write ``path`` so that, whatever happens, it is there whole and on the disk or not at all."""
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        os.fsync(directory_fd)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _read(path: Path, limit: int) -> bytes:
    """All of ``path``, which should not be longer than ``limit``."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path} has {size} bytes; {limit} are expected")
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error


def _seal(manifest: dict[str, Any]) -> bytes:
    """The manifest with a hash of itself."""
    body = json.dumps(manifest, indent=1)
    return json.dumps(
        {"manifest": manifest, "sha3_256": hashlib.sha3_256(body.encode()).hexdigest()}, indent=1
    ).encode()


def _unseal(data: bytes, path: Path) -> dict[str, Any]:
    try:
        sealed = json.loads(data)
        manifest: dict[str, Any] = sealed["manifest"]
        body = json.dumps(manifest, indent=1)
        if sealed["sha3_256"] != hashlib.sha3_256(body.encode()).hexdigest():
            raise CheckpointError(f"{path} is damaged: it does not have the hash it names")
        if manifest["format"] != _FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']}; this potluck reads {_FORMAT}"
            )
        if not isinstance(manifest["bytes"], int) or not isinstance(manifest["step"], int):
            raise TypeError("bytes and step are not numbers")
        if manifest["bytes"] < 0 or not isinstance(manifest["tensors"], dict):
            raise TypeError("bytes or tensors are impossible")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest: {error!r:.200}") from error
    return manifest


def _damage(data: bytes, hashes: dict[str, str]) -> str:
    """Which tensors of a state with the wrong hash differ, as far as that can be told."""
    try:
        _, entries = decode_entries(data)
    except CheckpointError as error:
        return str(error)
    bad = [name for name, entry in entries.items() if hashes.get(name) != entry.sha3_256()]
    return f"tensor {bad[0]!r} has the wrong hash" if bad else "its header has the wrong hash"
