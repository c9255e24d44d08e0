"""The command's side of ``potluck fetch``: finds what workers wrote, and brings it here.

Other machines are asked by way of this machine's agent; without one, only what is here is found.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from msgspec import structs

from potluck._core.cluster.code_store.job_folders import CODE, OUTPUT, ResultsClient, is_result
from potluck._core.cluster.content.download import Download
from potluck._core.cluster.content.package import (
    Content,
    Package,
    PackageFile,
    PackageManifest,
    scan,
)
from potluck._core.cluster.content.shelf import Shelf
from potluck._core.cluster.members import Machines
from potluck._core.printable import size_in_words
from potluck._core.wire.peers import Written
from potluck.errors import ConfigurationError, LinkError, PotluckError, ProtocolError


class Holding(Written, frozen=True):
    """What a machine holds of a job; of one that ``is_away``, what it had when the job ended.
    ``gone``: why the files were deleted there; empty: they were not."""

    is_away: bool = False
    is_running: bool = False
    gone: str = ""


@dataclass(slots=True)
class Found:
    """What is known of the files of one job, by machine. ``began`` is Unix time."""

    job: str
    script: str = ""
    began: float = 0.0
    machines: list[Holding] = field(default_factory=list)

    @property
    def here(self) -> list[Holding]:
        """What machines that are not away hold."""
        return [each for each in self.machines if not each.is_away]


@dataclass(frozen=True, slots=True)
class Brought:
    """One file of a job: where it is now below the folder, and from where."""

    path: str
    machine: str
    size: int


@dataclass(slots=True)
class Outcome:
    """What a fetch brought, how many files were there ``already``, which of these have no machine's
    name although another machine wrote the same path, and in sentences what is ``missing``."""

    files: list[Brought] = field(default_factory=list)
    already: int = 0
    unnamed: list[Brought] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


async def find(machines: Machines, job: str = "") -> list[Found]:
    """What there is of ``job`` (empty: of all jobs), the newest first."""
    results = machines.results
    answers = await machines.each(lambda machine: results.ask(machine.node, "list", job))
    found: dict[str, Found] = {}
    for machine, answer in answers:
        for each in answer.jobs:
            one = found.setdefault(each.job, Found(each.job, each.script, each.began))
            count, size, gone = each.num_files, each.num_bytes, each.gone
            one.machines.append(
                Holding(machine.node, machine.name, count, size, False, each.is_running, gone)
            )
    me = machines.all[0].node
    for name, written in await asyncio.to_thread(machines.history.left_by, me):
        asked = {machine.node for machine, _ in answers}
        away = [each for each in written if each.node not in asked]
        if away and job in ("", name):
            held = (Holding(**structs.asdict(each), is_away=True) for each in away)
            found.setdefault(name, Found(name)).machines += held
    return sorted(found.values(), key=lambda each: -each.began)


async def find_one(machines: Machines, job: str) -> Found:
    """What there is of ``job``; ConfigurationError if there is nothing."""
    for found in await find(machines, job):
        return found
    raise ConfigurationError(
        f"no machine that is there has files of a job {job!r} for this one; `potluck fetch` lists "
        "the jobs with files"
    )


async def remove(machines: Machines, found: Found) -> None:
    """Delete the files of a job on all machines that are there; LinkError if one does not."""
    for each in found.here:
        try:
            await machines.results.ask(each.node, "remove", found.job)
        except LinkError as error:
            raise LinkError(f"{each.machine}: {error}") from error
    me = machines.all[0].node
    await asyncio.to_thread(machines.history.files_removed, found.job, me)


async def fetch(
    machines: Machines,
    found: Found,
    pattern: str,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Bring the files of a job that match ``pattern`` into ``folder``, from all machines that are
    there. ``progress(done, total)`` gets bytes.

    A file appears whole or not at all, and never in the place of another. ConfigurationError, with
    what to do, if that would be needed, or if there is no room.
    """
    outcome = Outcome(missing=[_away(each) for each in found.machines if each.is_away])
    sources: list[tuple[Holding, Package]] = []
    for each in found.here:
        if each.gone:
            outcome.missing.append(f"{each.machine}: {each.gone}")
        if not each.num_files:
            continue
        try:
            results = await machines.results.ask(
                each.node, "package", found.job, pattern, num_bytes=each.num_bytes or 0
            )
            package = await machines.results.package(each.node, results.package)
            check_results(package.manifest)
        except PotluckError as error:
            outcome.missing.append(f"{each.machine}: {error}")
            continue
        for name in results.left:
            outcome.missing.append(f"{each.machine}: {name} has a name that can't travel")
        sources.append((each, package))
    places = await asyncio.to_thread(
        placed,
        [(source.machine, package.manifest) for source, package in sources],
        lambda path, file: _has(folder / path, file),
        [*(each.name for each in machines.all), *(each.machine for each in found.machines)],
    )
    outcome.unnamed = [
        Brought(each.path, sources[each.source][0].machine, each.file.size)
        for each in places
        if each.is_unnamed
    ]
    wanted = await asyncio.to_thread(_to_bring, folder, places, outcome)
    await _bring(machines.results, sources, wanted, folder, outcome, progress)
    return outcome


