"""Making a plan: the starter of a job has uv choose the wheels, once for each kind of machine.

A lock says which versions, and which hashes count: uv chooses the wheels of these versions for the
platform, and a wheel that the lock does not have is refused. Without a lock uv resolves now. Plans
are kept, so a second run has the same environment, and asks no index.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import re
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from potluck._core.cluster.environments.kinds import in_words, platform_of, tags_of
from potluck._core.cluster.environments.plan import (
    SCHEMA,
    Part,
    Plan,
    Wheel,
    decode_plan,
    file_of,
    objection_to_url,
)
from potluck._core.cluster.environments.sources import Source, read_text, read_toml
from potluck._core.cluster.environments.uv import run_uv, warnings_in
from potluck._core.cluster.home.keyfile import make_private, replace_private
from potluck.errors import ConfigurationError, ProtocolError

_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
_HEAD_S = 30.0
_MAX_TEXT = 1 << 20
Note = Callable[[str], None]
_OF_TORCH = re.compile(
    r"(?m)^(?:nvidia-(?:cublas|cuda-(?:cupti|nvrtc|runtime)|cudnn|cufft|cufile|curand|cusolver"
    r"|cusparse|cusparselt|nccl|nvjitlink|nvshmem|nvtx)(?:-cu\d+)?"
    r"|cuda-(?:bindings|pathfinder|toolkit)|(?:pytorch-)?triton)==.*$"
)
"""What a torch for one kind of accelerator needs, and no other."""


def choose_python(requires: str, own: str) -> str:
    """The minor version of Python for a source that requires ``requires``: ``own``, that of this
    machine (a full version), if it fits, else the oldest that does. ConfigurationError if none
    does."""
    try:
        wanted = SpecifierSet(requires)
    except InvalidSpecifier as error:
        raise ConfigurationError(f"requires-python {requires!r}: {error}") from error
    minor = own.rpartition(".")[0]
    if wanted.contains(own, prereleases=True):
        return minor
    for each in _PYTHONS:
        if each != minor and any(wanted.contains(f"{each}.{patch}") for patch in range(30)):
            return each
    raise ConfigurationError(
        f"the script requires Python {requires}; potluck runs on {_PYTHONS[0]} to {_PYTHONS[-1]}"
    )


@dataclass(frozen=True)
class _Pins:
    """The lines of requirements that a lock amounts to, by name the SHA-256 that it has (empty: any
    counts), and the indexes that it names."""

    lines: tuple[str, ...] = ()
    hashes: Mapping[str, set[str]] = field(default_factory=dict)
    indexes: tuple[str, ...] = ()


async def make_plan(
    source: Source, kinds: Collection[str], *, folder: Path, index: str, note: Note
) -> Plan:
    """The plan of ``source`` for machines of ``kinds``, kept in ``folder``. ``index`` is asked
    instead of PyPI (empty: what this user has set for uv). ``note`` gets uv's warnings.
    A source distribution may be built here, too, for uv to learn what it needs.

    ConfigurationError if there is no environment for any machine, an index can't be asked, or the
    source is changed meanwhile.
    """
    python = choose_python(source.requires_python, ".".join(map(str, sys.version_info[:3])))
    fingerprint = _fingerprint(source, kinds, python, index)
    kept = folder / f"{fingerprint}.json"
    try:
        return decode_plan(await asyncio.to_thread(kept.read_bytes))
    except (FileNotFoundError, ProtocolError):
        pass
    make_private(folder)
    with tempfile.TemporaryDirectory(prefix="potluck-plan-") as made:
        work = Path(made)
        pins = await _pins_of(source, work, index, note)
        (work / "potluck.in").write_text("\n".join(_own_requirements()))
        (work / "excluded.txt").write_text("potluck\n")
        is_lock = source.kind not in ("script", "requirements")
        asked = ["pins.in" if is_lock else str(source.path), "potluck.in"]
        lines = "\n".join(pins.lines)
        has_torch = not index and not re.search(r"(?m)^torch==\S*\+", lines)
        if has_torch and re.search("(?m)^torch==", lines):
            lines = _OF_TORCH.sub("", lines)
        (work / "pins.in").write_text(lines)
        compile = _Compile(work, asked, python, index, pins, source.builds, has_torch)
        parts = await asyncio.gather(*(compile.part(kind, note) for kind in sorted(kinds)))
    if _fingerprint(source, kinds, python, index) != fingerprint:
        raise ConfigurationError(
            f"{source.label} was changed while packages were being chosen by it: start again when "
            "nothing writes to it"
        )
    plan = Plan(python=python, source=source.label, parts=tuple(parts))
    if all(part.error for part in parts):
        raise ConfigurationError(f"{source.label}: {'; '.join(part.error for part in parts)}")
    if not any(part.error for part in parts):
        await asyncio.to_thread(replace_private, kept, "a plan", plan.encode())
    return plan


@dataclass(frozen=True)
class _Compile:
    work: Path
    asked: list[str]
    python: str
    index: str
    pins: _Pins
    builds: bool
    has_torch: bool  # each kind of machine has the torch for its accelerator

    async def part(self, kind: str, note: Note) -> Part:
        """The part of the plan for machines of ``kind``."""
        if platform_of(kind) is None:
            return Part(kind, error=f"is {in_words(kind)}, for which uv knows no wheels")
        try:
            wheels = await self._chosen(kind, note)
            tools = set[Wheel]()
            for wheel in wheels:
                if wheel.is_source:
                    asked = self.work / f"{wheel.sha256.hex()}.{kind}.in"
                    asked.write_text("\n".join(await asyncio.to_thread(_tools_of, wheel)))
                    for_tools = replace(self, asked=[asked.name], pins=_Pins(), builds=False)
                    tools.update(await for_tools._chosen(kind, note))
            return Part(kind, tuple(sorted(wheels)), tools=tuple(sorted(tools)))
        except ConfigurationError as error:
            return Part(kind, error=_without_wheel(str(error), kind)[:4000])

    async def _chosen(self, kind: str, note: Note) -> list[Wheel]:
        """What uv chooses of what is ``asked`` for."""
        platform, given = platform_of(kind) or ("", {})
        if not self.has_torch:
            given.pop("UV_TORCH_BACKEND", None)
        words = [
            *("pip", "compile", "--no-progress", "--format", "pylock.toml", "--no-header"),
            *("--python-platform", platform, "--python-version", self.python),
            *("--python", sys.executable, *(() if self.builds else ("--only-binary", ":all:"))),
            *("--excludes", "excluded.txt", *self.asked),
            *(["--default-index", self.index] if self.index else []),
        ]
        if self.pins.indexes:  # versions and hashes are the lock's, whatever other indexes have
            words += ["--index-strategy", "unsafe-best-match"]
            words += [word for each in self.pins.indexes for word in ("--index", each)]
        text, said = await run_uv(words, directory=self.work, given=given, as_user=True)
        for warning in warnings_in(said):
            note(warning)
        tags = tags_of(kind, self.python)
        wheels = [self._wheel(each, tags) for each in tomllib.loads(text).get("packages", [])]
        return await asyncio.gather(*(asyncio.to_thread(_with_size, each) for each in wheels))

    def _wheel(self, package: dict[str, Any], tags: Mapping[Tag, int]) -> Wheel:
        name, version = package["name"], package.get("version", "")
        # uv lists all wheels that fit, and installs the best of them.
        fits = [
            (rank, each)
            for each in package.get("wheels", [])
            if "url" in each and (rank := _rank(each, tags)) is not None
        ]
        if not fits and self.builds and file_of(package.get("sdist", {}).get("url", "")):
            fits = [(0, package["sdist"])]
        if not fits:
            raise ConfigurationError(
                f"{name} {version} comes from no index as a wheel, and only wheels travel: publish "
                "it as one (or --allow-builds), or put its files into the script's folder"
            )
        wheel = min(fits, key=lambda each: each[0])[1]
        url, digest = wheel["url"], wheel.get("hashes", {}).get("sha256", "")
        if objection := objection_to_url(url, own=self.index):
            raise ConfigurationError(
                f"{name} {version} comes from {url.rpartition('@')[2]}: {objection}"
            )
        locked = self.pins.hashes.get(canonicalize_name(name))
        if self.has_torch and (urlsplit(url).hostname or "").endswith(".pytorch.org"):
            locked = None  # the lock has that of another accelerator; the version is the lock's
        if not digest or (locked and digest not in locked):
            what = f"has another file than {self.asked[0]}'s lock" if digest else "gives no SHA-256"
            raise ConfigurationError(f"{name} {version}: its index {what} ({file_of(url)})")
        file, size = wheel.get("name") or file_of(url), int(wheel.get("size", 0))
        return Wheel(name, version, file, bytes.fromhex(digest), size, url)


def _rank(wheel: Mapping[str, Any], tags: Mapping[Tag, int]) -> int | None:
    """How well ``wheel`` fits machines with these ``tags``, 0 best; None if it does not."""
    try:
        _, _, _, own = parse_wheel_filename(wheel.get("name") or file_of(wheel["url"]))
    except InvalidWheelFilename:
        return None
    return min((tags[tag] for tag in own if tag in tags), default=None)


async def _pins_of(source: Source, work: Path, index: str, note: Note) -> _Pins:
    """What a lock amounts to; of a source that is none its hashes."""
    if source.kind == "pylock":
        return _pins_in(read_toml(source.path), source.builds)
    if source.kind not in ("project", "script lock"):
        return _Pins(hashes=_hashes_in(source))
    of = ["--script", str(source.path)]
    if source.kind == "project":
        of = ["--no-emit-project", "--no-dev", "--project", str(source.path.parent)]
    # A lock made with another index than a mirror of it would pass for outdated.
    if index and any(index in read_text(path) for path in source.files):
        of += ["--default-index", index]
    words = ["export", "--locked", "--format", "pylock.toml", "--no-header", *of]
    text, said = await run_uv(words, directory=work, given={}, as_user=True)
    for warning in warnings_in(said):
        note(warning)
    return _pins_in(tomllib.loads(text), source.builds)


def _pins_in(lock: dict[str, Any], builds: bool) -> _Pins:
    lines, hashes, indexes = [], dict[str, set[str]](), dict[str, None]()
    for package in lock.get("packages", []):
        name, version = package.get("name", ""), package.get("version", "")
        if canonicalize_name(name) == "potluck":
            continue
        files = list(package.get("wheels", []))
        files += [package["sdist"]] if builds and "sdist" in package else []
        if not version or not files:
            raise ConfigurationError(
                f"{name} {version} in the lock has no wheel, and only wheels travel: choose a "
                "release that has one (or --allow-builds), or put its files beside the script"
            )
        marker = f" ; {package['marker']}" if package.get("marker") else ""
        lines.append(f"{name}=={version}{marker}")
        found = hashes.setdefault(canonicalize_name(name), set())
        found |= {each.get("hashes", {}).get("sha256", "") for each in files} - {""}
        if "index" in package:
            indexes[package["index"]] = None
    others = tuple(indexes) if len(indexes) > 1 else ()
    return _Pins(tuple(lines), hashes, others)


def _hashes_in(source: Source) -> dict[str, set[str]]:
    """The hashes in a file of requirements, by name."""
    found = dict[str, set[str]]()
    for path in source.files if source.kind == "requirements" else ():
        text = read_text(path).replace("\\\n", " ") if path.is_file() else ""
        for line in text.splitlines():
            if hashes := set(re.findall(r"--hash[= ]sha256:([0-9a-f]{64})", line)):
                name = re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0]
                found.setdefault(canonicalize_name(name), set()).update(hashes)
    return found


def _own_requirements() -> list[str]:
    """What potluck itself needs in a worker: none of its extras, and not uv."""
    requires = importlib.metadata.requires("potluck") or []
    return [line for line in requires if not re.search(r"^uv\b|extra ==", line)]


def _tools_of(source: Wheel) -> list[str]:
    """The requirements of what builds a source distribution, which is fetched for it."""
    try:
        with urllib.request.urlopen(source.url, timeout=_HEAD_S) as response:
            data = response.read(source.size + 1)
        if sha256(data).digest() != source.sha256:
            raise ConfigurationError(f"{source.file}: its index has another file than it says")
        folder = source.file.removesuffix(".tar.gz")
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            file = archive.extractfile(f"{folder}/pyproject.toml")
            text = "" if file is None else file.read(_MAX_TEXT).decode()
        system: dict[str, Any] = tomllib.loads(text).get("build-system", {})
    except KeyError:  # it has no such file
        system = {}
    except (OSError, ValueError, tarfile.TarError) as error:
        raise ConfigurationError(f"{source.file} can't be looked into: {error}") from error
    return [str(each) for each in system.get("requires", ["setuptools>=40.8"])]


def _with_size(wheel: Wheel) -> Wheel:
    """``wheel`` with its size, which some indexes don't tell."""
    if wheel.size:
        return wheel
    request = urllib.request.Request(wheel.url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_HEAD_S) as response:
            size = int(response.headers.get("Content-Length") or 0)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{wheel.file} can't be asked for: {error}") from error
    if not size:
        raise ConfigurationError(f"{wheel.file}: its index does not tell its size")
    return msgspec.structs.replace(wheel, size=size)


_NO_WHEEL = re.compile(r"Because (\S+)==(\S+) has no (?:usable )?wheels")
_AVAILABLE = re.compile(r"on the following platforms?: ([^\n]+)")


def _without_wheel(said: str, kind: str) -> str:
    """uv's error, or what it comes to if a package has no wheel for machines of ``kind``."""
    found = _NO_WHEEL.search(said)
    if found is None:
        return said
    there = _AVAILABLE.search(said)
    only = f" (only {there[1].strip().replace('`', '')})" if there else ""
    hint = "; --allow-builds builds it from source" if "usable" in found[0] else ""
    return f"{found[1]} {found[2]} has no wheel for {in_words(kind)}{only}{hint}"


def _fingerprint(source: Source, kinds: Collection[str], python: str, index: str) -> str:
    """The name of the plan: of all that it depends on."""
    asked = (SCHEMA, source.kind, source.builds, python, index, *sorted(kinds))
    hashed = sha256(repr(asked).encode())
    hashed.update("\n".join(_own_requirements()).encode())
    for path in source.files:
        if path.is_file():
            hashed.update(sha256(path.read_bytes()).digest())
    return hashed.hexdigest()
