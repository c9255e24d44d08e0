"""Results: the files that a job's workers wrote on a node, on their way to the job's starter.

They travel as a package does (``transfer.py``), whose manifest is made when it is asked for.
``StartedJobs`` records which machines hold files of the jobs that this node started, so that
machines which are away can be named.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import msgspec

from potluck._core.cluster.code_store.job_folders import JobFolder, JobFolders, newest
from potluck._core.cluster.code_store.package import (
    MAX_MANIFEST,
    PackageFile,
    PackageManifest,
    decode_manifest,
    encode_manifest,
)
from potluck._core.cluster.code_store.transfer import (
    Ask,
    PackageServer,
    fetch_parts,
    fetch_whole,
)
from potluck._core.cluster.home.keyfile import replace_private
from potluck._core.wire import peers
from potluck._core.wire.peers import (
    MAX_LISTED,
    JobFiles,
    Results,
    ResultsRequest,
    Want,
    Written,
)
from potluck.errors import LinkError

_KEPT = 256


class StartedJobs:
    """The records of the node of the potluck ``home``."""

    def __init__(self, home: Path) -> None:
        self._root = home / "code_store" / "started"

    def remember(self, job: str, written: Sequence[Written]) -> None:
        """``job`` has ended, and left files. IdentityError if that can't be
        kept."""
        data = msgspec.json.encode(written)
        replace_private(self._root / job, "what a job left on which machine", data)
        for path in newest(self._root)[_KEPT:]:
            path.unlink(missing_ok=True)

    def all(self) -> list[tuple[str, tuple[Written, ...]]]:
        """Each job, the newest first, and what it left."""
        found = []
        for path in newest(self._root):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                data = path.read_bytes()
                found.append((path.name, msgspec.json.decode(data, type=tuple[Written, ...])))
        return found

    def forget(self, job: str) -> None:
        """The files of ``job`` were deleted."""
        (self._root / job).unlink(missing_ok=True)


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

    def __init__(self, me: str, folders: JobFolders) -> None:
        self._me = me
        self._folders = folders
        self._servers: defaultdict[str, PackageServer] = defaultdict(PackageServer)
        self._offers: deque[tuple[str, bytes]] = deque()
        self._asked = Counter[str]()
        self._busy = asyncio.Semaphore(1)
        """Of packages, of which each reads all files: one is made at a time."""

    def part(self, node: str, wanted: peers.PartRequest) -> peers.PackagePart:
        """A part of a package that was made for ``node``; errors as for ``PackageServer.part``."""
        return (self._servers.get(node) or PackageServer()).part(wanted)

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
                    make = partial(folder.manifest, partial(is_wanted, wanted.pattern))
                    manifest, left = await asyncio.to_thread(make)
                    package = self._offer(node, folder, manifest)
                    return Results(package=package, left=tuple(left[:16]))
        raise LinkError(f"there are no files of job {wanted.job!r}")

    def _offer(self, node: str, folder: JobFolder, manifest: PackageManifest) -> bytes:
        num_files = len(manifest.files)
        if num_files > peers.MAX_FILES or len(encode_manifest(manifest)[0]) > MAX_MANIFEST:
            raise LinkError(
                f"{num_files} files are more than are fetched at once: name some of them by a "
                f"pattern, as in potluck fetch {folder.record.job} 'runs/a*'"
            )
        package = self._servers[node].offer(folder.path, manifest)
        if (node, package) not in self._offers:
            self._offers.append((node, package))
        if len(self._offers) > _KEPT_OFFERS:
            old, name = self._offers.popleft()
            self._servers[old].withdraw(name)
        return package

    def _removed(self, node: str, wanted: ResultsRequest) -> Results:
        listed = self._listed(node, wanted.job) if wanted.job else ()
        if any(each.is_running for each in listed):
            raise LinkError("the job runs: its files can't be removed now")
        for folder in self._open_to(node, wanted.job) if listed else ():
            self._folders.remove(folder)
        return Results(listed)


class ResultsClient:
    """Asks nodes about results by ``ask``."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def ask(
        self, node: str, want: Want, job: str = "", pattern: str = "", *, num_bytes: int = 0
    ) -> Results:
        """The answer of ``node``; it may have to read ``num_bytes`` for it. LinkError with its
        reason if it has none, or if it is silent for too long."""
        timeout_s = _ANSWER_S + round(num_bytes / _HASHED_BYTES_PER_S)
        return await self._ask(
            node, ResultsRequest(want, job, pattern), Results, timeout_s=timeout_s
        )

    async def manifest(self, node: str, package: bytes) -> PackageManifest:
        """The manifest of ``package``; errors as for ``fetch_parts``."""
        data = await fetch_whole(self._ask, node, package, b"", MAX_MANIFEST)
        return decode_manifest(data, package, max_bytes=1 << 50, portable=False)

    def parts(self, node: str, package: bytes, file: PackageFile) -> AsyncIterator[bytes]:
        """The content of ``file``; errors as for ``fetch_parts``."""
        return fetch_parts(self._ask, node, package, file.sha256, file.size, exact=True)
