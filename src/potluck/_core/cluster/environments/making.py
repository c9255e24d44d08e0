"""The environments of this machine: made of a plan's wheels by uv, kept, and reused.

Below ``home/environments``: ``plans`` of jobs that were started here, ``pythons`` that uv fetched,
and for each environment a folder by its key, with a lock file beside it. The file ``complete`` in
it is written last: without it an environment counts for nothing, and is removed by the next agent.
Whoever uses or makes an environment holds its lock, across processes.

An environment shares no file with another or with a cache: what a script writes into its packages
stays there, and the fingerprint shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import importlib.metadata
import io
import os
import platform
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from potluck._core import system
from potluck._core.background import in_thread, stop, why
from potluck._core.cluster.content.store import ContentStore
from potluck._core.cluster.environments.kinds import own_kind
from potluck._core.cluster.environments.plan import Part, Plan, Wheel, environment_key
from potluck._core.cluster.environments.uv import run, run_uv
from potluck._core.cluster.environments.wheels import Wheels
from potluck._core.cluster.home.keyfile import make_private
from potluck._core.settings import Settings
from potluck.errors import ConfigurationError

COMPLETE = "complete"
_RESERVED = "reserved"
_ROOM = "room.lock"
_LOCK_AGAIN_S = 0.1
_MAX_CHANGED = 20
_TELL_S = 2.0
_COMPILE_S = 600.0
_MAX_DIRECTORY = 8 << 20
_BLOCK = 4096
_BUILD_S = 3600.0
_BUILD_BYTES = 8 << 30
_SPARE_BYTES = 64 << 20
_LOOK_S = 0.5
_OWN = ("plans", "pythons")


class _Complete(msgspec.Struct, frozen=True):
    """The content of ``complete``."""

    fingerprint: str
    num_bytes: int
    num_packages: int
    python: str
    source: str


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment in ``path``, with its ``python`` and the folder ``base`` of that interpreter.
    It stays as long as the descriptor ``lock`` is open."""

    path: Path
    python: Path
    base: Path
    lock: int

    def release(self) -> None:
        """It is not used any more."""
        os.close(self.lock)

    def variables(self, given: dict[str, str]) -> dict[str, str]:
        """``given`` without what leads to other packages, for a process in this environment."""
        led = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV")
        kept = {n: v for n, v in given.items() if n not in led and not n.startswith("CONDA_")}
        path = os.pathsep.join([str(self.python.parent), *filter(None, [given.get("PATH")])])
        return {**kept, "PATH": path, "VIRTUAL_ENV": str(self.path)}


class Kept(msgspec.Struct, frozen=True):
    """What is kept: an environment, by its ``key``, or (``is_wheel``) a wheel, by its name in the
    content store, hexadecimal. ``used``: when last, Unix time."""

    key: str
    num_bytes: int
    used: float
    num_packages: int = 1
    source: str = ""
    is_wheel: bool = False


