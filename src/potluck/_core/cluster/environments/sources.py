"""What a script says that it needs: which file says it, and for which Python."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from potluck.errors import ConfigurationError

Kind = Literal["script", "script lock", "project", "pylock", "requirements"]

_BLOCK = re.compile(r"(?m)^# /// script[ \t]*$\n(?P<text>(?:^#(?:| .*)$\n?)+?)^# ///[ \t]*$")
_INCLUDED = re.compile(r"(?m)^\s*(?:-r|--requirement|-c|--constraint)[ =]?\s*(\S+)")
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """The file ``path`` says what the script needs. ``requires_python``: for which versions
    (empty: any). ``files`` are all that its meaning depends on. If it ``builds``, packages without
    a wheel come as source distributions."""

    kind: Kind
    path: Path
    requires_python: str
    files: tuple[Path, ...]
    builds: bool = False

    @property
    def label(self) -> str:
        """The source in words."""
        return {
            "script": f"the block in {self.path.name}",
            "script lock": f"{self.path.name}.lock",
            "project": "uv.lock",
        }.get(self.kind, self.path.name)


def find_source(root: Path, script: Path) -> Source | None:
    """What says the needs of ``script``, a file in the folder ``root`` or below it. In this order:
    its block of metadata (PEP 723), with the lock beside it if there is one; then in its folder,
    and in those above it up to ``root``: a ``uv.lock`` beside ``pyproject.toml``, ``pylock.toml``,
    ``requirements.txt``. None if there is none of these.

    ConfigurationError if it can't be read.
    """
    block = _block_of(script)
    if block is not None:
        requires, lock = str(block.get("requires-python", "")), Path(f"{script}.lock")
        if lock.is_file():
            return Source("script lock", script, requires, (script, lock))
        return Source("script", script, requires, (script,))
    for folder in (script.parent, *script.parent.parents):
        if not folder.is_relative_to(root):
            break
        project, lock = folder / "pyproject.toml", folder / "uv.lock"
        if project.is_file() and lock.is_file():
            requires = str(read_toml(lock).get("requires-python", ""))
            return Source("project", lock, requires, (project, lock))
        pylock, requirements = folder / "pylock.toml", folder / "requirements.txt"
        if pylock.is_file():
            requires = str(read_toml(pylock).get("requires-python", ""))
            return Source("pylock", pylock, requires, (pylock,))
        if requirements.is_file():
            files = tuple(dict.fromkeys(_with_included(requirements, 8)))
            return Source("requirements", requirements, "", files)
    return None


def read_toml(path: Path) -> dict[str, Any]:
    """What is in the file; ConfigurationError if it can't be read."""
    return _parsed(read_text(path), path)


def read_text(path: Path) -> str:
    """The text of a file of the user's; ConfigurationError if it can't be read."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigurationError(f"{path} has more than {_MAX_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} can't be read: {error}") from error


def _block_of(script: Path) -> dict[str, Any] | None:
    found = list(_BLOCK.finditer(script.read_text(encoding="utf-8", errors="replace")))
    if not found:
        return None
    if len(found) > 1:
        raise ConfigurationError(
            f"{script} has two blocks '# /// script'; one is allowed (PEP 723)"
        )
    lines = found[0]["text"].splitlines(keepends=True)
    return _parsed("".join(line.removeprefix("#").removeprefix(" ") for line in lines), script)


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(
            f"{path} says what the script needs, but is damaged: {error}"
        ) from (error)


def _with_included(path: Path, depth: int) -> Iterator[Path]:
    """A requirements file, and the files that it includes."""
    yield path
    if depth and path.is_file():
        for name in _INCLUDED.findall(read_text(path)):
            yield from _with_included(path.parent / name, depth - 1)
