"""The one store of content of a machine: files by namespace, stored, offered where they are,
fetched from other nodes and served to them.

A *hash is no capability*: a node gets of a namespace what the namespace's ``Terms`` give to it, and
is told of everything else what it is told of what does not exist.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from potluck._core.background import in_thread
from potluck._core.cluster.content.download import (
    PATIENCE_S,
    Download,
    Members,
    Progress,
    fetch_description,
    packed,
)
from potluck._core.cluster.content.package import (
    Content,
    Package,
    PackageFile,
    check_manifest,
    decode_description,
    open_below,
    read_below,
    root_of,
    scanned,
    whole_file,
)
from potluck._core.cluster.content.shelf import Kept, Shelf
from potluck._core.cluster.content.swarm import Mask
from potluck._core.cluster.content.whole import Outside, WholeDownload
from potluck._core.printable import size_in_words
from potluck._core.wire import bulk
from potluck._core.wire.bulk import MAX_PART, Namespace
from potluck.errors import ConfigurationError, LinkError, PotluckError, ProtocolError

_MAX_KNOWN = 64
_SPARE_BYTES = 64 << 20
"""Of the disk, which no fetch takes."""
_AGAIN_S = 0.2
_MAX_PROBES, _PROBE_BYTES, _PROBES_AT_ONCE = 128, 4096, 16


def _nobody(node: str, package: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for one namespace. ``may_have(node, package)``: whether another node gets it.
    ``quota``: bytes that all its packages may take on the disk (None: no limit of its own); a file
    in two packages counts twice.
    ``is_durable``: small files, too, outlast a loss of power. ``is_linked``: jobs see links to the
    files, so one that was written to is verified before it is used or served again."""

    may_have: Callable[[str, bytes], bool] = _nobody
    quota: int | None = None
    is_durable: bool = False
    is_linked: bool = False


@dataclass(slots=True)
class _Served:
    """A package that is here, at least in part: ``folder`` has its files (None: the shelf)."""

    package: Package
    has: Mask
    folder: Path | None = None
    download: Download | None = None

    @property
    def is_by_whole(self) -> bool:
        """Whether receivers know the SHA-256 of its one file only."""
        package = self.package
        if len(package.contents) != 1 or not self.has.all():
            return False
        [content] = package.contents
        return content.root != root_of(content.size, package.hashes)


