"""Results: the files that a job's workers wrote on a node, on their way to the job's starter.

They travel as a package does (``transfer.py``), whose manifest is made when it is asked for.
``StartedJobs`` records which machines hold files of the jobs that this node started, so that
machines which are away can be named.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import msgspec

from potluck._core.background import Tasks
from potluck._core.cluster.code_store.job_folders import JobFolder, JobFolders, newest
from potluck._core.cluster.code_store.package import (
    MAX_MANIFEST,
    PackageManifest,
    decode_manifest,
    encode_manifest,
)
from potluck._core.cluster.code_store.transfer import PackageServer, PartFetcher, Send
from potluck._core.cluster.home.keyfile import replace_private
from potluck._core.wire import peers
from potluck._core.wire.peers import (
    MAX_LISTED,
    JobFiles,
    ResultsTold,
    ResultsWanted,
    Want,
    Written,
)
from potluck.errors import LinkError, PotluckError

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

    def __init__(self, me: str, folders: JobFolders, send: Send) -> None:
        self._me = me
        self._folders = folders
        self._send = send
        self._servers: defaultdict[str, PackageServer] = defaultdict(partial(PackageServer, send))
        self._offers: deque[tuple[str, bytes]] = deque()
        self._tasks = Tasks()
        self._asked = Counter[str]()
        self._busy = asyncio.Semaphore(1)
        """Of packages, of which each reads all files: one is made at a time."""

    def answer(self, node: str, message: ResultsWanted | peers.PartWanted) -> None:
        """``node`` sent ``message``."""
        if isinstance(message, peers.PartWanted):
            server = self._servers.get(node) or PackageServer(self._send)
            server.answer(node, message)
        elif self._asked[node] < _MAX_ASKED:
            self._asked[node] += 1
            self._tasks.start(self._answer(node, message))
        else:
            self._send(node, ResultsTold(message.number, error="it was asked too much at once"))

    async def close(self) -> None:
        """Answer nothing any more."""
        await self._tasks.close()

    async def _answer(self, node: str, wanted: ResultsWanted) -> None:
        try:
            match wanted.want:
                case "package":
                    told = await self._package(node, wanted)
                case "list":
                    listed = await asyncio.to_thread(self._listed, node, wanted.job)
                    told = ResultsTold(wanted.number, listed)
                case "remove":
                    told = await asyncio.to_thread(self._removed, node, wanted)
        except (PotluckError, OSError) as error:
            told = ResultsTold(wanted.number, error=str(error)[:4096])
        finally:
            self._asked[node] -= 1
        self._send(node, told)

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

    async def _package(self, node: str, wanted: ResultsWanted) -> ResultsTold:
        async with self._busy:
            for folder in self._open_to(node, wanted.job):
                if not folder.record.gone:
                    make = partial(folder.manifest, partial(is_wanted, wanted.pattern))
                    manifest, left = await asyncio.to_thread(make)
                    package = self._offer(node, folder, manifest)
                    return ResultsTold(wanted.number, package=package, left=tuple(left[:16]))
        return ResultsTold(wanted.number, error=f"there are no files of job {wanted.job!r}")

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

    def _removed(self, node: str, wanted: ResultsWanted) -> ResultsTold:
        listed = self._listed(node, wanted.job) if wanted.job else ()
        if any(each.is_running for each in listed):
            return ResultsTold(wanted.number, error="the job runs: its files can't be removed now")
        for folder in self._open_to(node, wanted.job) if listed else ():
            self._folders.remove(folder)
        return ResultsTold(wanted.number, listed)


class ResultsClient(PartFetcher):
    """Asks nodes about results; ``arrived`` and ``told`` feed it their answers."""

    def __init__(self, send: Send) -> None:
        super().__init__(send, "the files")
        self._asked: dict[int, asyncio.Future[ResultsTold]] = {}
        self._number = 0

    def told(self, message: ResultsTold) -> None:
        """A node answered."""
        future = self._asked.get(message.number)
        if future is not None and not future.done():
            future.set_result(message)

    def ended(self, reason: str) -> None:
        """Nothing more arrives."""
        self.lost(reason=reason)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(LinkError(reason))

    async def ask(
        self, node: str, want: Want, job: str = "", pattern: str = "", *, num_bytes: int = 0
    ) -> ResultsTold:
        """The answer of ``node``; it may have to read ``num_bytes`` for it. LinkError with its
        reason if it has none, or if it is silent for too long."""
        self._number += 1
        number = self._number
        future: asyncio.Future[ResultsTold] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        timeout_s = _ANSWER_S + num_bytes / _HASHED_BYTES_PER_S
        try:
            if not self._send(node, ResultsWanted(number, want, job, pattern)):
                raise LinkError("there is no link to it")
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise LinkError(f"it did not answer for {timeout_s:.0f} s") from None
        finally:
            del self._asked[number]
        if answer.error:
            raise LinkError(answer.error)
        return answer

    async def manifest(self, node: str, package: bytes) -> PackageManifest:
        """The manifest of ``package``; errors as for ``whole``."""
        data = await self.whole(node, package, b"", MAX_MANIFEST)
        return decode_manifest(data, package, max_bytes=1 << 50, portable=False)
