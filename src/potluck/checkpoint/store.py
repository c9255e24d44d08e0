"""The checkpoint store: checkpoints in a directory, written atomically and verified when read.

The checkpoint with number 7, of step 120, is two files::

    000007-step-120.safetensors     the state (state.py)
    000007-step-120.json            the manifest: hashes of the file and of every tensor

If four ranks write it into a shared directory, it is four parts and the manifest::

    000007-step-120.part-1-of-4.safetensors ... part-4-of-4.safetensors
    000007-step-120.json

Each file is written under a temporary name, flushed to the disk and renamed. Only the user of the
training can read them. The manifest is
written last: a checkpoint without a manifest does not count. Numbers only grow, so the newest
checkpoint has the highest number, also after training went back to an earlier step. The process
that writes the manifest holds a lock on the directory, and first removes the remains of a writer
that was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from potluck._core.checks import Duration, checked_seconds
from potluck._core.forks import Owner
from potluck.checkpoint import files, manifest
from potluck.checkpoint.manifest import File, Manifest
from potluck.checkpoint.state import (
    Entry,
    State,
    decode_entries,
    digest,
    encode_entries,
    flatten,
    unflatten,
)
from potluck.errors import CheckpointError

_log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{6,})-step-(\d+)(\.part-\d+-of-\d+)?\.(safetensors|json)")
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and verified: the ``state`` after ``step`` committed steps.

    ``path`` is the file of its (first) part; ``facts`` describe the world that wrote it.
    ``number`` is its place among the checkpoints of the training.
    """

    step: int
    state: State
    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a checkpoint that this process writes: ``index`` of ``of``. All ranks that write
    it must pass the same ``number``, which no checkpoint has; 0 for the only writer, which takes
    the next."""

    index: int = 0
    of: int = 1
    number: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """The data that one process writes for one checkpoint."""

    step: int
    part: Part
    tree: Any
    entries: dict[str, Entry]
    facts: dict[str, Any]
    given_up: threading.Event


class CheckpointStore:
    """The checkpoints in ``directory``, which is created if it does not exist.

    The newest ``keep`` checkpoints are kept. One process writes at a time (in a group: rank 0); any
    number of processes may read. ``copies``: in a training on several machines so many of them
    write each checkpoint, every one to its own disk, and older ones are removed only when it is
    whole on all of these. ``sharded``: each rank of a group writes a part of every checkpoint, to a
    directory that all ranks share; rank 0 waits up to ``parts_timeout_s`` seconds for the parts of
    the others. ``asynchronous``: ``save`` copies the state and returns, and a thread writes it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        copies: int = 2,
        sharded: bool = False,
        asynchronous: bool = False,
        parts_timeout_s: Duration = 60.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
        if copies < 1:
            raise ValueError(f"copies is {copies}; a checkpoint lies on at least 1 machine")
        self.directory = Path(directory)
        self.keep = keep
        self.copies = copies
        self.sharded = sharded
        self.asynchronous = asynchronous
        self._parts_timeout_s = checked_seconds(parts_timeout_s, "parts_timeout_s")
        self._writer = BackgroundWriter("checkpoint-writer")
        self._given_up = threading.Event()
        self._number = 0  # of the last part, whose file may not exist yet
        self.safe: int | None = None
        """The number of the last checkpoint known to lie on enough machines: the newest up to it is
        kept, too. None: all count."""
        self.whole = self._written = 0
        """``whole``: the number of the newest checkpoint known to be whole here when the last
        ``save`` returned; 0: none."""

    def __reduce__(self) -> Any:
        """A copy is another store of the same directory and options."""
        options: dict[str, Any] = {
            "copies": self.copies,
            "sharded": self.sharded,
            "asynchronous": self.asynchronous,
            "parts_timeout_s": self._parts_timeout_s,
        }
        return partial(CheckpointStore, **options), (self.directory, self.keep)

    def save(
        self,
        state: State,
        step: int,
        *,
        facts: dict[str, Any] | None = None,
        part: Part | None = None,
    ) -> Path | None:
        """Write ``state`` as the newest checkpoint; with ``part`` only this process's part of it.

        Returns the path of the file, which is then on the disk; checkpoints beyond ``keep`` are
        removed. An asynchronous store returns None after the previous save has ended and the state
        is copied. ``facts`` (plain JSON values) go into the manifest.

        CheckpointError if the checkpoint can't be written (disk full, read-only, another writer),
        in an asynchronous store if the *previous* one could not; earlier checkpoints are untouched.
        TypeError, with the path, for a value that a state can't hold.
        """
        tree, entries = flatten(state)
        if part is not None:
            sizes = {name: entry.data.nbytes for name, entry in entries.items()}
            entries = {name: entries[name] for name in assign(sizes, part.of)[part.index]}
            self._number = max(self._number, part.number)
        self._given_up = threading.Event()
        job = _Job(step, part or Part(), tree, entries, facts or {}, self._given_up)
        if self.asynchronous:
            # The tensors of a state share the model's memory, which training changes meanwhile.
            copies = {n: replace(entry, data=entry.data.copy()) for n, entry in entries.items()}
            self._writer.join()
            self.whole = self._written
            self._writer.submit(partial(self._write_later, replace(job, entries=copies)))
            return None
        path = self._write(job)
        self.whole = self._written
        return path

    def wait(self) -> None:
        """Wait until an asynchronous save has ended; CheckpointError if it failed."""
        self._writer.wait()

    close = wait

    def give_up(self) -> None:
        """Stop waiting for the parts of other ranks, since a rank is lost.

        If the checkpoint stays incomplete, that is logged, and does not raise from a later save.
        """
        self._given_up.set()

    def next_number(self) -> int:
        """A number above those of all checkpoints, also of those that are being written.

        CheckpointError if the directory can't be created or read.
        """
        try:
            files.make_directory(self.directory)
            numbers = [_NAME.fullmatch(files.final_name(n)) for n in os.listdir(self.directory)]
        except OSError as error:
            raise CheckpointError(
                f"checkpoints can't be written to {self.directory}: {error.strerror or error}"
            ) from error
        return 1 + max([self._number, *(int(match[1]) for match in numbers if match)])

    def load_latest(self) -> Checkpoint | None:
        """The newest intact checkpoint; None if the directory has no checkpoints.

        A damaged checkpoint is skipped with a warning in the log that names the file and the
        damage. CheckpointError if there are checkpoints and all are damaged.
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

    def make_directory(self) -> None:
        """Make the directory now, in place of at the first checkpoint. CheckpointError if it can't
        be made, or can't be written to."""
        try:
            files.make_directory(self.directory)
            if os.access(self.directory, os.W_OK | os.X_OK):
                return
            why = "no permission to write there"
        except OSError as error:
            why = error.strerror or str(error)
        raise CheckpointError(
            f"{self.directory} can't be a directory of checkpoints: {why}; give another one"
        )

    def steps(self) -> list[int]:
        """The steps of the checkpoints, the newest checkpoint first, intact or not."""
        return [step for _, step, _ in self._manifests()]

    def load(self, step: int) -> Checkpoint:
        """The newest checkpoint of ``step``. CheckpointError if there is none or it is damaged."""
        for _, its_step, stem in self._manifests():
            if its_step == step:
                return self._load(stem)
        raise CheckpointError(f"{self.directory} has no checkpoint of step {step}")

    def prune(self) -> None:
        """Remove the checkpoints beyond ``keep``, but for the newest up to ``safe``. OSError if
        that fails."""
        found = self._manifests()
        stay = kept([number for number, _, _ in found], self.keep, self.safe)
        for number, _, stem in found:
            if number not in stay:
                # The manifest first: if this is interrupted, `_sweep` removes a state without a
                # manifest.
                (self.directory / f"{stem}.json").unlink(missing_ok=True)
                for path in self.directory.glob(f"{stem}.*"):
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def marked(self, mark: int) -> Iterator[None]:
        """For the block, show ``mark`` (63 bits) to all that see this directory (``marks``).
        CheckpointError if it can't be created or written to."""
        path = self.directory / f"000000-step-0.json.{mark:016x}.writing"  # swept, if it is left
        try:
            files.make_directory(self.directory)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise CheckpointError(
                f"checkpoints can't be written to {self.directory}: {error.strerror or error}"
            ) from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def marks(self, among: Collection[int]) -> set[int]:
        """Those of the marks ``among`` that this directory shows now."""
        # By name: a network's file system may show an old list.
        names = {mark: f"000000-step-0.json.{mark:016x}.writing" for mark in among}
        return {mark for mark, name in names.items() if os.path.lexists(self.directory / name)}

    # ------------------------------------------------------------ writing

    def _write_later(self, job: _Job) -> None:
        try:
            self._write(job)
        except CheckpointError as error:
            if not job.given_up.is_set():
                raise
            _log.warning("%s; a rank was lost meanwhile", error)  # not a fault of the disk

    def _write(self, job: _Job) -> Path:
        try:
            files.make_directory(self.directory)
            if job.part.index:
                return self._write_part(job)
            return self._write_checkpoint(job)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {job.step} can't be written to {self.directory}: "
                f"{error.strerror or error}; earlier checkpoints are untouched"
            ) from error

    def _write_checkpoint(self, job: _Job) -> Path:
        """Write this process's file and the manifest: on rank 0, or as the only writer."""
        with files.locked(self.directory) as directory_fd:
            newest = max((number for number, _, _ in self._names()), default=0)
            number = job.part.number or 1 + newest
            whole_ones = self._manifests()
            if whole_ones and number <= (last := max(each for each, _, _ in whole_ones)):
                raise CheckpointError(
                    f"{self.directory} has a checkpoint {last} of another training, and this would "
                    f"be {number}: give each training a directory of its own"
                )
            self._sweep(number - bool(job.part.number))  # other ranks write parts of that number
            stem = f"{number:06d}-step-{job.step}"
            first = self._write_file(job, stem, directory_fd)
            parts = [first, *self._await_parts(job, stem)]
            whole = Manifest(manifest.FORMAT, job.step, job.facts, parts)
            files.write(self.directory / f"{stem}.json", manifest.seal(whole), directory_fd)
            for seal in self.directory.glob(f"{stem}.part-*.json"):
                seal.unlink()
            self._written = number
            self.prune()
            return self.directory / first.file

    def _write_part(self, job: _Job) -> Path:
        fd = os.open(self.directory, os.O_RDONLY)
        try:
            stem = f"{job.part.number:06d}-step-{job.step}"
            written = self._write_file(job, stem, fd)
            path = self.directory / written.file
            files.write(path.with_suffix(".json"), manifest.seal(written), fd)
            return path
        finally:
            os.close(fd)

    def _write_file(self, job: _Job, stem: str, directory_fd: int) -> File:
        if job.part.of > 1:
            stem += f".part-{job.part.index + 1}-of-{job.part.of}"
        data = encode_entries(None if job.part.index else job.tree, job.entries)
        path = self.directory / f"{stem}.safetensors"
        files.write(path, data, directory_fd)
        return manifest.describe(path.name, data, job.entries)

    def _await_parts(self, job: _Job, stem: str) -> list[File]:
        """Wait for the seals of the other ranks' parts; the parts' entries for the manifest."""
        deadline = time.monotonic() + self._parts_timeout_s
        of = job.part.of
        names = [f"{stem}.part-{index + 1}-of-{of}" for index in range(1, of)]
        while True:
            # Decided before the look, so that parts that came by the deadline are used.
            is_last_look = job.given_up.is_set() or time.monotonic() > deadline
            missing = [n for n in names if not (self.directory / f"{n}.json").exists()]
            if not missing:
                break
            if is_last_look:
                raise CheckpointError(
                    f"the checkpoint of step {job.step} is not complete: {missing[0]} is not in "
                    f"{self.directory}; a sharded checkpoint needs a directory that all ranks share"
                )
            job.given_up.wait(_POLL_S)  # shared file systems have no notification of new files
        seals = [self.directory / f"{name}.json" for name in names]
        parts = [
            manifest.unseal(files.read(path, manifest.MAX_BYTES), path, File) for path in seals
        ]
        for part in parts:
            size = (self.directory / part.file).stat().st_size
            if size != part.bytes:
                raise CheckpointError(
                    f"{part.file} in {self.directory} has {size} of {part.bytes} bytes"
                )
        return parts

    def _sweep(self, up_to: int) -> None:
        """Remove the remains of killed writers, up to a number: temporary files, and states without
        a manifest."""
        complete = {stem for _, _, stem in self._manifests()}
        for name in os.listdir(self.directory):
            final = files.final_name(name)
            match = _NAME.fullmatch(final)
            if match is None or int(match[1]) > up_to:
                continue
            stem = f"{match[1]}-step-{match[2]}"
            if name != final or stem not in complete:
                (self.directory / name).unlink(missing_ok=True)

    # ------------------------------------------------------------ reading

    def _load(self, stem: str) -> Checkpoint:
        path = self.directory / f"{stem}.json"
        found = manifest.unseal(files.read(path, manifest.MAX_BYTES), path, Manifest)
        tree: Any = None
        entries: dict[str, Entry] = {}
        for index, part in enumerate(found.parts):
            own_tree, own = decode_entries(self._read_part(part))
            if own.keys() & entries.keys():
                raise CheckpointError(f"{part.file} holds tensors that another part holds, too")
            entries |= own
            tree = own_tree if index == 0 else tree
        first = self.directory / found.parts[0].file
        number = int(stem.partition("-")[0])
        return Checkpoint(found.step, unflatten(tree, entries), first, found.facts, number)

    def _read_part(self, part: File) -> bytes:
        path = self.directory / part.file
        data = files.read(path, part.bytes)
        if len(data) != part.bytes:
            raise CheckpointError(f"{path} has {len(data)} bytes; {part.bytes} are expected")
        if digest(data) != part.sha3_256:
            raise CheckpointError(f"{path} is damaged: {manifest.damage(data, part.tensors)}")
        return data

    # ------------------------------------------------------------ names

    def _names(self) -> list[tuple[int, int, str]]:
        """(number, step, file name) of every file in the directory that belongs to a checkpoint."""
        try:
            found = [_NAME.fullmatch(name) for name in os.listdir(self.directory)]
        except FileNotFoundError:
            return []
        return [(int(match[1]), int(match[2]), match[0]) for match in found if match]

    def _manifests(self) -> list[tuple[int, int, str]]:
        """(number, step, stem of the file names) of every checkpoint, the newest first."""
        found = [
            (number, step, name.removesuffix(".json"))
            for number, step, name in self._names()
            if name.endswith(".json") and ".part-" not in name
        ]
        return sorted(found, reverse=True)


