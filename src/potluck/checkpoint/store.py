"""Checkpoints in a directory: written whole or not at all, verified before they are used.

Checkpoint number 7, of step 120, is two files::

    000007-step-120.safetensors     the state (state.py)
    000007-step-120.json            the manifest: hashes of the whole and of every tensor

or, written by four ranks into a directory that they share, four parts and the manifest::

    000007-step-120.part-1-of-4.safetensors ... part-4-of-4.safetensors
    000007-step-120.json

All are written to a temporary name, flushed to the disk and renamed; the manifest comes last, so
a checkpoint without one does not count. Numbers only grow, so the newest checkpoint is the one
with the highest number, also when training went back to an earlier step. The one that writes
manifests holds a lock on the directory; what a killed writer left behind is removed by the next.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from potluck.checkpoint import files, manifest
from potluck.checkpoint.files import TEMPORARY
from potluck.checkpoint.manifest import File, Manifest
from potluck.checkpoint.shards import assign
from potluck.checkpoint.state import (
    Entry,
    State,
    decode_entries,
    encode_entries,
    flatten,
    unflatten,
)
from potluck.checkpoint.writer import BackgroundWriter
from potluck.errors import CheckpointError

_log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{6,})-step-(\d+)(\.part-\d+-of-\d+)?\.(safetensors|json)")
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that was read and verified, and the step after which it was taken.

    ``facts`` are those of the world that wrote it.
    """

    step: int
    state: State
    path: Path
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """Which of ``of`` parts this process writes, and the checkpoint's number, agreed on by all."""

    index: int
    of: int
    number: int


@dataclass(frozen=True, slots=True)
class _Job:
    """All that one process writes of one checkpoint."""

    step: int
    part: Part | None
    tree: Any
    entries: dict[str, Entry]
    facts: dict[str, Any]
    given_up: threading.Event


