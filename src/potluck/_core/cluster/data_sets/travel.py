"""``Travel``: one data set on its way to this machine, shard by shard.

Files that are no shards come first; then those shards that the ranks of this machine wait for, in
the order in which they asked; then the rest. Each file appears in the folder of the data set when
all of it is there, and verified. For the others there are outlines (``outlines.py``) until then.

Below the root of a job, by name of a data set: ``sets`` has the files that are here, ``outlines``
those of its shards, ``lists`` a list of all files, with the stamps of those that may not change,
``news`` a file whose time says that the agent lives, and whose text why nothing more comes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from potluck._core.background import Tasks, in_thread, why
from potluck._core.cluster.content.download import Download
from potluck._core.cluster.content.package import Content, Package, check_manifest
from potluck._core.cluster.data_sets.outlines import MAX_OUTLINE, lay_out
from potluck._core.cluster.data_sets.scan import Stamp, stamp_of
from potluck._core.cluster.data_sets.sets import DataSets, Note
from potluck._core.cluster.home.keyfile import make_private, replace_private
from potluck._core.printable import plain, size_in_words
from potluck._core.wire.bulk import CHUNK_BYTES
from potluck._core.wire.jobs import DataSet
from potluck.errors import LinkError, PotluckError

LEAST_RATE = 64 << 10
"""Bytes a second. While less comes, a rank that waits is not excused any more."""
_GIVE_UP_S = 60.0
_AGAIN_S = 1.0
_TELL_S = 2.0


class Travel:
    """The data set ``each`` of a job of ``starter``, on its way below ``root``. ``called(node)`` is
    the name of a node for people, who get lines by ``note``. Made in the event loop."""

    def __init__(
        self,
        sets: DataSets,
        each: DataSet,
        starter: str,
        root: Path,
        called: Callable[[str], str],
        note: Note,
    ) -> None:
        self._sets, self._each, self._starter, self._root = sets, each, starter, root
        self._called, self._note = called, note
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when workers may start, or why they can't."""
        self._download: Download | None = None
        self._whole = asyncio.Queue[Content]()
        self._left: dict[Content, list[str]] = {}
        """The paths of what is not in the folder yet."""
        self._asked: dict[Content, dict[str, None]] = {}
        """The workers that wait, in the order in which contents were asked for."""
        self._moved = time.monotonic()
        self._shown = _Progress(each.name, called, note)

    def _place(self, kind: str) -> Path:
        return self._root / kind / self._each.name

    # The fetch.

    async def run(self) -> None:
        """Bring all of it. Once workers run it is tried again until nothing came for a minute."""
        try:
            while True:
                try:
                    return await self._run()
                except LinkError as error:
                    silence_s = time.monotonic() - self._moved
                    if not self.ready.done() or silence_s > _GIVE_UP_S:
                        text = f"can't have the data set {self._each.name}: {error}"
                        raise LinkError(text) from error
                await asyncio.sleep(_AGAIN_S)
        except (PotluckError, OSError) as error:
            if not self.ready.done():
                self.ready.set_exception(error)
                return
            text = str(error) if isinstance(error, PotluckError) else why(error)
            self._note(text)
            await in_thread(self.tell, text)

    async def _run(self) -> None:
        each, content, data = self._each, self._sets.content, b""
        await in_thread(self.tell)
        if each.outline:
            outline = await content.fetch(
                "data", each.outline, first=self._starter, max_bytes=MAX_OUTLINE
            )
            path = self._sets.shelf.path_of(outline.contents[0])
            data = await asyncio.to_thread(path.read_bytes)
        tasks = Tasks()

        def on_begin(download: Download, missing: int) -> None:
            self._shown.on_begin(download, missing)
            download.on_whole = self._whole.put_nowait
            here = np.flatnonzero(download.swarm.has).tolist()
            following.append(tasks.start(self._follow(download, here, data)))

        following = list[asyncio.Task[None]]()
        try:
            await content.fetch(
                "data",
                each.package,
                first=self._starter,
                max_bytes=each.num_bytes,
                on_progress=self._came,
                on_begin=on_begin,
            )
            await following[0]
        finally:
            await tasks.close()

    def _came(self, num_bytes: int, node: str) -> None:
        self._moved = time.monotonic()
        self._shown.on_progress(num_bytes, node)

    async def _follow(self, download: Download, here: list[int], data: bytes) -> None:
        """Put what is whole into the folder, until all is there. These chunks were ``here`` before:
        first the starter has to show that it has them, too."""
        package, sets, shelf = download.package, self._sets, self._sets.shelf
        if here and not sets.brings(package.name, self._starter):
            try:
                await sets.content.ask_to_show("data", package, self._starter, here)
            except PotluckError as error:
                raise LinkError(
                    "it is here by a job of another machine, and "
                    f"{self._called(self._starter)} does not show that it has it, too: {error}"
                ) from error
        await sets.came(self._each, self._starter)
        shards = await in_thread(self._begin, package, data)
        left = defaultdict[Content, list[str]](list)
        for file in package.manifest.files:
            left[file.content].append(file.path)
        first = {content for content, paths in left.items() if not shards.issuperset(paths)}
        download.prefer(first)
        self._download, self._left = download, left
        for content in await asyncio.to_thread(lambda: [*filter(shelf.has, left)]):
            self._whole.put_nowait(content)
        while left:
            if not first & left.keys():
                self._may_start()
            content = await self._whole.get()
            if content in left:
                if len(left) == 1:
                    self._shown.is_whole()
                await in_thread(self._link, content, left[content])
                del left[content]
        await in_thread(self._end, package)
        self._may_start()

    def _may_start(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def _begin(self, package: Package, data: bytes) -> frozenset[str]:
        check_manifest(package.manifest)
        make_private(self._place("sets"))
        write_list(
            self._root, self._each.name, {file.path: None for file in package.manifest.files}
        )
        return lay_out(data, package.manifest, self._place("outlines")) if data else frozenset()

    def _link(self, content: Content, paths: list[str]) -> None:
        """Show a whole file to the job's script, which sees no other file of the store: a read-only
        link, so that it stays one on the disk."""
        for each in paths:
            path = self._place("sets") / each
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                os.link(self._sets.shelf.path_of(content), path)
                os.chmod(path, 0o400)

    def _end(self, package: Package) -> None:
        folder = self._place("sets")
        stamps = {f.path: stamp_of(os.stat(folder / f.path)) for f in package.manifest.files}
        write_list(self._root, self._each.name, stamps)
        for place, _, _ in os.walk(folder, topdown=False):
            os.chmod(place, 0o500)

    def tell(self, text: str = "") -> None:
        """Tell the workers that it is still on its way, or by ``text`` why not. Blocks."""
        news = self._place("news")
        if text or not news.exists():
            replace_private(news, "news of a data set", text.encode())
        os.utime(news)

    # Who waits.

    def asked(self, worker: str, path: str) -> None:
        """``worker`` waits for the file ``path``, or if it is empty for all."""
        for content, paths in self._left.items():
            if not path or path in paths:
                self._asked.setdefault(content, {})[worker] = None
                if path and self._download is not None:
                    self._download.prefer([content], turn=len(self._asked))

    def waits(self) -> Iterator[tuple[str, str]]:
        """The workers that wait, and are excused: for what, and how much of it is here."""
        if self._download is None or time.monotonic() - self._moved > CHUNK_BYTES / LEAST_RATE:
            return
        package, swarm = self._download.package, self._download.swarm
        told = set[str]()
        for content, workers in self._asked.items():
            if content not in self._left or told.issuperset(workers):
                continue
            chunks = package.chunks_of(content)
            span = slice(chunks.start, chunks.stop)
            here = size_in_words(int(package.sizes[span][swarm.has[span]].sum()))
            nodes = ", ".join(map(self._called, swarm.members[:3])) or "nobody"
            path, of = plain(self._left[content][0]), size_in_words(content.size)
            text = f"waits for {path} of {self._each.name} ({here} of {of}, from {nodes})"
            yield from ((worker, text) for worker in workers if worker not in told)
            told.update(workers)

    def ended(self, worker: str) -> None:
        """``worker`` waits for nothing any more."""
        for workers in self._asked.values():
            workers.pop(worker, None)


def write_list(root: Path, name: str, stamps: Mapping[str, Stamp | None]) -> None:
    """Write which files a data set has: the script is told if one is changed. Blocks."""
    replace_private(root / "lists" / name, "the files of a data set", msgspec.json.encode(stamps))


class _Progress:
    """Tells people how far a fetch of the data set ``name`` is."""

    def __init__(self, name: str, called: Callable[[str], str], note: Note) -> None:
        self._name, self._called, self._note = name, called, note
        self._came = Counter[str]()
        self._missing, self._began, self._said = 0, time.monotonic(), time.monotonic()

    def on_begin(self, download: Download, missing: int) -> None:
        self._missing, self._began = missing, time.monotonic()
        if missing:
            of = size_in_words(download.package.num_bytes)
            self._note(f"data {self._name}: fetching {size_in_words(missing)} of {of}")

    def on_progress(self, num_bytes: int, node: str) -> None:
        self._came[node] += num_bytes
        now = time.monotonic()
        if now - self._said > _TELL_S and self._missing:
            self._said, so_far = now, self._came.total()
            rate = so_far / max(now - self._began, 1e-3)
            left = max(0, self._missing - so_far) / max(rate, 1.0)
            self._note(
                f"data {self._name}: {100 * so_far // self._missing}%, {rate / 1e6:.0f} MB/s, "
                f"about {left:.0f} s left"
            )

    def is_whole(self) -> None:
        if self._missing:
            by = ", ".join(
                f"{size_in_words(count)} from {self._called(node)}"
                for node, count in self._came.most_common()
            )
            seconds = time.monotonic() - self._began
            self._note(f"data {self._name}: here after {seconds:.1f} s ({by})")