def assign(sizes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """Split tensors, given by names and sizes in bytes, into ``num_parts`` parts of similar size.

    Returns the names of each part. Greedy: the largest tensor first, each to the smallest part
    (Graham, "Bounds on multiprocessing timing anomalies", 1969: at most a third above the optimum).
    Deterministic, so all ranks get the same result.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; it must be at least 1")
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    filled = [0] * num_parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        part = filled.index(min(filled))
        parts[part].append(name)
        filled[part] += sizes[name]
    return parts


def kept(numbers: Sequence[int], keep: int, safe: int | None) -> set[int]:
    """Of the ``numbers`` of the checkpoints on a machine, those that stay: the newest ``keep``, and
    the newest that is not above ``safe`` (None: all count)."""
    newest_first = sorted(numbers, reverse=True)
    stay = set(newest_first[:keep])
    if safe is not None:
        stay |= set([number for number in newest_first if number <= safe][:1])
    return stay


class BackgroundWriter:
    """Runs ``write()`` functions in a thread, one after the other. The error of a write is raised
    by the next call of ``submit`` or ``wait``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = Owner("this store, which writes in the background,")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Wait until the previous write has ended, start ``write``, and raise the error of the
        previous one. ``write`` is started also if this raises."""
        error = self._end()
        # Not a daemon: at its end the interpreter waits for the write.
        self._thread = threading.Thread(target=self._run, args=(write,), name=self._name)
        self._thread.start()
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until the write in progress has ended, and raise its error."""
        error = self._end()
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait until the write in progress has ended; its error is raised later."""
        self._owner.check()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _end(self) -> BaseException | None:
        self.join()
        error, self._error = self._error, None
        return error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
