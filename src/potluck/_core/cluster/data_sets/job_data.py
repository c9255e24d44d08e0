"""``JobData``: the data sets of one job on this machine, from its first order to its end.

On the machine where the job was started they stay in their folders, and are served from there; on
the others they are fetched, and a folder of links shows them to the job's workers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
import numpy as np

from potluck._core.background import Tasks, in_thread, stop
from potluck._core.cluster.content.download import Download
from potluck._core.cluster.content.package import Package, check_manifest
from potluck._core.cluster.data_sets.scan import Scanned, Stamp, changed_file, stamp_of
from potluck._core.cluster.data_sets.sets import DataSets, Note, remove_tree
from potluck._core.cluster.home.keyfile import make_private, replace_private
from potluck._core.printable import plain, size_in_words
from potluck._core.wire.jobs import DataSet, JobSpec
from potluck.errors import ConfigurationError, LinkError, PotluckError

VARIABLE = "POTLUCK_DATA_SETS"
_TELL_S = 2.0
_LOOK_S = 5.0


class JobData:
    """The data sets of the job of ``spec``; ``key`` names it on this machine. ``called(node)`` is
    the name of a node for people, who get lines by ``note``."""

    def __init__(
        self,
        sets: DataSets,
        spec: JobSpec,
        key: str,
        *,
        called: Callable[[str], str],
        note: Note,
    ) -> None:
        self._sets = sets
        self._spec = spec
        self._called = called
        self._note = note
        self._root = sets.root / "jobs" / key
        self._is_owner = spec.starter == sets.me
        self._offered: dict[str, Scanned] = {}
        self._held = set[bytes]()
        self._failed: PotluckError | OSError | None = None
        self._here: dict[str, Path] = {}
        self._tasks = Tasks()
        self.is_open = False
        """Whether other machines may have its data from here."""

    def members(self, nodes: Collection[str]) -> None:
        """The job runs on ``nodes``: these may have its data from here."""
        packages = [each.package for each in self._spec.data]
        self._sets.allow(self._spec.job, self._spec.starter, nodes, packages)
        self.is_open = True

    @property
    def is_here(self) -> bool:
        """Whether workers can start."""
        return len(self._here) == len(self._spec.data)

    @property
    def folder(self) -> Path:
        """What a worker in a sandbox has to see."""
        return self._root

    def variables(self) -> dict[str, str]:
        """Variables of workers, by which the script finds the data sets."""
        found = {
            name: {"folder": str(path), "files": str(self._list_of(name))}
            for name, path in self._here.items()
        }
        return {VARIABLE: msgspec.json.encode(found).decode()}

    async def offer(self) -> None:
        """Serve what lies on this machine, if the job was started here. ConfigurationError if it
        has changed since, or the job is a federation."""
        if self._spec.keeps_files:
            raise ConfigurationError("takes no data: in a federation data stays where it is")
        was_offered = bool(self._offered)
        for each in self._spec.data if self._is_owner else ():
            folder = Path(each.folder)
            if self._spec.is_local:
                self._here[each.name] = folder
            elif each.name not in self._offered:
                scanned = await self._sets.scan(each.name, folder, self._note)
                if scanned.package.name != each.package:
                    raise ConfigurationError(self._changed(each, (*scanned.changed, "")[0]))
                await in_thread(self._write_list, each.name, scanned.stamps)
                self._sets.offer(each.name, folder, scanned)
                self._offered[each.name], self._here[each.name] = scanned, folder
        if self._offered and not was_offered:
            self._tasks.start(self._watch())

    async def bring(self, *, has_workers: bool) -> None:
        """Fetch what is not here, if this machine ``has_workers`` of the job. ConfigurationError,
        LinkError or OSError if it can't have it, or could not before; the text follows its name.
        Cancelled, it keeps what it has for the next time."""
        missing = [each for each in self._spec.data if each.name not in self._here]
        for each in missing if not self._is_owner else ():
            self._check(each)
        if self._failed is not None and not has_workers:
            raise self._failed
        try:
            for each in missing if has_workers else ():
                await self._fetch(each)
        except (PotluckError, OSError) as error:
            self._failed = error
            raise

    def _check(self, each: DataSet) -> None:
        quota = self._sets.quota
        if not quota:
            raise ConfigurationError(
                "takes no data of jobs: its owner set POTLUCK_DATA=off (potluck up --data 50G "
                "lets it)"
            )
        if each.num_bytes > quota:
            raise ConfigurationError(
                f"takes at most {size_in_words(quota)} of data, and {each.name} has "
                f"{size_in_words(each.num_bytes)} (there: potluck up --data)"
            )

    async def _fetch(self, each: DataSet) -> None:
        sets, content, starter = self._sets, self._sets.content, self._spec.starter
        if each.package not in self._held:
            self._held.add(each.package)
            content.hold("data", each.package)
        shown = _Progress(each.name, self._called, self._note)
        showing: asyncio.Task[None] | None = None

        async def show(package: Package, here: list[int]) -> None:
            if here and not sets.brings(package.name, starter):
                try:
                    await content.ask_to_show("data", package, starter, here)
                except PotluckError as error:
                    raise LinkError(
                        "it is here by a job of another machine, and "
                        f"{self._called(starter)} does not show that it has it, too: {error}"
                    ) from error
            await sets.came(each, starter)

        def on_begin(download: Download, missing: int) -> None:
            nonlocal showing
            here = np.flatnonzero(download.swarm.has).tolist()
            showing = asyncio.create_task(show(download.package, here))
            shown.on_begin(download, missing)

        try:
            package = await content.fetch(
                "data",
                each.package,
                first=starter,
                max_bytes=each.num_bytes,
                on_progress=shown.on_progress,
                on_begin=on_begin,
            )
            if showing is not None:
                await showing
        except LinkError as error:
            raise LinkError(f"can't have the data set {each.name}: {error}") from error
        finally:
            await stop(showing)
        shown.is_whole()
        await in_thread(self._link, each.name, package)  # also if it is cancelled: close removes it
        self._here[each.name] = self._root / "sets" / each.name

    def _link(self, name: str, package: Package) -> None:
        """Make the folder of a data set: read-only links to the files of the store, which stay one
        on the disk. The job's script sees no other file of the store."""
        check_manifest(package.manifest)
        remove_tree(self._root / "sets" / name)
        folder, stamps = make_private(self._root / "sets" / name), {}
        for file in package.manifest.files:
            path = folder / file.path
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.link(self._sets.shelf.path_of(file.content), path)
            os.chmod(path, 0o400)
            stamps[file.path] = stamp_of(os.stat(path))
        self._write_list(name, stamps)
        for place, _, _ in os.walk(folder, topdown=False):
            os.chmod(place, 0o500)

    def _write_list(self, name: str, stamps: dict[str, Stamp]) -> None:
        """Write which files the data set has: the script is told if one is changed."""
        data = msgspec.json.encode(stamps)
        replace_private(self._list_of(name), "the files of a data set", data)

    def _list_of(self, name: str) -> Path:
        return self._root / "lists" / name

    async def _watch(self) -> None:
        """End the offer of a data set that is changed while the job runs: other machines would take
        this one for a liar."""
        while self._offered:
            await asyncio.sleep(_LOOK_S)
            for each in self._spec.data:
                if (scanned := self._offered.get(each.name)) is None:
                    continue
                folder = Path(each.folder)
                changed = await asyncio.to_thread(changed_file, folder, scanned.stamps)
                if changed and self._offered.pop(each.name, None) is not None:
                    self._sets.withdraw(each.package, folder)
                    self._note(self._changed(each, changed))

    def _changed(self, each: DataSet, path: str) -> str:
        where = plain(str(Path(each.folder, path)))
        return (
            f"the data set {each.name} was changed while the job runs or waits: {where}; machines "
            "that don't have it yet can't get it. Start the job again when nothing writes there"
        )

    async def close(self) -> None:
        """The job is over here: its data may go when its room is needed."""
        self._sets.forbid(self._spec.job)
        await self._tasks.close()
        for each in self._spec.data:
            if self._offered.pop(each.name, None) is not None:
                self._sets.withdraw(each.package, Path(each.folder))
        await asyncio.to_thread(remove_tree, self._root)
        for package in self._held:
            self._sets.content.release("data", package)


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