class Environments:
    """The environments below ``settings.home``, within the quota and consent in ``settings``."""

    def __init__(
        self,
        settings: Settings,
        content: ContentStore | None = None,
        called: Callable[[str], str] = lambda node: node,
        sandboxed: Callable[[Path, Sequence[Path]], Sequence[str]] | None = None,
    ) -> None:
        """Without the agent's ``content`` store they can be looked at and removed. ``called(node)``
        is the name of a node for people, ``sandboxed(folder, readable)`` what to put before a
        command that may write in ``folder`` alone, sees these files, too, and gets as much memory
        as the owner gives."""
        self.sandboxed = sandboxed
        self.root = settings.home / "environments"
        self._consent = settings.environments
        self.index = settings.package_index
        self.quota = int(settings.environments_gb * (1 << 30))
        self.wheels = Wheels(settings.home, self.index, self.quota, content, called)

    def part_of(self, plan: Plan) -> Part:
        """The part of ``plan`` for this machine. ConfigurationError if this machine makes no such
        environment: the text follows its name."""
        if self._consent == "off":
            raise ConfigurationError(
                "makes no environments for scripts: its owner set POTLUCK_ENVIRONMENTS=off "
                "(potluck up --environments wheels lets it; potluck run --installed does without)"
            )
        part = plan.part(own_kind())
        if objection := self.wheels.objection(part.files):
            raise ConfigurationError(f"fetches no such wheel: {objection}")
        sources = [f"{each.name} {each.version}" for each in part.wheels if each.is_source]
        if sources and self._consent != "builds":
            raise ConfigurationError(
                f"builds nothing from source, and there is no wheel of {', '.join(sources[:8])} "
                "(potluck up --environments builds lets it)"
            )
        return part

    async def make(self, plan: Plan, note: Callable[[str], None]) -> Environment:
        """The environment of ``plan``, which may be here. ``note`` gets lines about the progress.
        Cancelled, it leaves nothing half-made.

        ConfigurationError if it can't be made: the text follows the name of this machine.
        """
        part = self.part_of(plan)
        make_private(self.root)
        python, version = await self._interpreter(plan.python, note)
        own = await asyncio.to_thread(own_files)
        hashes = (path.encode() + sha256(data).digest() for path, data in sorted(own.items()))
        key = environment_key(part, version, b"".join(hashes))
        folder, num_changed = self.root / key, 0
        while True:
            lock = await self._shared(key)  # waits for whoever makes it now
            try:
                if await asyncio.to_thread(self._is_whole, folder):
                    os.utime(folder / COMPLETE)
                    made = folder / "venv" / "bin" / "python"
                    base = Path(os.path.realpath(made)).parents[1]
                    return Environment(folder / "venv", made, base, lock)
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            with self._alone(key) as alone:
                if alone >= 0:
                    if not await asyncio.to_thread(self._is_whole, folder):
                        await _Build(self, folder, alone, plan, part, python, note).run(own)
                    continue
            num_changed += (folder / COMPLETE).exists()
            if num_changed > _MAX_CHANGED:
                raise ConfigurationError(
                    f"can't use its environment: a running job changed files in {folder}; it is "
                    "made anew when that job is over"
                )
            await asyncio.sleep(_LOCK_AGAIN_S)

    async def _interpreter(self, minor: str, note: Callable[[str], None]) -> tuple[str, str]:
        """A Python of this minor version, and its release: this one's, one that is installed here,
        or one that uv fetches."""
        own = platform.python_version()
        if own.startswith(f"{minor}."):
            return sys.executable, own
        given = {"UV_PYTHON_INSTALL_DIR": str(self.root / "pythons"), "UV_NO_CONFIG": "1"}
        find = ["python", "find", "--no-project", "--no-python-downloads", minor]

        async def find_it() -> str:
            return (await run_uv(find, directory=self.root, given=given))[0].strip()

        try:
            found = await find_it()
        except ConfigurationError:
            note(f"Python {minor} is not here: uv fetches it")
            install = ["python", "install", "--no-bin", minor]
            try:
                await run_uv(install, directory=self.root, given=given, as_user=True)
                found = await find_it()
            except ConfigurationError as error:
                raise ConfigurationError(f"can't have Python {minor}: {error}") from error
        note(
            f"the script's Python {minor} is not potluck's ({own}): its workers run without the "
            "native core, on the Python engine"
        )
        show = ["python", "find", "--no-project", "--no-python-downloads", "--show-version", found]
        return found, (await run_uv(show, directory=self.root, given=given))[0].strip()

    async def _shared(self, key: str) -> int:
        """The descriptor of an environment's lock, once nobody has it alone."""
        descriptor = self._lock_file(key)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    system.lock(descriptor, shared=True)
                    return descriptor
                await asyncio.sleep(_LOCK_AGAIN_S)
        except BaseException:
            os.close(descriptor)
            raise

    def _is_whole(self, folder: Path) -> bool:
        found = _read_complete(folder)
        return found is not None and found.fingerprint == _fingerprint(folder / "venv")[0]

    # What is kept.

    def kept(self) -> list[Kept]:
        """The environments and wheels here, the one used last first. Whole ones only."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.root.iterdir():
                complete = _read_complete(path)
                if complete is not None:
                    with contextlib.suppress(OSError):
                        used = (path / COMPLETE).stat().st_mtime
                        size, packages = complete.num_bytes, complete.num_packages
                        source = f"{complete.source}, Python {complete.python}"
                        found.append(Kept(path.name, size, used, packages, source))
        for wheel in self.wheels.kept():
            key = wheel.package.hex()
            found.append(Kept(key, wheel.num_bytes, wheel.used, is_wheel=True))
        return sorted(found, key=lambda each: -each.used)

    def remove_incomplete(self) -> None:
        """Remove what an agent that was killed left half-made."""
        with contextlib.suppress(OSError):
            for path in [*self.root.iterdir()]:
                if path.is_dir() and path.name not in _OWN and _read_complete(path) is None:
                    self.remove(Kept(path.name, 0, 0.0))

    def remove(self, kept: Kept, *, dry_run: bool = False) -> bool:
        """Remove it, unless a job uses it, or a process makes it; whether it was removed, or, in a
        ``dry_run``, would be."""
        if kept.is_wheel:
            return dry_run or self.wheels.remove(bytes.fromhex(kept.key))
        with self._alone(kept.key) as alone:
            if alone >= 0 and not dry_run:
                _remove_tree(self.root / kept.key)
            return alone >= 0

    def forget_plans(self) -> None:
        """Have what no lock says chosen anew."""
        _remove_tree(self.root / "plans")

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[int]:
        """The descriptor of an environment's lock, held alone; -1 if somebody has it."""
        lock = self._lock_file(key)
        try:
            try:
                system.lock(lock)
            except BlockingIOError:
                yield -1
            else:
                yield lock
        finally:
            os.close(lock)

    def _lock_file(self, key: str) -> int:
        flags = os.O_RDWR | os.O_CREAT
        return os.open(self.root / f"{key}.lock", flags, 0o600)

    def make_room(self, folder: Path, num_bytes: int, needed: Sequence[Wheel]) -> None:
        """Reserve ``num_bytes`` for the environment in ``folder``, in place of what was before:
        remove what was not used for the longest time until all fits into the quota; not the
        ``needed`` wheels. ConfigurationError if it can't, or the disk has less room."""
        names = {self.wheels.name(wheel) for wheel in needed}
        with open(self.root / _ROOM, "wb") as lock:
            system.lock(lock.fileno(), wait=True)  # others reserve as well
            self.remove_incomplete()
            (folder / _RESERVED).unlink(missing_ok=True)
            sizes = dict[str, int]()
            for path in self.root.glob(f"*/{_RESERVED}"):
                with contextlib.suppress(OSError):  # complete by now, or given up
                    sizes[path.parent.name] = int(path.read_text())
            kept = self.kept()
            sizes |= {each.key: each.num_bytes for each in kept}
            total = sum(sizes.values()) + num_bytes
            for each in reversed(kept):
                if total > self.quota and each.key not in names and self.remove(each):
                    total -= each.num_bytes
            if total <= self.quota:
                (folder / _RESERVED).write_text(str(num_bytes))
        gb = num_bytes / (1 << 30)
        if total > self.quota:
            raise ConfigurationError(
                f"has no room for {gb:.2g} GB of packages: it keeps "
                f"{self.quota / (1 << 30):.3g} GB of environments and wheels at most, those that "
                "jobs use now among them (there: POTLUCK_ENVIRONMENTS_GB)"
            )
        if (free := shutil.disk_usage(self.root).free) < num_bytes:
            raise ConfigurationError(
                f"has {free / (1 << 30):.2g} GB left on the disk of {self.root}, and the "
                f"environment needs {gb:.2g} GB more (there: potluck clean)"
            )