@dataclass(frozen=True, slots=True)
class Place:
    """Where ``file`` of the source number ``source`` goes: ``path`` below the folder.
    ``is_unnamed``: an earlier fetch brought it there before another machine's was there."""

    source: int
    file: PackageFile
    path: str
    is_unnamed: bool = False


def check_results(manifest: PackageManifest) -> None:
    """ProtocolError if another machine sends files that are no results: hidden ones, or from
    elsewhere."""
    for file in manifest.files:
        root, *parts = file.path.split("/")
        if root not in (CODE, OUTPUT) or not parts or not all(map(is_result, parts)):
            raise ProtocolError(f"it sent {file.path!r}, which is no result")


def placed(
    sources: Sequence[tuple[str, PackageManifest]],
    is_here: Callable[[str, PackageFile], bool] = lambda path, file: False,
    names: Iterable[str] = (),
) -> list[Place]:
    """The places of the files of all machines, each with its name. A path that two machines wrote
    differently gets the machine's name before its ending: ``model.attic.pt``. What all wrote alike
    is brought once. A file that an earlier fetch brought (``is_here``) stays where it is, without a
    machine's name or with one of ``names``, whichever machines are there now."""
    by_path: dict[str, list[tuple[int, PackageFile]]] = {}
    for number, (_, manifest) in enumerate(sources):
        for file in manifest.files:
            by_path.setdefault(file.path.partition("/")[2], []).append((number, file))
    places: list[Place] = []
    taken = set(by_path)
    folders = {str(each) for path in by_path for each in PurePosixPath(path).parents}
    for path, each in sorted(by_path.items()):
        unlike: dict[bytes, list[tuple[int, PackageFile]]] = {}
        for number, file in each:
            unlike.setdefault(file.root, []).append((number, file))
        is_shared, plain = len(unlike) > 1, [path] if path not in folders else []
        for copies in unlike.values():
            number, file = copies[0]
            named = _with_machine(path, sources[number][0], taken)
            old = (_with_machine(path, name, by_path.keys()) for name in names)
            places_of = (*plain, named, *old)
            new = named if is_shared or not plain else path
            found = next((each for each in places_of if is_here(each, file)), new)
            taken.add(found)
            places.append(Place(number, file, found, is_shared and found == path))
    return places


def _with_machine(path: str, machine: str, taken: Container[str]) -> str:
    pure = PurePosixPath(path)
    name = re.sub(r"[^\w.-]", "_", machine)
    found, count = pure.with_name(f"{pure.stem}.{name}{pure.suffix}").as_posix(), 1
    while found in taken:
        count += 1
        found = pure.with_name(f"{pure.stem}.{name}.{count}{pure.suffix}").as_posix()
    return found