class ContentStore:
    """The content of the node ``me``, below ``root``, which is made when there is something. Other
    nodes are reached by ``members``; ``on_note(text)`` gets lines for people, as about a node that
    sends wrong bytes."""

    def __init__(
        self,
        root: Path,
        me: str,
        members: Members,
        *,
        on_note: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``patience_s``: how long it is waited for a node that has what is missing."""
        self.me = me
        self._root = root
        self._members = members
        self._note = on_note
        self._patience_s = patience_s
        self._terms: dict[str, Terms] = {}
        self._shelves: dict[str, Shelf] = {}
        self._served: dict[tuple[str, bytes], _Served] = {}
        self._offers: dict[tuple[str, bytes, str], _Served] = {}
        """By namespace, package, and the only node that may have it (empty: see the terms)."""
        self._held: Counter[tuple[str, bytes]] = Counter()
        self._holding = threading.Lock()
        self._claims: dict[tuple[str, bytes], tuple[int, int]] = {}
        """Of packages that are on their way here: the bytes that they take, and those missing."""
        self._claiming = threading.Lock()
        self._busy: defaultdict[tuple[str, bytes], asyncio.Lock] = defaultdict(asyncio.Lock)

    def open(self, namespace: Namespace, terms: Terms) -> Shelf:
        """Have the ``namespace`` from now on; what of it is on the disk."""
        self._terms[namespace] = terms
        is_durable, is_linked = terms.is_durable, terms.is_linked
        shelf = Shelf(self._root / namespace, is_durable=is_durable, is_linked=is_linked)
        self._shelves[namespace] = shelf
        return shelf

    # What is here.

    def add(
        self, namespace: Namespace, folder: Path, paths: Iterable[str], *, max_bytes: int = 1 << 50
    ) -> Package:
        """Copy the files ``paths`` below ``folder``, as far as they are new, and keep them as a
        package. Blocks. ProtocolError if one is changed meanwhile; ConfigurationError if there is
        no room."""
        package = scanned(folder, paths)
        shelf = self._shelves[namespace]
        files = {file.content: file for file in package.manifest.files}
        self.hold(namespace, package.name)
        try:
            shelf.keep(package)  # first: what is in no package may be deleted at any time
            missing = [file for content, file in files.items() if not shelf.has(content)]
            lacking = sum(file.size for file in missing)
            self._make_room(namespace, package, package.num_bytes, lacking)
            for file in missing:
                with open_below(folder, file.path) as source:
                    shelf.add(source, file.content)
        finally:
            self._let_go(namespace, package.name)
        return package

    def offer(self, namespace: Namespace, folder: Path, package: Package, *, to: str = "") -> None:
        """Serve ``package``, whose files are below ``folder`` and stay there, until ``withdraw``:
        to the node ``to`` (empty: to all that may have it)."""
        has = np.ones(len(package.hashes), bool)
        self._offers[namespace, package.name, to] = _Served(package, has, folder)

    def withdraw(self, namespace: Namespace, name: bytes, *, to: str = "") -> None:
        """End an offer."""
        self._offers.pop((namespace, name, to), None)

    def has(self, namespace: Namespace, name: bytes) -> bool:
        """Whether all of the package ``name`` is here."""
        served = self._find(namespace, name)
        return served is not None and served.download is None and bool(served.has.all())

    def package(self, namespace: Namespace, name: bytes) -> Package:
        """The package ``name``. ConfigurationError if it is not here, or not whole."""
        served = self._find(namespace, name)
        if served is None or not self.has(namespace, name):
            raise ConfigurationError(f"the {namespace} package {name.hex()[:12]} is not here")
        return served.package

    def hold(self, namespace: Namespace, name: bytes) -> None:
        """Let nothing delete the package until ``release``, which must follow as often."""
        with self._holding:
            self._held[namespace, name] += 1

    def release(self, namespace: Namespace, name: bytes) -> None:
        """See ``hold``."""
        with self._holding:
            self._held[namespace, name] -= 1

    def _let_go(self, namespace: Namespace, name: bytes) -> None:
        """A package is here now, or failed to come."""
        self._claims.pop((namespace, name), None)
        self._served.pop((namespace, name), None)
        self.release(namespace, name)

    def usage(self) -> dict[str, list[tuple[Kept, bool]]]:
        """By namespace, the packages on the disk, the newest first, and whether each is held.
        Blocks."""
        return {
            namespace: [
                (kept, self._held[namespace, kept.package] > 0) for kept in shelf.packages()
            ]
            for namespace, shelf in self._shelves.items()
        }

    def prune(
        self, namespace: Namespace, max_bytes: int, *, max_packages: int = 1 << 20
    ) -> list[bytes]:
        """Delete the packages that were used longest ago, until at most ``max_packages`` of
        together ``max_bytes`` are left; never what is held. The names of those deleted. Blocks."""
        kept = self._sizes(namespace)
        held = [size for name, size in kept.items() if self._held[namespace, name] > 0]
        total, count, gone = sum(held), len(held), list[bytes]()
        for name, size in kept.items():
            if self._held[namespace, name] > 0:
                continue
            if total + size <= max_bytes and count < max_packages:
                total, count = total + size, count + 1
            else:
                gone.append(name)
        return self.delete(namespace, gone)

    def _sizes(self, namespace: Namespace) -> dict[bytes, int]:
        """By package, the bytes that it takes, or is to take; the newest first."""
        return {
            kept.package: self._claims.get((namespace, kept.package), (kept.num_bytes, 0))[0]
            for kept in self._shelves[namespace].packages()
        }

    def delete(self, namespace: Namespace, names: Collection[bytes]) -> list[bytes]:
        """Delete those of these packages that are not held, with the files that no other one has.
        Their names. Blocks."""
        shelf, gone = self._shelves[namespace], list[bytes]()
        for name in names:
            with self._holding:  # who holds it after this does not find it
                if self._held[namespace, name] <= 0:
                    self._served.pop((namespace, name), None)
                    shelf.forget(name)
                    gone.append(name)
        shelf.sweep()
        return gone

    def _make_room(self, namespace: Namespace, package: Package, size: int, missing: int) -> None:
        """Have room for ``package``, which is held, until ``_let_go``: it is to take ``size`` bytes
        of which these are missing. ConfigurationError if they can't be had."""
        shelf, quota, name = self._shelves[namespace], self._terms[namespace].quota, package.name
        with self._claiming:
            try:
                self._claims[namespace, name] = size, missing
                if missing and quota is not None:
                    self._keep_to(quota, namespace, name, missing)
                if missing:
                    self._look_at_disk()
            except ConfigurationError:
                del self._claims[namespace, name]
                if not any(shelf.has(content) for content in package.contents):
                    shelf.forget(name)
                raise

    def _keep_to(self, quota: int, namespace: Namespace, name: bytes, missing: int) -> None:
        sizes = self._sizes(namespace)
        # One that is neither here nor has claimed its room comes after this one.
        held = sum(
            size
            for each, size in sizes.items()
            if each != name
            and self._held[namespace, each] > 0
            and ((namespace, each) in self._claims or self.has(namespace, each))
        )
        if held + sizes[name] > quota:
            raise ConfigurationError(
                f"{size_in_words(missing)} more do not fit: {namespace} may take "
                f"{size_in_words(quota)} of this machine's disk, and running jobs need "
                f"{size_in_words(held)} of it"
            )
        self.prune(namespace, quota)

    def _look_at_disk(self) -> None:
        above = next(each for each in (self._root, *self._root.parents) if each.is_dir())
        free = shutil.disk_usage(above).free
        needed = sum(each for _, each in [*self._claims.values()])
        if needed + _SPARE_BYTES > free:
            raise ConfigurationError(
                f"{size_in_words(needed)} are needed in {self._root}, and the disk has room for "
                f"{size_in_words(max(0, free - _SPARE_BYTES))}. Make room there, or set "
                "POTLUCK_HOME to a directory on another disk"
            )

    # From other nodes.

    async def fetch(
        self,
        namespace: Namespace,
        name: bytes,
        *,
        first: str = "",
        max_bytes: int = 1 << 50,
        portable: bool = True,
        wanted: Callable[[PackageFile], bool] | None = None,
        on_progress: Progress = lambda num_bytes, node: None,
        on_begin: Callable[[Download, int], None] = lambda download, missing: None,
    ) -> Package:
        """Bring the package ``name`` here, from all nodes that have something of it; its
        description from the node ``first``, if that has it. What is here already is not fetched
        again, also after this process was killed. Two calls for one package bring it once.

        ``wanted(file)``: whether a file is fetched (None: all are). ``on_begin(download, missing)``
        is called before the first chunk, with the bytes that are missing. LinkError if no node has
        it; ProtocolError if it is larger than ``max_bytes`` or may not be; ConfigurationError if
        there is no room; OSError if it can't be written.
        """
        shelf = self._shelves[namespace]
        async with self._busy[namespace, name]:
            package = await asyncio.to_thread(shelf.package, name)
            if package is None:
                package = await self._describe(namespace, name, first, max_bytes, portable)
            files = package.manifest.files
            contents = None if wanted is None else {f.content for f in files if wanted(f)}
            how = {"wanted": contents, "on_progress": on_progress}
            await self._run(Download, namespace, package, on_begin, **how)
        return package

    async def fetch_file(
        self,
        namespace: Namespace,
        sha256: bytes,
        size: int,
        *,
        outside: Outside | None = None,
        on_progress: Progress = lambda num_bytes, node: None,
        on_begin: Callable[[Download, int], None] = lambda download, missing: None,
    ) -> Path:
        """The file of ``size`` bytes with this ``sha256``, brought here if it is not here, and
        verified; nobody may write to it. ``outside(begin, count)`` reads it outside of the cluster,
        from where, however many nodes fetch it at one time, each byte is read about once. All else
        as for ``fetch``; the name of its package is that of ``whole_file(sha256, size)``."""
        shelf, package = self._shelves[namespace], whole_file(sha256, size)
        [content] = package.contents
        async with self._busy[namespace, package.name]:
            if not shelf.has(content):
                known = await asyncio.to_thread(shelf.package, package.name)
                how = {"outside": outside, "on_progress": on_progress}
                await self._run(WholeDownload, namespace, known or package, on_begin, **how)
        return shelf.path_of(content)

    async def _run(
        self,
        kind: type[Download],
        namespace: Namespace,
        package: Package,
        on_begin: Callable[[Download, int], None],
        **how: Any,
    ) -> None:
        shelf, how = self._shelves[namespace], how | {"me": self.me, "on_liar": self._on_liar}
        how["patience_s"] = self._patience_s
        download = kind(self._members, shelf, namespace, package, **how)
        self.hold(namespace, package.name)
        try:
            await in_thread(shelf.keep, package)
            missing, has = await download.look(), download.swarm.has
            size = int(package.sizes[has].sum()) + missing
            await in_thread(self._make_room, namespace, package, size, missing)
            served = _Served(package, has, download=download)
            self._served[namespace, package.name] = served
            on_begin(download, missing)
            await download.run()
        finally:
            self._let_go(namespace, package.name)

    async def _describe(
        self, namespace: Namespace, name: bytes, first: str, max_bytes: int, portable: bool
    ) -> Package:
        """The description of a package from some node. They are asked again for a while: none may
        have it yet."""
        loop = asyncio.get_running_loop()
        deadline, why, liars = loop.time() + self._patience_s, "there is no other node", set[str]()
        while True:
            for node in sorted(self._members.nodes, key=lambda each: each != first):
                if node in liars or node == self.me:
                    continue
                try:
                    data = await fetch_description(self._members, node, namespace, name)
                except PotluckError as error:
                    why = f"{node[:12]}: {error}"
                    continue
                try:
                    package = decode_description(data, name)
                except ProtocolError as error:
                    liars.add(node)
                    self._on_liar(node, str(error))
                    why = f"{node[:12]}: {error}"
                    continue
                check_manifest(package.manifest, max_bytes=max_bytes, portable=portable)
                return package
            if loop.time() > deadline:
                raise LinkError(f"no node sends the package {name.hex()[:12]} ({why})")
            await asyncio.sleep(_AGAIN_S)

    async def ask_to_show(
        self, namespace: Namespace, package: Package, node: str, chunks: Sequence[int]
    ) -> None:
        """LinkError unless ``node`` has these ``chunks`` of ``package``, which are here. Of each of
        128 of them at most it is asked for a piece at a random place, which a node that knows no
        more than the name can't send. Cost: 0.5 MiB at most."""

        async def probe(chunk: int) -> None:
            size = int(package.sizes[chunk])
            count = min(size, _PROBE_BYTES)
            begin = int(package.offsets[chunk]) + secrets.randbelow(size - count + 1)
            request = bulk.PartRequest(namespace, package.name, begin, count)
            if (served := self._find(namespace, package.name)) is None:
                raise LinkError("the package is not here any more")
            theirs = await self._members.ask(node, request, bulk.Part)
            if theirs.data != await asyncio.to_thread(self._read, served, request):
                raise LinkError(f"node {node[:12]} sent other bytes than those of chunk {chunk}")

        to_ask = [chunk for chunk in chunks if package.sizes[chunk]]
        to_ask = secrets.SystemRandom().sample(to_ask, min(len(to_ask), _MAX_PROBES))
        for first in range(0, len(to_ask), _PROBES_AT_ONCE):
            await asyncio.gather(*map(probe, to_ask[first : first + _PROBES_AT_ONCE]))

    def _on_liar(self, node: str, text: str) -> None:
        self._note(f"{node}: {text}; it is not asked any more")

    # For other nodes.

    def told(self, node: str, message: bulk.Announce) -> None:
        """``node`` announced what changed there."""
        served = self._served.get((message.namespace, message.package))
        if served is not None and served.download is not None:
            served.download.told(node, message)

    async def answer(self, node: str, request: bulk.Request) -> bulk.Response:
        """The response to ``node``, maybe this one; a PotluckError or OSError says why there is
        none."""
        served = await self._for(node, request.namespace, request.package)
        if isinstance(request, bulk.HoldingRequest):
            if served is None:
                return bulk.Holding()
            if (download := served.download) is not None:
                theirs = (request.has, request.awaits, True, request.declares, request.reaches)
                download.joined(node, bulk.Holding(*theirs))
                return download.holding
            hashes = served.package.hashes if served.is_by_whole else ()
            return bulk.Holding(packed(served.has), declares=tuple(enumerate(hashes)))
        if served is None:
            raise ProtocolError("this node has no such package")
        if isinstance(request, bulk.DescriptionRequest):
            data = served.package.description
            return bulk.Part(len(data), data[request.offset : request.offset + MAX_PART])
        try:
            data = await asyncio.to_thread(self._read, served, request)
        except FileNotFoundError:  # a job changed or removed it: look what is left
            if served.download is None:
                self._served.pop((request.namespace, request.package), None)
            raise
        return bulk.Part(served.package.num_bytes, data)

    async def _for(self, node: str, namespace: Namespace, name: bytes) -> _Served | None:
        """What of the package ``name`` the other ``node`` may have."""
        if (offer := self._offers.get((namespace, name, node))) is not None:
            return offer
        terms = self._terms.get(namespace)
        if terms is None or not terms.may_have(node, name):
            return None
        served = self._offers.get((namespace, name, ""))
        return served or await asyncio.to_thread(self._find, namespace, name)

    def _find(self, namespace: Namespace, name: bytes) -> _Served | None:
        served = self._served.get((namespace, name))
        shelf = self._shelves.get(namespace)
        if served is not None or shelf is None:
            return served
        package = shelf.package(name)
        if package is None:
            return None
        has = np.zeros(len(package.hashes), bool)
        for content in package.contents:
            chunks = package.chunks_of(content)
            has[chunks.start : chunks.stop] = shelf.has(content)
        served = _Served(package, has)
        if has.all():
            for key, each in [*self._served.items()][:-_MAX_KNOWN]:
                if each.download is None:
                    self._served.pop(key, None)
            self._served[namespace, name] = served
        return served

    def _read(self, served: _Served, request: bulk.PartRequest) -> bytes:
        package, begin, end = served.package, request.begin, request.begin + request.count
        chunks = package.chunks_in(request.begin, request.count)
        if not chunks or not served.has[chunks.start : chunks.stop].all():
            raise ProtocolError("this node does not have these chunks")
        shelf, data = self._shelves[request.namespace], bytearray()
        for chunk in chunks:
            at = int(package.offsets[chunk])
            some = min(end, at + int(package.sizes[chunk])) - max(begin, at)
            content, offset = package.place_of(chunk)
            if served.folder is None:
                data += shelf.read(content, offset + max(0, begin - at), some)
            else:
                data += read_below(
                    served.folder, _file_of(package, content), offset + max(0, begin - at), some
                )
        if len(data) != request.count:
            raise OSError("a file was cut off while it was being sent")
        return bytes(data)


def _file_of(package: Package, content: Content) -> PackageFile:
    return next(file for file in package.manifest.files if file.content == content)
