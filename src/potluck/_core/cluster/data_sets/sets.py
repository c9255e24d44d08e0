"""``DataSets``: the data sets of this machine, in the namespace ``data`` of its content store.

A machine keeps what it fetched for a job, until its quota asks for room: what was used longest ago
goes first, never what a job needs or what its owner pinned. A data set that lies in a folder of
this machine stays there, and is served from there while a job needs it. Only the machines on which
a job runs may have its data.

Below ``home/data``: ``sets``, a record for each data set that came from elsewhere; ``scans``, what
was read of folders here; ``jobs``, the folders that running jobs see.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from potluck._core.cluster.content.package import Package
from potluck._core.cluster.content.store import ContentStore, Terms
from potluck._core.cluster.data_sets.scan import Scanned, cache_name, scan_folder
from potluck._core.cluster.home.keyfile import replace_private
from potluck._core.printable import bytes_in, plain, size_in_words
from potluck._core.wire import jobs, peers
from potluck.errors import ConfigurationError, LinkError

NAME = re.compile(jobs.DATA_NAME)
_TELL_S = 2.0
Note = Callable[[str], None]


def quota_of(text: str) -> int:
    """The bytes that ``potluck up --data`` names: ``50G``, or 0 for ``off``; units are powers of
    1024. ConfigurationError if it means nothing."""
    if text.strip().lower() == "off":
        return 0
    size = bytes_in(text)
    if not size:
        raise ConfigurationError(f"--data {text!r}: write a size, such as 50G, or off")
    return size


class _Record(msgspec.Struct, frozen=True):
    """Of a data set that came from elsewhere: its name, the node that it came from, whether the
    owner of this machine pinned it; the starters of jobs that ``brought`` all of it, or have shown
    that they have it."""

    name: str
    starter: str
    is_pinned: bool = False
    brought: tuple[str, ...] = ()


class DataSets:
    """The data sets of node ``me``, below ``home``, of other machines at most ``quota`` bytes (0:
    none). May be made without an agent, to look and to remove."""

    def __init__(self, home: Path, me: str, content: ContentStore, quota: int) -> None:
        self.me = me
        self.quota = quota
        self.content = content
        self.root = home / "data"
        self.shelf = content.open("data", Terms(self._may_have, quota, is_linked=True))
        self._jobs: dict[str, tuple[str, frozenset[str], frozenset[bytes]]] = {}
        """By job: its starter, its nodes, its packages."""
        self._outlines = Counter[bytes]()
        """How often each outline is offered from here."""
        self._offers: dict[bytes, list[tuple[str, Path, Package]]] = {}
        """By package, its offers from folders here, the one that is served last: the data set's
        name and the folder of each."""
        self._brought = dict[bytes, set[str]]()
        for package, record in self._records().items():
            self._brought[package] = set(record.brought)
            if record.is_pinned:
                content.hold("data", package)

    def forget_jobs(self) -> None:
        """Remove what an agent that was killed left of its jobs. Blocks."""
        remove_tree(self.root / "jobs")

    # What a job brings.

    async def take_in(
        self, named: Collection[tuple[str, str]], note: Note, *, travels: bool
    ) -> tuple[jobs.DataSet, ...]:
        """The data sets in these folders, by name, as a job has them; read, if it ``travels``.
        ConfigurationError if one can't travel."""
        if len({name.casefold() for name, _ in named}) < len(named):  # also on macOS's disks
            raise ConfigurationError("two data sets have one name: give another by --data NAME=DIR")
        found = []
        for name, folder in named:
            if not travels:
                found.append(jobs.DataSet(name, b"", 0, folder))
                continue
            scanned = await self.scan(name, Path(folder), note)
            package, outline = scanned.package, scanned.outline
            size, count = package.manifest.num_bytes, len(package.manifest.files)
            of = b"" if outline is None else outline.name
            found.append(jobs.DataSet(name, package.name, size, folder, of))
            note(f"data {name}: {count} files, {size_in_words(size)}")
        return tuple(found)

    async def take_again(self, spec: jobs.JobSpec, note: Note) -> jobs.JobSpec:
        """``spec`` for another run, with its data as it is now; errors as for ``take_in``."""
        named = [(each.name, each.folder) for each in spec.data]
        return msgspec.structs.replace(spec, data=await self.take_in(named, note, travels=True))

    async def scan(self, name: str, folder: Path, note: Note) -> Scanned:
        """Read ``folder``, as far as it is not known. Cancelled, it ends after a chunk at most."""
        loop, said, stop = asyncio.get_running_loop(), time.monotonic(), threading.Event()

        def on_progress(so_far: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > _TELL_S:
                said = time.monotonic()
                text = (
                    f"data {name}: read {100 * so_far // max(total, 1)}% of {size_in_words(total)}"
                )
                loop.call_soon_threadsafe(note, text)

        cache = self.root / "scans" / cache_name(folder)
        try:
            return await asyncio.to_thread(
                scan_folder, folder, cache, on_progress=on_progress, stop=stop
            )
        finally:
            stop.set()

    # Who may have what.

    def allow(
        self, job: str, starter: str, nodes: Collection[str], packages: Collection[bytes]
    ) -> None:
        """``starter`` and ``nodes`` may have the ``packages`` of ``job``, until ``forbid``: what
        lies in a folder here only if the job was started here."""
        self._jobs[job] = starter, frozenset({*nodes, starter}), frozenset(packages)

    def forbid(self, job: str) -> None:
        """The end of ``allow``."""
        self._jobs.pop(job, None)

    def _may_have(self, node: str, package: bytes) -> bool:
        is_own = package in self._offers or self._outlines[package] > 0
        return any(
            node in nodes
            and package in having
            and (starter == self.me or (not is_own and self.brings(package, starter)))
            for starter, nodes, having in self._jobs.values()
        )

    def _is_used(self, package: bytes) -> bool:
        return any(package in packages for _, _, packages in [*self._jobs.values()])

    def offer(self, name: str, folder: Path, scanned: Scanned) -> None:
        """Serve a data set from its ``folder``, until ``withdraw``, which must follow as often."""
        package = scanned.package
        self._offers.setdefault(package.name, []).append((name, folder, package))
        self.content.offer("data", folder, package)
        if scanned.outline is not None:
            self._outlines[scanned.outline.name] += 1
            self.content.offer("data", self.root / "scans", scanned.outline)

    def withdraw(self, each: jobs.DataSet) -> None:
        """The end of one ``offer``. What is offered from another folder, too, is served from
        there."""
        package, folder = each.package, Path(each.folder)
        self._outlines[each.outline] -= 1
        if not self._outlines[each.outline]:
            self.content.withdraw("data", each.outline)
        offers = self._offers[package]
        offers.remove(next(each for each in offers if each[1] == folder))
        self.content.withdraw("data", package)
        if offers:
            self.content.offer("data", *offers[-1][1:])
        else:
            del self._offers[package]

    # What is kept.

    async def came(self, each: jobs.DataSet, starter: str) -> None:
        """``starter`` has the data set, or all that is here of it comes for a job of its own: from
        now on ``brings`` it. It counts as the one that brought it last."""
        self._brought.setdefault(each.package, set()).add(starter)
        await asyncio.to_thread(self._record, each, starter)

    def _record(self, each: jobs.DataSet, starter: str) -> None:
        before = self._records().get(each.package)
        is_pinned = before is not None and before.is_pinned
        brought = tuple(self._brought.get(each.package, ()))
        self._write(each.package, _Record(each.name, starter, is_pinned, brought))

    def brings(self, package: bytes, starter: str) -> bool:
        """Whether jobs of ``starter`` may have ``package`` as far as it is here. It may be here by
        a job of another node, whose data ``starter`` has not."""
        return starter in self._brought.get(package, ())

    async def answer(self, node: str, request: peers.DataRequest) -> peers.DataHeld:
        """The answer to ``node``: to this machine's owner about all data sets here, to others about
        those that they brought. LinkError, with the reason, if nothing was changed."""
        if request.want != "list":
            if node != self.me:
                raise LinkError("only its owner changes what a machine keeps")
            await asyncio.to_thread(self._change, request.want, request.name)
        return peers.DataHeld(self.quota, tuple(await asyncio.to_thread(self.held, node)))

    def held(self, node: str) -> list[peers.HeldData]:
        """What is here, as ``node`` may know it, the one used last first. Blocks."""
        records, found = self._records(), list[peers.HeldData]()
        if node == self.me:
            for [*_, (name, folder, of)] in [*self._offers.values()]:
                text, size = plain(str(folder)), of.num_bytes
                found.append(peers.HeldData(name, of.name, size, self.me, time.time(), text))
        for kept, is_held in self.content.usage()["data"]:
            record = records.pop(kept.package, None)
            if record is None or node not in (self.me, record.starter):
                continue
            state = "kept" if self.content.has("data", kept.package) else "in part"
            if self._is_used(kept.package):
                state = "in use"
            elif record.is_pinned and is_held:
                state = "pinned"
            found.append(
                peers.HeldData(
                    record.name, kept.package, kept.num_bytes, record.starter, kept.used, state
                )
            )
        for package in records:
            if not self._is_used(package):  # pruned since
                self._unlink(package)
        return found[: peers.MAX_LISTED]

    def _change(self, want: str, name: str) -> None:
        """Remove, pin or unpin the data set that is called ``name``, or whose package begins so."""
        here = [each for each in self.held(self.me) if each.package not in self._offers]
        found = [each for each in here if each.name == name]
        found = found or [each for each in here if each.package.hex().startswith(name)]
        if len(found) != 1:
            what = "several data sets are" if found else "no data set is"
            names = ", ".join(f"{each.package.hex()[:8]} ({each.name})" for each in here)
            raise ConfigurationError(f"{what} called {name!r} here. There are: {names or 'none'}")
        [each] = found
        record = self._records()[each.package]
        if want == "rm":
            if each.state == "in use":
                raise ConfigurationError(f"{name} is needed by a job that runs: wait for its end")
            if each.state == "pinned":
                raise ConfigurationError(f"{name} is pinned: potluck data unpin {name}")
            self.content.delete("data", [each.package])
            self._unlink(each.package)
        elif record.is_pinned != (want == "pin"):
            self._write(each.package, msgspec.structs.replace(record, is_pinned=want == "pin"))
            move = self.content.hold if want == "pin" else self.content.release
            move("data", each.package)

    def delete_from(self, node: str) -> int:
        """Delete what came from ``node``, also what is pinned; how many data sets. Its jobs must be
        over here. Blocks."""
        theirs = {
            each: record for each, record in self._records().items() if record.starter == node
        }
        for package, record in theirs.items():
            if record.is_pinned:
                self.content.release("data", package)
        gone = self.content.delete("data", theirs)
        for package in gone:
            self._unlink(package)
        return len(gone)

    def _unlink(self, package: bytes) -> None:
        self._brought.pop(package, None)
        self._path(package).unlink(missing_ok=True)

    def _path(self, package: bytes) -> Path:
        return self.root / "sets" / package.hex()

    def _write(self, package: bytes, record: _Record) -> None:
        replace_private(self._path(package), "a record of data", msgspec.json.encode(record))

    def _records(self) -> dict[bytes, _Record]:
        found = {}
        for path in (self.root / "sets").glob("[0-9a-f]*"):
            with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                record = msgspec.json.decode(path.read_bytes(), type=_Record)
                found[bytes.fromhex(path.name)] = record
        return found


def remove_tree(folder: Path) -> None:
    """Remove ``folder``, read-only folders in it as well. Blocks."""
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(place, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