def _to_bring(folder: Path, places: Sequence[Place], outcome: Outcome) -> list[Place]:
    """The places that are empty. ConfigurationError if one has another file, leads through a link,
    or there is no room for all."""
    wanted = []
    for place in places:
        target = folder / place.path
        for inner in (target, *target.parents):
            if inner == folder:
                break
            if inner.is_symlink():
                raise ConfigurationError(
                    f"{inner} is a link, through which no files of other machines are written: "
                    "give another folder by --to"
                )
        if not target.exists():
            wanted.append(place)
        elif _has(target, place.file):
            outcome.already += 1
        else:
            raise ConfigurationError(
                f"{target} is there already, and is another file than the job's: move it away, or "
                "give another folder by --to"
            )
    above = next(each for each in (folder, *folder.parents) if each.is_dir())
    free, needed = shutil.disk_usage(above).free, sum(each.file.size for each in wanted)
    if needed > free:  # before anything is written
        raise ConfigurationError(
            f"the files take {size_in_words(needed)}, and {above} has room for "
            f"{size_in_words(free)}: give a folder on another disk by --to, or a pattern for some "
            "of them"
        )
    return wanted


def _has(target: Path, file: PackageFile) -> bool:
    if not target.is_file() or target.is_symlink() or target.stat().st_size != file.size:
        return False
    with target.open("rb") as opened:
        return scan(opened)[0] == file.content


async def _bring(
    client: ResultsClient,
    sources: Sequence[tuple[Holding, Package]],
    places: Sequence[Place],
    folder: Path,
    outcome: Outcome,
    progress: Callable[[int, int], None],
) -> None:
    total, done = sum(each.file.size for each in places), 0
    temporary = folder / f".potluck-{secrets.token_hex(8)}"
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    if not places:
        return

    def count(num_bytes: int, node: str) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    async def bring_all(number: int) -> None:
        source, package = sources[number]
        shelf, changed = Shelf(temporary / str(number)), list[str]()
        mine: dict[Content, list[Place]] = {}
        for place in places:
            if place.source == number:
                mine.setdefault(place.file.content, []).append(place)
        num_files = sum(map(len, mine.values()))

        def put(content: Content) -> None:
            """Into its places, at once: the machine may go away before the next file."""
            *others, last = mine.pop(content)
            for place in (*others, last):
                target = folder / place.path
                target.parent.mkdir(parents=True, exist_ok=True)
                whole = shelf.path_of(content)
                if place is not last:
                    whole = Path(shutil.copyfile(whole, temporary / secrets.token_hex(8)))
                whole.rename(target)
                outcome.files.append(Brought(place.path, source.machine, place.file.size))

        download = Download(
            client.members,
            shelf,
            "result",
            package,
            me="",
            wanted=list(mine),
            only=(source.node,),
            on_progress=count,
            on_whole=put,
            on_liar=lambda node, text: changed.append(text),
            patience_s=0.0,
        )
        try:
            await download.look()
            await download.run()
        except (PotluckError, OSError) as error:
            left = sorted(place.path for each in mine.values() for place in each)
            text = f"{len(left)} of its {num_files} files are not here, from {left[0]} on"
            why = getattr(error, "strerror", None) or error
            if changed:
                why = f"{changed[0]}; if it was changed while it was being sent, fetch it again"
            outcome.missing.append(f"{source.machine}: {text}: {why}")

    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"nothing can be written into {folder}: {error.strerror}"
            ) from error
        async with asyncio.TaskGroup() as group:
            for number in range(len(sources)):
                group.create_task(bring_all(number))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for each in made:  # what was made for nothing
            if each.is_dir() and not any(each.iterdir()):
                each.rmdir()
    outcome.files.sort(key=lambda each: each.path)


def _away(held: Holding) -> str:
    """What a machine that is away holds."""
    if held.num_files is None or held.num_bytes is None:
        return f"{held.machine} is away; whether it holds files of this job is not known here"
    count = f"{held.num_files} file{'s' * (held.num_files != 1)}"
    return f"{held.machine} is away; it holds {count} ({size_in_words(held.num_bytes)})"
