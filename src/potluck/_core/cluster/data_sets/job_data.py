"""``JobData``: the data sets of one job on this machine, from its first order to its end.

On the machine where the job was started they stay in their folders, and are served from there; on
the others they are fetched, and a folder of links shows them to the job's workers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from potluck._core.background import Tasks, in_thread
from potluck._core.cluster.data_sets.scan import Scanned, changed_file
from potluck._core.cluster.data_sets.sets import DataSets, Note, remove_tree
from potluck._core.cluster.data_sets.travel import Travel, write_list
from potluck._core.cluster.home.keyfile import make_private
from potluck._core.printable import plain, size_in_words
from potluck._core.wire.jobs import DataSet, JobSpec
from potluck.errors import ConfigurationError, PotluckError

VARIABLE = "POTLUCK_DATA_SETS"
_LOOK_S = 5.0
_TICK_S = 1.0
_PIPE = "asked"
_READ = 1 << 16


class JobData:
    """The data sets of the job of ``spec``; ``key`` names it on this machine. ``called(node)`` is
    the name of a node for people, who get lines by ``note``. Every second ``on_wait(worker, text)``
    is told who waits for what: workers here that are excused, of those that ``is_alive`` knows."""

    def __init__(
        self,
        sets: DataSets,
        spec: JobSpec,
        key: str,
        *,
        called: Callable[[str], str],
        note: Note,
        on_wait: Callable[[str, str], None] = lambda worker, text: None,
        is_alive: Callable[[str], bool] = lambda worker: True,
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
        self._on_wait, self._is_alive = on_wait, is_alive
        self._travels: dict[str, Travel] = {}
        self._asked, self._unread = -1, b""
        self.is_open = False
        """Whether other machines may have its data from here."""

    def members(self, nodes: Collection[str]) -> None:
        """The job runs on ``nodes``: these may have its data from here."""
        packages = [name for each in self._spec.data for name in (each.package, each.outline)]
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
            name: {"folder": str(path), "root": str(self._root)}
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
                await in_thread(write_list, self._root, each.name, scanned.stamps)
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
                await self._start(each)
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

    async def _start(self, each: DataSet) -> None:
        """Begin to fetch a data set; until workers can start."""
        for package in filter(None, {each.package, each.outline} - self._held):
            self._held.add(package)
            self._sets.content.hold("data", package)
        if not self._travels:
            self._listen()
            self._tasks.start(self._look_at_waits())
        travel = Travel(self._sets, each, self._spec.starter, self._root, self._called, self._note)
        self._travels[each.name] = travel
        self._tasks.start(travel.run())
        await travel.ready
        self._here[each.name] = self._root / "sets" / each.name

    def _listen(self) -> None:
        """Hear what workers wait for, by a pipe with a name: they may be in a sandbox, and not have
        a link yet."""
        if sys.platform != "win32":
            path = make_private(self._root) / _PIPE
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)
            self._asked = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            asyncio.get_running_loop().add_reader(self._asked, self._hear)

    def _hear(self) -> None:
        *lines, rest = (self._unread + os.read(self._asked, _READ)).split(b"\n")
        self._unread = rest[:_READ]
        for line in lines:
            worker, _, of = line.decode(errors="replace").partition("\t")
            name, _, path = of.partition("\t")
            if self._is_alive(worker) and (travel := self._travels.get(name)) is not None:
                travel.asked(worker, path)

    def ended(self, worker: str) -> None:
        """``worker`` has ended: it waits for nothing any more."""
        for travel in self._travels.values():
            travel.ended(worker)

    async def _look_at_waits(self) -> None:
        """While data is on its way, say who waits for it."""
        while True:
            await asyncio.sleep(_TICK_S)
            for travel in self._travels.values():
                await asyncio.to_thread(travel.tell)
                for worker, text in travel.waits():
                    self._on_wait(worker, text)

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
                    self._sets.withdraw(each)
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
                self._sets.withdraw(each)
        if self._asked >= 0:
            asyncio.get_running_loop().remove_reader(self._asked)
            os.close(self._asked)
        await asyncio.to_thread(remove_tree, self._root)
        for package in self._held:
            self._sets.content.release("data", package)