@dataclass
class _Build:
    """One environment on its way into ``folder``, whose ``lock`` is held."""

    home: Environments
    folder: Path
    lock: int
    plan: Plan
    part: Part
    python: str
    note: Callable[[str], None]

    async def run(self, own: Mapping[str, bytes]) -> None:
        """Make it, with potluck's ``own`` files. If that fails, or is cancelled, nothing is left
        of it but the wheels."""
        began, wheels = time.monotonic(), self.part.files
        try:
            await in_thread(_remove_tree, self.folder)
            make_private(self.folder)
            lacking = await in_thread(self.home.wheels.missing, wheels)
            to_fetch = sum(wheel.size for wheel in lacking)
            # An unpacked wheel is no smaller than the wheel: what can't fit is not fetched.
            room = min(_BUILD_BYTES, self.home.quota // 2)
            least = to_fetch + sum(wheel.size for wheel in wheels)
            await in_thread(self.home.make_room, self.folder, least, wheels)
            if lacking:
                self.note(
                    f"{len(wheels) - len(lacking)} of {len(wheels)} packages are here; "
                    f"fetching {len(lacking)}, {_megabytes(to_fetch)}"
                )
            fetched = _Fetched(to_fetch, self.note)
            with self.home.wheels.held(wheels):
                await self.home.wheels.fetch(wheels, fetched)
                paths = {each.file: self.home.wheels.path(each) for each in self.part.wheels}
                for each in self.part.wheels:
                    if each.is_source:
                        await in_thread(self.home.make_room, self.folder, least + room, wheels)
                        paths[each.file] = await self._built(each, room)
                unpacked = await in_thread(lambda: sum(map(_unpacked, paths, paths.values())))
                await in_thread(self.home.make_room, self.folder, unpacked, wheels)
                await in_thread(self._lay_out, paths)
                await self._install(own)
                await in_thread(self._complete)
        except BaseException as error:
            await in_thread(_remove_tree, self.folder)
            if isinstance(error, OSError):
                raise ConfigurationError(
                    f"can't keep an environment in {self.home.root}: {why(error)}"
                ) from error
            raise
        seconds = time.monotonic() - began
        self.note(f"ready after {seconds:.1f} s{fetched.origins()}")

    async def _built(self, source: Wheel, room: int) -> Path:
        """The wheel that uv builds of ``source`` in the sandbox, where it sees the plan's tools,
        and no network, and has ``room`` bytes of the disk. No other machine gets it."""
        import uv

        built = make_private(self.folder / "built" / source.file)
        files = {each.file: self.home.wheels.path(each) for each in (source, *self.part.tools)}
        for name, path in files.items():
            (built / name).symlink_to(path.absolute())
        base = Path(os.path.realpath(self.python)).parents[1]
        words = [uv.find_uv_bin(), "build", "--wheel", "--offline", "--no-index"]
        words += ["--find-links", ".", "--python", self.python, "--out-dir", "made", source.file]
        environ = {"PATH": os.defpath, "HOME": "/tmp", "NO_COLOR": "1", "UV_NO_CONFIG": "1"}
        assert self.home.sandboxed is not None, "only an agent makes environments"
        try:
            sandbox = await in_thread(self.home.sandboxed, built, (*files.values(), base))
            command = [*sandbox, *words]
            async with asyncio.timeout(_BUILD_S):
                building = asyncio.ensure_future(
                    run(command, directory=built, environ=environ, lock=self.lock)
                )
                try:
                    while not (await asyncio.wait([building], timeout=_LOOK_S))[0]:
                        # What the build hides from this, it can't fill the disk.
                        is_full = shutil.disk_usage(built).free < _SPARE_BYTES
                        if is_full or await in_thread(_room_of, built) > room:
                            gb = f"{room / (1 << 30):.2g} GB"
                            raise ConfigurationError(
                                f"it takes more than {gb} of the disk, or fills it"
                            )
                    await building
                finally:
                    await stop(building)
            for wheel in built.glob("made/*.whl"):
                if wheel.is_file() and wheel.resolve() == built.resolve() / "made" / wheel.name:
                    return wheel  # and no link to a file of the owner's
            raise ConfigurationError("no wheel came of it")
        except (ConfigurationError, TimeoutError) as error:
            text = f"can't build {source.name} {source.version} from source"
            raise ConfigurationError(f"{text}: {str(error) or 'it took too long'}") from error

    def _lay_out(self, paths: Mapping[str, Path]) -> None:
        links, pins = make_private(self.folder / "wheels"), []
        for wheel in self.part.wheels:
            path, digest = paths[wheel.file], wheel.sha256
            if wheel.is_source:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").digest()
            (links / (path.name if wheel.is_source else wheel.file)).symlink_to(path.absolute())
            pins.append(f"{wheel.name}=={wheel.version} --hash=sha256:{digest.hex()}\n")
        (self.folder / "pins.txt").write_text("".join(pins))

    async def _install(self, own: Mapping[str, bytes]) -> None:
        """uv unpacks into a cache of this environment alone, and links the files from there, which
        spares a copy; the cache is removed, so no other environment has these files."""
        venv = self.folder / "venv"
        given = {
            "UV_NO_CONFIG": "1",
            "UV_CACHE_DIR": str(self.folder / "cache"),
            "UV_LINK_MODE": "hardlink",
            "UV_PYTHON_INSTALL_DIR": str(self.home.root / "pythons"),
        }
        words = ["venv", "--quiet", "--no-project", "--python", self.python, str(venv)]
        await run_uv(words, directory=self.folder, given=given, lock=self.lock)
        words = [
            *("pip", "sync", "--quiet", "--python", str(venv), "--require-hashes", "--no-index"),
            *("--only-binary", ":all:", "--allow-empty-requirements"),
            *("--find-links", "wheels", "pins.txt"),
        ]
        try:
            await run_uv(words, directory=self.folder, given=given, lock=self.lock)
        except ConfigurationError as error:
            raise ConfigurationError(f"can't install the packages: {error}") from error
        [packages] = venv.glob("lib/python*/site-packages")
        await in_thread(_write_own, packages, own)
        await self._compile(packages)

    async def _compile(self, packages: Path) -> None:
        """Compile the packages to bytecode, by this interpreter's own compiler, without running
        anything of them: uv would start the environment's Python for it, which runs the ``.pth``
        files of wheels, outside of any sandbox. Python of another release compiles at its first
        import, in memory."""
        if packages.parent.name == f"python{sys.version_info[0]}.{sys.version_info[1]}":
            words = [sys.executable, "-I", "-S", "-m", "compileall", "-q", "-j", "1"]
            with contextlib.suppress(TimeoutError, ConfigurationError):  # it only saves time
                async with asyncio.timeout(_COMPILE_S):
                    await run([*words, str(packages)], directory=self.folder, lock=self.lock)

    def _complete(self) -> None:
        for name in ("cache", "wheels", "built"):
            _remove_tree(self.folder / name)
        venv = self.folder / "venv"
        for place, _, files in os.walk(venv):
            for name in files:
                if not os.path.islink(path := os.path.join(place, name)):
                    os.chmod(path, os.stat(path).st_mode & 0o555)
            os.chmod(place, 0o555)
        fingerprint, num_bytes = _fingerprint(venv)
        num_packages, plan = len(self.part.wheels) + 1, self.plan
        content = _Complete(fingerprint, num_bytes, num_packages, plan.python, plan.source)
        partial = self.folder / f"{COMPLETE}.new"
        with open(partial, "wb") as file:
            file.write(msgspec.json.encode(content))
            file.flush()
            if sys.platform != "win32":
                os.sync()  # what counts as complete is on the disk, the packages as well
        os.replace(partial, self.folder / COMPLETE)
        (self.folder / _RESERVED).unlink()


def _unpacked(file: str, path: Path) -> int:
    """The room that the wheel ``file`` in ``path`` takes when unpacked, as its directory says."""
    try:
        with _Directory(io.FileIO(path)) as raw, zipfile.ZipFile(raw) as archive:
            sizes = (each.file_size for each in archive.infolist())
            return sum(-(-size // _BLOCK) * _BLOCK for size in sizes)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ConfigurationError(f"can't unpack {file}: {error}") from error


class _Directory(io.BufferedReader):
    """A zip file of another machine's, of whose directory no more is read than a wheel needs."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"its directory has more than {_MAX_DIRECTORY >> 20} MiB")
        return super().read(size)


@functools.cache
def own_files() -> dict[str, bytes]:
    """potluck itself, by path in site-packages: the installed files, native core included, and
    their metadata. About 6 MB, which a process reads once, in 50 ms: an agent's workers have its
    own release, also after an upgrade. Each machine's own fit it."""
    package, found = Path(__file__).parents[3], importlib.metadata.distribution("potluck")
    files = {
        f"potluck/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in package.rglob("*")
        if path.suffix != ".pyc" and path.is_file()
    }
    for name in ("METADATA", "entry_points.txt"):
        if text := found.read_text(name):
            files[f"potluck-{found.version}.dist-info/{name}"] = text.encode()
    return files


def _write_own(packages: Path, own: Mapping[str, bytes]) -> None:
    """Write potluck's ``own`` files into site-packages."""
    for folder in {path.partition("/")[0] for path in own}:
        (packages / folder).mkdir()  # not there: no wheel leads the files elsewhere by a link
    for path, data in own.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_bytes(data)


class _Fetched:
    """Counts what comes (a ``wheels.Progress``), and says it from time to time."""

    def __init__(self, total: int, note: Callable[[str], None]) -> None:
        self._total = total
        self._note = note
        self._said = time.monotonic()
        self._by_origin: dict[str, int] = {}

    def __call__(self, wheel: Wheel, num_bytes: int, origin: str) -> None:
        self._by_origin[origin] = self._by_origin.get(origin, 0) + num_bytes
        if (now := time.monotonic()) - self._said >= _TELL_S:
            self._said, so_far = now, sum(self._by_origin.values())
            share = min(100, 100 * so_far // max(1, self._total))
            whole = _megabytes(self._total)
            self._note(
                f"fetched {share}% of {whole} (now {wheel.name} {wheel.version} from {origin})"
            )

    def origins(self) -> str:
        """From where so much came, to be put after a text."""
        by_size = sorted(self._by_origin.items(), key=lambda each: -each[1])
        texts = [f"{_megabytes(num_bytes)} from {origin}" for origin, num_bytes in by_size]
        return f" ({', '.join(texts)})" if texts else ""


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"


def _read_complete(folder: Path) -> _Complete | None:
    try:
        return msgspec.json.decode((folder / COMPLETE).read_bytes(), type=_Complete)
    except (OSError, msgspec.MsgspecError):
        return None


def _fingerprint(folder: Path) -> tuple[str, int]:
    """Of the names, sizes and times of all files below ``folder``; and their bytes in all."""
    hashed, total, waiting = sha256(), 0, [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            return "", 0
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
                continue
            status = entry.stat(follow_symlinks=False)
            total += status.st_size
            hashed.update(f"{entry.path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return hashed.hexdigest(), total


def _room_of(folder: Path) -> int:
    """The bytes that all below ``folder`` takes on the disk."""
    blocks = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):  # it is gone
                status = os.lstat(os.path.join(place, name))
                blocks += getattr(status, "st_blocks", status.st_size // 512)  # Windows has none
    return 512 * blocks


def _remove_tree(folder: Path) -> None:
    """Remove a folder, read-only folders in it as well."""
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(place, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