class CheckpointStore:
    """The checkpoints in ``directory``, which is made if need be; the newest ``keep`` are kept.

    One process writes at a time (in a group: rank 0); any number may read. With ``sharded`` each
    rank of a group writes its part of every checkpoint: the directory must be one that all of them
    share. With ``asynchronous`` saving takes a copy and returns; the file is written meanwhile.
    Rank 0 waits ``parts_timeout_s`` seconds for the others' parts.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        sharded: bool = False,
        asynchronous: bool = False,
        parts_timeout_s: float = 60.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
        self.directory = Path(directory)
        self.keep = keep
        self.sharded = sharded
        self.asynchronous = asynchronous
        self._parts_timeout_s = parts_timeout_s
        self._writer = BackgroundWriter("checkpoint-writer")
        self._given_up = threading.Event()
        self._number = 0  # of the last part: its file may not be there yet

    def save(
        self,
        state: State,
        step: int,
        *,
        facts: dict[str, Any] | None = None,
        part: Part | None = None,
    ) -> Path | None:
        """Write ``state`` as the newest checkpoint, or this process's ``part`` of it.

        Returns the file it wrote once everything is on the disk and what is older than ``keep`` is
        gone; with ``asynchronous`` None, once a copy is taken and the save before has ended.
        ``facts`` (plain JSON values) go into the manifest. Raises CheckpointError if it can't be
        written (disk full, read-only, another writer), or, when asynchronous, if the save before
        could not: then the earlier checkpoints are as they were. TypeError for what a state can't
        hold.
        """
        tree, entries = flatten(state)
        if part is not None:
            sizes = {name: entry.data.nbytes for name, entry in entries.items()}
            entries = {name: entries[name] for name in assign(sizes, part.of)[part.index]}
            self._number = max(self._number, part.number)
        self._given_up = threading.Event()
        job = _Job(step, part, tree, entries, facts or {}, self._given_up)
        if self.asynchronous:
            # The tensors of a state are the model's own memory, and training goes on.
            copies = {n: replace(entry, data=entry.data.copy()) for n, entry in entries.items()}
            self._writer.submit(partial(self._write_later, replace(job, entries=copies)))
            return None
        return self._write(job)

    def wait(self) -> None:
        """Wait until an asynchronous save is on the disk; CheckpointError if it could not be."""
        self._writer.wait()

    close = wait

    def give_up(self) -> None:
        """A rank is gone: parts that are not there yet are not waited for.

        A checkpoint that then is not complete is in the log, and no error of a later save.
        """
        self._given_up.set()

    def next_number(self) -> int:
        """A number above those of all checkpoints, also of what is being written.

        CheckpointError if the directory is no use.
        """
        try:
            files.make_directory(self.directory)
            numbers = [
                _NAME.fullmatch(n.removesuffix(TEMPORARY)) for n in os.listdir(self.directory)
            ]
        except OSError as error:
            raise CheckpointError(
                f"checkpoints can't be written to {self.directory}: {error.strerror or error}"
            ) from error
        return 1 + max([self._number, *(int(match[1]) for match in numbers if match)])

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

    # ------------------------------------------------------------ writing

    def _write_later(self, job: _Job) -> None:
        try:
            self._write(job)
        except CheckpointError as error:
            if not job.given_up.is_set():
                raise
            _log.warning("%s; a rank was lost meanwhile", error)  # no disk is at fault

    def _write(self, job: _Job) -> Path:
        try:
            files.make_directory(self.directory)
            if job.part is not None and job.part.index:
                return self._write_part(job, job.part)
            return self._write_checkpoint(job)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {job.step} can't be written to {self.directory}: "
                f"{error.strerror or error}; earlier checkpoints are untouched"
            ) from error

    def _write_checkpoint(self, job: _Job) -> Path:
        """As the one who writes the manifest: rank 0, or the only writer."""
        with files.locked(self.directory) as directory_fd:
            names = self._names()
            if job.part is None:
                number = 1 + max((number for number, _, _ in names), default=0)
                self._sweep(number)
            else:
                number = job.part.number
                self._sweep(number - 1)  # the others write theirs already
            stem = f"{number:06d}-step-{job.step}"
            first = self._write_file(job, stem, directory_fd)
            parts = [first, *self._await_parts(job, stem)]
            whole = Manifest(manifest.FORMAT, job.step, job.facts, parts)
            files.write(self.directory / f"{stem}.json", manifest.seal(whole), directory_fd)
            for seal in self.directory.glob(f"{stem}.part-*.json"):
                seal.unlink()
            self._prune()
            return self.directory / first.file

    def _write_part(self, job: _Job, part: Part) -> Path:
        fd = os.open(self.directory, os.O_RDONLY)
        try:
            stem = f"{part.number:06d}-step-{job.step}"
            written = self._write_file(job, stem, fd)
            path = self.directory / written.file
            files.write(path.with_suffix(".json"), manifest.seal(written), fd)
            return path
        finally:
            os.close(fd)

    def _write_file(self, job: _Job, stem: str, directory_fd: int) -> File:
        if job.part is not None and job.part.of > 1:
            stem += f".part-{job.part.index + 1}-of-{job.part.of}"
        is_first = job.part is None or job.part.index == 0
        data = encode_entries(job.tree if is_first else None, job.entries)
        path = self.directory / f"{stem}.safetensors"
        files.write(path, data, directory_fd)
        return manifest.describe(path.name, data, job.entries)

    def _await_parts(self, job: _Job, stem: str) -> list[File]:
        """What the other ranks have sealed, once all of them have."""
        if job.part is None:
            return []
        deadline = time.monotonic() + self._parts_timeout_s
        of = job.part.of
        names = [f"{stem}.part-{index + 1}-of-{of}" for index in range(1, of)]
        while True:
            # Asked before looking: what had come by then is used.
            is_last_look = job.given_up.is_set() or time.monotonic() > deadline
            missing = [n for n in names if not (self.directory / f"{n}.json").exists()]
            if not missing:
                break
            if is_last_look:
                raise CheckpointError(
                    f"the checkpoint of step {job.step} is not complete: {missing[0]} is not in "
                    f"{self.directory}; a sharded checkpoint needs a directory that all ranks share"
                )
            job.given_up.wait(_POLL_S)  # a shared file system does not notify of new files
        seals = [self.directory / f"{name}.json" for name in names]
        parts = [
            manifest.unseal(files.read(path, manifest.MAX_BYTES), path, File) for path in seals
        ]
        for part in parts:
            size = (self.directory / part.file).stat().st_size
            if size != part.bytes:
                raise CheckpointError(f"{part.file} has {size} bytes of {part.bytes}")
        return parts

    def _sweep(self, up_to: int) -> None:
        """Remove what a writer left that was killed: temporary files, states without manifest."""
        complete = {stem for _, _, stem in self._manifests()}
        for name in os.listdir(self.directory):
            match = _NAME.fullmatch(name.removesuffix(TEMPORARY))
            if match is None or int(match[1]) > up_to:
                continue
            stem = f"{match[1]}-step-{match[2]}"
            if name.endswith(TEMPORARY) or stem not in complete:
                (self.directory / name).unlink(missing_ok=True)

    def _prune(self) -> None:
        for _, _, stem in self._manifests()[self.keep :]:
            # The manifest first: a state without one is swept, one without a state misleads.
            (self.directory / f"{stem}.json").unlink()
            for path in self.directory.glob(f"{stem}.*"):
                path.unlink()

    # ------------------------------------------------------------ reading

    def _load(self, stem: str) -> Checkpoint:
        path = self.directory / f"{stem}.json"
        found = manifest.unseal(files.read(path, manifest.MAX_BYTES), path, Manifest)
        tree: Any = None
        entries: dict[str, Entry] = {}
        for index, part in enumerate(found.parts):
            own_tree, own = decode_entries(self._read_part(part))
            if own.keys() & entries.keys():
                raise CheckpointError(f"{part.file} holds what another part holds too")
            entries |= own
            tree = own_tree if index == 0 else tree
        first = self.directory / found.parts[0].file
        return Checkpoint(found.step, unflatten(tree, entries), first, found.facts)

    def _read_part(self, part: File) -> bytes:
        path = self.directory / part.file
        data = files.read(path, part.bytes)
        if len(data) != part.bytes:
            raise CheckpointError(f"{path} has {len(data)} bytes; {part.bytes} are expected")
        if hashlib.sha3_256(data).hexdigest() != part.sha3_256:
            raise CheckpointError(f"{path} is damaged: {manifest.damage(data, part.tensors)}")
        return data

    # ------------------------------------------------------------ names

    def _names(self) -> list[tuple[int, int, str]]:
        """(number, step, file name) of every file here that is a checkpoint's."""
        try:
            found = [_NAME.fullmatch(name) for name in os.listdir(self.directory)]
        except FileNotFoundError:
            return []
        return [(int(match[1]), int(match[2]), match[0]) for match in found if match]

    def _manifests(self) -> list[tuple[int, int, str]]:
        """(number, step, stem) of every checkpoint, the newest first."""
        found = [
            (number, step, name.removesuffix(".json"))
            for number, step, name in self._names()
            if name.endswith(".json") and ".part-" not in name
        ]
        return sorted(found, reverse=True)
