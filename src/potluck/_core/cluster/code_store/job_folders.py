"""The folders of jobs on this node, and the results in them: the files that a job's workers wrote,
on their way to the job's starter. Results are kept for days; nothing of them is deleted without a
word.

All that this node has of a job is in its folder ``key_of(job, starter)`` in ``jobs_in(home)``. Of
this module are ``code``, a copy of the job's package (none for a local job), ``output``, the
directory that workers find as ``POTLUCK_OUTPUT``, and ``record``, which comes last and goes first:
without a record the other two are nothing. As long as the job runs the record is locked, so that no
process deletes them. ``cluster/jobs/history.py`` and ``cluster/jobs/log.py`` have files of their
own there. Whoever deletes the last file deletes the folder.

A *result* is a regular file that the package did not bring: one whose inode changed after the
record was made. Hidden files, links and Python's caches are none, as they are none of what travels.
Results travel as a package (``cluster/content/package.py``), which is made when it is asked for, of
the files where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from potluck._core import system
from potluck._core.cluster.content.download import Members, fetch_description
from potluck._core.cluster.content.package import (
    Package,
    PackageFile,
    PackageManifest,
    check_manifest,
    decode_description,
    objection_to_path,
    open_below,
    scan,
)
from potluck._core.cluster.content.store import ContentStore, Terms
from potluck._core.cluster.home.keyfile import make_private
from potluck._core.printable import size_in_words
from potluck._core.settings import Settings
from potluck._core.system import need_posix
from potluck._core.wire.bulk import MAX_FILES, MAX_MANIFEST
from potluck._core.wire.peers import MAX_LISTED, JobFiles, Results, ResultsRequest, Want
from potluck.errors import ConfigurationError, LinkError

KEPT_JOBS = 4
"""Folders without results that are kept, for a look at what ran."""
_KEPT_NOTICES = 256
_TICK_S = 3.0
_ABANDONED_S = 3600.0
_DAY_S = 86400.0
_RECORD, CODE, OUTPUT = "record", "code", "output"
_CACHES = {"__pycache__"}
_MANIFEST = re.compile(r"((\d{6,12})-step-\d{1,20})\.json")
"""Of a checkpoint (``checkpoint/store.py``)."""


class Record(msgspec.Struct, frozen=True):
    """Whose job it is: its ``starter`` (a node), its ``package`` (hexadecimal; empty for a local
    job), when it ``began`` here (Unix time). ``below``: the working directory of its workers, a
    path in the copy of the package (empty: the copy itself). ``directory``: the one on the starter
    in which the command was given. ``keeps_files``: its results stay on
    the machine. ``gone``: why its results were deleted; empty while they are here. ``num_brought``:
    bytes of checkpoints that earlier jobs left, and that were copied to it."""

    job: str
    starter: str
    package: str = ""
    script: str = ""
    began: float = 0.0
    keeps_files: bool = False
    below: str = ""
    directory: str = ""
    gone: str = ""
    num_brought: int = 0


@dataclass(frozen=True, slots=True)
class Keeping:
    """How long results are kept: at most ``days``, and ``num_bytes`` in all."""

    days: float = 14.0
    num_bytes: int = 20 << 30


KEEPING = Keeping()


def keeping_of(settings: Settings) -> Keeping:
    """What the owner of this machine set."""
    return Keeping(settings.keep_results_days, int(settings.keep_results_gb * 2**30))


@dataclass(frozen=True, slots=True)
class Result:
    """A file that a worker wrote: its ``path`` below the job's folder, and when it was changed."""

    path: str
    size: int
    changed: float


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The folder of one job at ``path``."""

    path: Path
    record: Record

    @property
    def code(self) -> Path:
        """The copy of the job's package, in which its workers run."""
        return self.path / CODE

    @property
    def output(self) -> Path:
        """``POTLUCK_OUTPUT`` of its workers."""
        return self.path / OUTPUT

    def results(self) -> list[Result]:
        """What workers wrote, by path. Reads no file."""
        if self.record.gone:
            return []
        began = (self.path / _RECORD).stat().st_ctime_ns
        return sorted(
            (each for root in (CODE, OUTPUT) for each in _written(self.path, root, began)),
            key=lambda each: each.path,
        )

    def package(self, wanted: Callable[[str], bool]) -> tuple[Package, list[str]]:
        """The results whose paths below ``code`` or ``output`` are ``wanted``, and those whose
        names can't travel. Reads every file."""
        files, lists, left = [], {}, []
        for each in self.results():
            if not wanted(each.path.partition("/")[2]):
                continue
            if objection_to_path(each.path, portable=False):
                left.append(ascii(each.path))
                continue
            with contextlib.suppress(FileNotFoundError), open_below(self.path, each.path) as file:
                content, lists[content] = scan(file)
                files.append(PackageFile(each.path, content.size, content.root))
        return Package(PackageManifest(tuple(sorted(files))), lists), left


