"""The code packages of this node: made from a folder here or fetched, served to other nodes, copied
into a folder for each job to work in. What is no longer needed is bounded.

The packages are in the namespace ``code`` of the machine's content store. In ``code_store`` there
are ``origins``, the nodes that packages came from, so that a node's packages can be deleted, and
``jobs``, one folder for each job, in which its workers may write (``job_folders.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from potluck._core.cluster.code_store import job_folders
from potluck._core.cluster.code_store.selection import Selection, check_script, readable, select
from potluck._core.cluster.content.package import MAX_CODE_BYTES
from potluck._core.cluster.content.store import ContentStore, Terms
from potluck._core.cluster.home.keyfile import replace_private
from potluck.errors import ConfigurationError


class _Origin(msgspec.Struct, frozen=True):
    nodes: tuple[str, ...] = ()


class Origins:
    """The records in ``folder``, which is made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def came_from(self, package: bytes, node: str) -> None:
        """``package`` is a folder of ``node``. Recorded before the package is stored."""
        before = self._read(package)
        self._write(package, _Origin(tuple({*before.nodes, node})))

    def drop(self, package: bytes) -> None:
        """Forget ``package``."""
        self._path(package).unlink(missing_ok=True)

    def disown(self, node: str) -> list[bytes]:
        """Take ``node`` out of all records; the packages that are nobody's any more."""
        left = []
        for path in self._folder.glob("[0-9a-f]*"):
            package = bytes.fromhex(path.name)
            before = self._read(package)
            if node in before.nodes:
                nodes = tuple(each for each in before.nodes if each != node)
                self._write(package, _Origin(nodes))
                if not nodes:
                    left.append(package)
        return left

    def _path(self, package: bytes) -> Path:
        return self._folder / package.hex()

    def _read(self, package: bytes) -> _Origin:
        try:
            return msgspec.json.decode(self._path(package).read_bytes(), type=_Origin)
        except (FileNotFoundError, msgspec.MsgspecError):
            return _Origin()

    def _write(self, package: bytes, origin: _Origin) -> None:
        data = msgspec.json.encode(origin)
        replace_private(self._path(package), "where a script's folder came from", data)


KEPT_PACKAGES = 8
KEPT_BYTES = 1 << 30


class CodeStore:
    """The code packages of one node, ``me``: made, fetched and served. Every linked node may have
    every package: a new member may ask before this node knows that it is one. Nothing is on disk
    before the first package."""

    def __init__(
        self,
        home: Path,
        me: str,
        content: ContentStore,
        *,
        keeping: job_folders.Keeping = job_folders.KEEPING,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``keeping`` and ``on_note`` are as for ``JobFolders``."""
        self._home = home
        self._me = me
        self._root = root = home / "code_store"
        self._origins = Origins(root / "origins")
        self._content = content
        self._shelf = content.open("code", Terms(may_have=lambda node, package: True))
        self.folders = job_folders.JobFolders(
            job_folders.jobs_in(home), keeping=keeping, on_note=on_note
        )
        self._results = job_folders.ResultsServer(me, self.folders, content)
        self.answer = self._results.answer

    def has(self, package: bytes) -> bool:
        """Whether ``package`` is here, and served."""
        return self._content.has("code", package)

    def read(self, package: bytes, path: str) -> bytes:
        """The file ``path`` of ``package``. ConfigurationError if it is not here any more."""
        for file in (
            self._content.package("code", package).manifest.files if self.has(package) else ()
        ):
            if file.path == path:
                with self._saying_what_is_wrong():
                    return self._shelf.path_of(file.content).read_bytes()
        raise ConfigurationError(f"{path} of the job is not here any more")

    def hold(self, package: bytes) -> None:
        """A job needs ``package``, as long as it is not released."""
        self._content.hold("code", package)

    def release(self, package: bytes) -> None:
        """The end of ``hold``."""
        self._content.release("code", package)

    async def take_in(
        self, folder: Path, script: str, include: Sequence[str], data: Sequence[str] = ()
    ) -> tuple[bytes, Selection]:
        """Make a package of ``folder`` and serve it; its name, and what is in it. Copies every file
        that is new. The folders ``data`` stay.

        ConfigurationError as for ``select``, if ``script`` (its path below ``folder``) does not
        travel, if a file can't be read or is being changed meanwhile, or if there is no room.
        """
        return await asyncio.to_thread(self._copy, folder, script, include, data)

    def _copy(
        self, folder: Path, script: str, include: Sequence[str], data: Sequence[str]
    ) -> tuple[bytes, Selection]:
        with self._saying_what_is_wrong():
            selection = select(folder, self._home, include, data)
            check_script(folder, script, selection)
            with readable(folder):
                paths = (file.path for file in selection.files)
                package = self._content.add("code", folder, paths).name
            self._origins.came_from(package, self._me)
        return package, selection

    async def fetch(self, package: bytes, origin: str) -> None:
        """Bring ``package``, a folder of the node ``origin``, over from the nodes that have it, and
        serve it, too. Errors as for ``ContentStore.fetch``."""
        with self._saying_what_is_wrong():
            await asyncio.to_thread(self._origins.came_from, package, origin)
            await self._content.fetch("code", package, first=origin, max_bytes=MAX_CODE_BYTES)

    async def delete_from(self, node: str) -> int:
        """Delete the packages that came from ``node`` and no other, with the folders of their jobs;
        how many packages. The jobs must be over here."""
        return await asyncio.to_thread(self._delete_from, node)

    def _delete_from(self, node: str) -> int:
        packages = self._origins.disown(node)
        for package in packages:
            self._origins.drop(package)
        self._content.delete("code", packages)
        for folder in self.folders.all():
            if folder.record.package in {package.hex() for package in packages}:
                self.folders.remove(folder)
        return len(packages)

    def open(self, record: job_folders.Record) -> job_folders.JobFolder:
        """The folder of a job, with a copy of its package. It appears whole or not at all: this
        process may be killed while it copies, and the job be ordered again. ConfigurationError if
        the package is not here any more or there is no room."""
        name, fill = bytes.fromhex(record.package), None
        self._content.hold("code", name)
        try:
            if record.package and self.has(name):
                package = self._content.package("code", name)
                self._shelf.keep(package)
                fill = partial(self._shelf.unpack, package)
            with self._saying_what_is_wrong():
                return self.folders.open(record, fill)
        except BaseException:
            self._content.release("code", name)
            raise

    @contextlib.contextmanager
    def _saying_what_is_wrong(self) -> Iterator[None]:
        """ConfigurationError with what to do for a store that can't be written."""
        try:
            yield
        except OSError as error:
            raise ConfigurationError(
                f"the script's folder can't be kept in {self._home}: "
                f"{error.strerror or error}. Make room there, or set POTLUCK_HOME to a directory "
                "on another disk"
            ) from error

    def close(self, folder: job_folders.JobFolder) -> None:
        """The job of ``folder`` is over. What is kept of old ones: ``JobFolders.prune`` says it of
        their folders; of packages ``KEPT_PACKAGES`` are, and ``KEPT_BYTES`` of their files."""
        self._content.release("code", bytes.fromhex(folder.record.package))
        self.folders.close(folder)
        for package in self._content.prune("code", KEPT_BYTES, max_packages=KEPT_PACKAGES):
            self._origins.drop(package)