class JobFolders:
    """The folders of jobs in ``root`` (``jobs_in``), which is made with the first of them.
    ``on_note`` gets a line about each deletion of results."""

    def __init__(
        self, root: Path, *, keeping: Keeping = KEEPING, on_note: Callable[[str], None]
    ) -> None:
        self._root = root
        self._keeping = keeping
        self._note = on_note
        self._held: dict[Path, int] = {}
        self._busy = threading.Lock()

    def open(self, record: Record, fill: Callable[[Path], None] | None) -> JobFolder:
        """The folder of a job that is about to run; a new one gets its code by ``fill(folder)``.
        Locked until ``close``. It appears whole or not at all. ConfigurationError if the starter
        had another package run under this job's name, OSError if there is no room."""
        target = self._root / key_of(record.job, record.starter)
        with self._busy:
            found = _read(target)
            if found is not None and found.record.package != record.package:
                raise ConfigurationError(
                    f"other code ran here as job {record.job}, by the same starter; start the job "
                    "again, under another name"
                )
            if found is not None and not found.record.gone:
                if target not in self._held:  # this agent is another one than before
                    self._hold(target, target)
                return found
            self._clear(target)  # of a process that was killed, or of results that are gone
            return JobFolder(target, self._make(target, record, fill))

    def _make(self, target: Path, record: Record, fill: Callable[[Path], None] | None) -> Record:
        temporary = self._root / f".{secrets.token_hex(8)}"
        try:
            if record.package and fill is None:
                raise ConfigurationError(
                    "the script's folder was removed here; start the job again"
                )
            make_private(self._root)
            temporary.mkdir(mode=0o700)
            if fill is not None:
                fill(temporary / CODE)
                _make_directory(temporary / CODE, record.below)
                over = (each for each in self.all() if not self.is_in_use(each))
                num_brought = _bring_checkpoints(temporary, record, over)
                record = msgspec.structs.replace(record, num_brought=num_brought)
            (temporary / OUTPUT).mkdir(mode=0o700)
            _write(temporary, record)
            _later_than_now(temporary / _RECORD)
            self._hold(temporary, target)
            target.mkdir(mode=0o700, exist_ok=True)
            for name in (CODE, OUTPUT, _RECORD) if fill is not None else (OUTPUT, _RECORD):
                (temporary / name).rename(target / name)
            return record
        except BaseException:
            self._release(target)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _hold(self, folder: Path, target: Path) -> None:
        self._held[target] = descriptor = os.open(folder / _RECORD, os.O_RDONLY)
        system.lock(descriptor, wait=True)

    def _release(self, target: Path) -> None:
        descriptor = self._held.pop(target, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def close(self, folder: JobFolder) -> None:
        """The job is over here: its folder may be deleted from now on."""
        with contextlib.suppress(OSError):
            os.utime(folder.path)
        self._release(folder.path)
        self.prune()

    def all(self) -> list[JobFolder]:
        """The newest first."""
        return [each for path in newest(self._root) if (each := _read(path)) is not None]

    def is_in_use(self, folder: JobFolder) -> bool:
        """Whether the job runs, also under another process."""
        if folder.path in self._held:
            return True
        try:
            descriptor = os.open(folder.path / _RECORD, os.O_RDONLY)
        except OSError:
            return False
        try:
            system.lock(descriptor, shared=True)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def remove(self, folder: JobFolder, why: str = "") -> None:
        """Delete ``folder``, whose job must be over; a notice with the reason ``why`` stays."""
        if why:
            _write(folder.path, msgspec.structs.replace(folder.record, gone=why))
        self._clear(folder.path, leaves=(_RECORD,) if why else ())
        remove_empty(folder.path)

    def _clear(self, path: Path, leaves: Sequence[str] = ()) -> None:
        """Delete what is of this module in the folder at ``path``."""
        hidden = self._root / f".{secrets.token_hex(8)}"
        for name in (_RECORD, CODE, OUTPUT):
            with contextlib.suppress(FileNotFoundError):
                if name not in leaves:
                    hidden.mkdir(mode=0o700, exist_ok=True)
                    (path / name).rename(hidden / name)
        shutil.rmtree(hidden, ignore_errors=True)

    def prune(self, now: float | None = None) -> None:
        """Delete what is kept no longer at the time ``now`` (None: the clock's). Never the folder
        of a job that runs, nor the newest one with results because of its size."""
        with self._busy:
            self._prune(time.time() if now is None else now)

    def _prune(self, now: float) -> None:
        num_plain, num_notices, total = 0, 0, 0
        keeping = self._keeping
        for folder in self.all():
            if folder.record.gone:
                num_notices += 1
                if num_notices > _KEPT_NOTICES:
                    self.remove(folder)
                continue
            if self.is_in_use(folder):
                continue
            results = folder.results()
            num_bytes = folder.record.num_brought
            if not results:
                num_plain += bool(folder.record.package)
                most = 1 if num_bytes else KEPT_JOBS  # of copies the newest will do
                if not folder.record.package or num_plain > most:
                    self.remove(folder)
                continue
            num_bytes += sum(each.size for each in results)
            used = max(folder.path.stat().st_mtime, *(each.changed for each in results))
            limit = size_in_words(keeping.num_bytes)
            if now - used > keeping.days * _DAY_S:
                self._expire(folder, results, f"{keeping.days:g} days are over", "DAYS")
            elif total + num_bytes <= keeping.num_bytes:
                total += num_bytes
            elif total:
                self._expire(folder, results, f"there were more than {limit} of results", "GB")
            else:
                total = num_bytes
                self._note(
                    f"the results of job {folder.record.job} take {size_in_words(num_bytes)} here, "
                    f"more than the {limit} of POTLUCK_KEEP_RESULTS_GB: they are deleted as soon "
                    f"as another job leaves results. To bring them: potluck fetch "
                    f"{folder.record.job}"
                )
        for path in newest(self._root):  # of a process that was killed
            with contextlib.suppress(FileNotFoundError):
                is_hidden = path.name.startswith(".")
                if now - path.stat().st_mtime <= _ABANDONED_S:
                    continue
                if is_hidden:
                    shutil.rmtree(path, ignore_errors=True)
                elif not (path / _RECORD).exists():
                    self._clear(path)
                    remove_empty(path)

    def _expire(self, folder: JobFolder, results: list[Result], why: str, setting: str) -> None:
        count = len(results)
        noun, verb = ("file", "was") if count == 1 else ("files", "were")
        size = size_in_words(sum(each.size for each in results))
        text = f"{count} {noun} ({size}) {verb} deleted: {why} (POTLUCK_KEEP_RESULTS_{setting})"
        self.remove(folder, text)
        self._note(f"job {folder.record.job}: {text}")


def jobs_in(home: Path) -> Path:
    """Where the folders of jobs are."""
    return home / "code_store" / "jobs"


def key_of(job: str, starter: str) -> str:
    """The name of the folder of a job, and its key in logs. It belongs to the starter, too: no
    member can choose that of another one's job."""
    whose = hashlib.sha256(f"{starter}\n{job}".encode()).hexdigest()
    return f"{job[:50]}.{whose[:20]}"


def remove_empty(folder: Path) -> None:
    """Delete the folder of a job if nothing is left in it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def newest(folder: Path) -> list[Path]:
    """What is in ``folder``, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def is_result(name: str) -> bool:
    """Whether a file or folder of this name may be, or hold, a result."""
    return not name.startswith(".") and name not in _CACHES


def _written(path: Path, root: str, began: int) -> Iterator[Result]:
    """The results below ``path / root``: regular files whose inodes changed at ``began`` (in
    nanoseconds) or later."""
    need_posix("listing a job's files")
    if not (path / root).is_dir():
        return  # a local job has no code here
    for folder, folders, names, descriptor in os.fwalk(path / root, follow_symlinks=False):
        folders[:] = sorted(filter(is_result, folders))
        below = Path(folder).relative_to(path).as_posix()
        for name in filter(is_result, names):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_ctime_ns >= began:
                    yield Result(f"{below}/{name}", status.st_size, status.st_ctime)


def _make_directory(code: Path, below: str) -> None:
    """Make the working directory: a package has no folders without files. Before a worker runs,
    there are no links in ``code`` by which it could be anywhere else."""
    if below:
        if why := objection_to_path(below, portable=False):
            raise ConfigurationError(f"the working directory {below!r} can't be made here: {why}")
        (code / below).mkdir(parents=True, exist_ok=True)


def _bring_checkpoints(path: Path, record: Record, earlier: Iterable[JobFolder]) -> int:
    """Copy to the folder of a job at ``path``, before it has its record, the newest checkpoint of
    each directory that ``earlier`` jobs of its starter had, which were called in the same
    directory: on the starter the script finds it there, too. They are no results of this
    job. One for which there is no room is left out. Returns the bytes that were copied."""
    done, num_bytes = set[str](), 0
    for folder in sorted(earlier, key=lambda each: -each.record.began):
        before = folder.record
        if (before.starter, before.directory) != (record.starter, record.directory or "?"):
            continue
        found: dict[str, tuple[int, str]] = {}
        paths = [each.path for each in _written(folder.path, CODE, 0)]  # those it was given, too
        for each in paths:
            below, _, name = each.rpartition("/")
            if (match := _MANIFEST.fullmatch(name)) is not None and below not in done:
                found[below] = max(found.get(below, (0, "")), (int(match[2]), match[1]))
        for below, (_, stem) in found.items():
            done.add(below)
            # Without its manifest, which comes last, a checkpoint is nothing.
            parts = [each for each in paths if each.startswith(f"{below}/{stem}.")]
            made: list[Path] = []
            try:
                (path / below).mkdir(mode=0o700, parents=True, exist_ok=True)
                for each in sorted(parts, reverse=True):
                    with open_below(folder.path, each) as source, (path / each).open("xb") as copy:
                        made.append(path / each)  # readable by others, in a folder that is not
                        if not system.clone(source.fileno(), copy.fileno()):
                            shutil.copyfileobj(source, copy)
                num_bytes += sum(file.stat().st_size for file in made)
            except OSError:
                for file in made:
                    file.unlink()
    return num_bytes


def _read(path: Path) -> JobFolder | None:
    """The folder at ``path``; None if there is none with a record."""
    try:
        data = (path / _RECORD).read_bytes()
        return JobFolder(path, msgspec.json.decode(data, type=Record))
    except (OSError, msgspec.MsgspecError):
        return None


def _write(path: Path, record: Record) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC  # in place: the record may be locked
    with open(os.open(path / _RECORD, flags, 0o600), "wb") as file:
        file.write(msgspec.json.encode(record))


def _later_than_now(path: Path) -> None:
    """Move the time at which the inode of ``path`` changed past that of all files which are there:
    the clock of a file system moves on every few milliseconds."""
    began, deadline = path.stat().st_ctime_ns, time.monotonic() + _TICK_S
    while path.stat().st_ctime_ns <= began and time.monotonic() < deadline:
        time.sleep(0.001)
        os.utime(path)


_KEPT_OFFERS = 8
_ANSWER_S = 15.0
_MAX_ASKED = 64
"""Requests of one node that wait for their answers: each looks at all folders of jobs."""
_HASHED_BYTES_PER_S = 20e6
"""A slow disk."""


def is_wanted(pattern: str, path: str) -> bool:
    """Whether ``path`` is named by ``pattern``: empty (all), a folder, a path or name with ``*``
    and ``?``."""
    return (
        not pattern
        or path.startswith(f"{pattern.strip('/')}/")
        or fnmatchcase(path, pattern)
        or fnmatchcase(path.rpartition("/")[2], pattern)
    )


class ResultsServer:
    """Answers requests about the results in ``folders`` on node ``me``: requests of its own
    commands about all jobs, requests of other nodes about the jobs that they started."""

    def __init__(self, me: str, folders: JobFolders, content: ContentStore) -> None:
        self._me = me
        self._folders = folders
        self._content = content
        content.open("result", Terms())
        self._offers: deque[tuple[str, bytes]] = deque()
        self._asked = Counter[str]()
        self._busy = asyncio.Semaphore(1)
        """Of packages, of which each reads all files: one is made at a time."""

    async def answer(self, node: str, wanted: ResultsRequest) -> Results:
        """The response to ``node``; LinkError with the reason if there is none."""
        if self._asked[node] >= _MAX_ASKED:
            raise LinkError("it was asked too much at once")
        self._asked[node] += 1
        try:
            match wanted.want:
                case "package":
                    return await self._package(node, wanted)
                case "list":
                    return Results(await asyncio.to_thread(self._listed, node, wanted.job))
                case "remove":
                    return await asyncio.to_thread(self._removed, node, wanted)
        finally:
            self._asked[node] -= 1

    def _listed(self, node: str, job: str) -> tuple[JobFiles, ...]:
        found = []
        for folder in self._open_to(node, job):
            results, record = folder.results(), folder.record
            if results or record.gone:
                found.append(
                    JobFiles(
                        job=record.job,
                        starter=record.starter,
                        script=record.script[:256],
                        began=record.began,
                        num_files=len(results),
                        num_bytes=sum(each.size for each in results),
                        is_running=self._folders.is_in_use(folder),
                        gone=record.gone[:256],
                    )
                )
        return tuple(found[:MAX_LISTED])

    def _open_to(self, node: str, job: str) -> list[JobFolder]:
        """The folders that ``node`` may see, of ``job`` (empty: of all jobs)."""
        return [
            folder
            for folder in self._folders.all()
            if job in ("", folder.record.job)
            and (
                node == self._me
                or (folder.record.starter == node and not folder.record.keeps_files)
            )
        ]

    async def _package(self, node: str, wanted: ResultsRequest) -> Results:
        async with self._busy:
            for folder in self._open_to(node, wanted.job):
                if not folder.record.gone:
                    make = partial(folder.package, partial(is_wanted, wanted.pattern))
                    package, left = await asyncio.to_thread(make)
                    self._offer(node, folder, package)
                    return Results(package=package.name, left=tuple(left[:16]))
        raise LinkError(f"there are no files of job {wanted.job!r}")

    def _offer(self, node: str, folder: JobFolder, package: Package) -> None:
        num_files = len(package.manifest.files)
        if num_files > MAX_FILES or len(package.description) > MAX_MANIFEST:
            raise LinkError(
                f"{num_files} files are more than are fetched at once: name some of them by a "
                f"pattern, as in potluck fetch {folder.record.job} 'runs/a*'"
            )
        self._content.offer("result", folder.path, package, to=node)
        if (node, package.name) not in self._offers:
            self._offers.append((node, package.name))
        if len(self._offers) > _KEPT_OFFERS:
            old, name = self._offers.popleft()
            self._content.withdraw("result", name, to=old)

    def _removed(self, node: str, wanted: ResultsRequest) -> Results:
        listed = self._listed(node, wanted.job) if wanted.job else ()
        if any(each.is_running for each in listed):
            raise LinkError("the job runs: its files can't be removed now")
        for folder in self._open_to(node, wanted.job) if listed else ():
            self._folders.remove(folder)
        return Results(listed)


class Ask(Protocol):
    """``ask(node, request, kind, timeout_s=...)``: the response of ``node``, of type ``kind``.
    Errors as for ``links.peers.Requests.ask``."""

    async def __call__(
        self, node: str, request: ResultsRequest, kind: type[Results], *, timeout_s: float | None
    ) -> Results: ...


class ResultsClient:
    """Asks nodes about results by ``ask``; their files come by ``members``."""

    def __init__(self, ask: Ask, members: Members) -> None:
        self._ask = ask
        self.members = members

    async def ask(
        self, node: str, want: Want, job: str = "", pattern: str = "", *, num_bytes: int = 0
    ) -> Results:
        """The answer of ``node``; it may have to read ``num_bytes`` for it. LinkError with its
        reason if it has none, or if it is silent for too long."""
        timeout_s = _ANSWER_S + round(num_bytes / _HASHED_BYTES_PER_S)
        return await self._ask(
            node, ResultsRequest(want, job, pattern), Results, timeout_s=timeout_s
        )

    async def package(self, node: str, name: bytes) -> Package:
        """The package ``name``. Errors as for ``fetch_description``; ProtocolError if it is another
        one, or may not be."""
        package = decode_description(
            await fetch_description(self.members, node, "result", name), name
        )
        check_manifest(package.manifest, portable=False)
        return package
