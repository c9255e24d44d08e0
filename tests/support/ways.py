"""The ways through the code: the files that a page of ``docs/dev/ways`` names, and those that a
run enters."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from support.sources import ROOT

WAYS = ROOT / "docs" / "dev" / "ways"
SOURCE = ROOT / "src" / "potluck"
_BASES = (SOURCE, SOURCE / "_core", SOURCE / "_core" / "cluster")
_BESIDE = "\n## Asked beside the way\n"


Roles = tuple[str, ...]
"""What a process is on a way. Empty: all of it."""


@dataclass(frozen=True)
class Hop:
    """A row of a page's tables that have a column *file*: its first cell, the roles in the column
    *where* (empty without one), and its Python files. ``is_beside``: it is no hop, but a row of the
    table *asked beside the way*."""

    number: str
    where: str
    files: tuple[Path, ...]
    is_beside: bool

    def is_of(self, roles: Roles) -> bool:
        return not roles or any(role in self.where for role in roles)


def hops(page: str) -> list[Hop]:
    """The rows of ``page``.

    A name begins at ``src/potluck``, ``_core``, ``cluster`` or the folder of the name before it.
    """
    way, _, beside = (WAYS / f"{page}.md").read_text().partition(_BESIDE)
    return [*_rows(way, is_beside=False), *_rows(beside, is_beside=True)]


def _rows(text: str, *, is_beside: bool) -> Iterator[Hop]:
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if "file" in cells:
            columns = cells
        elif not cells:
            columns = []
        elif columns:
            row = dict(zip(columns, cells, strict=True))
            folder, files = SOURCE, list[Path]()
            for name in re.findall(r"`([\w/]+\.py)`", row["file"]):
                places = [base / name for base in (folder, *_BASES) if (base / name).is_file()]
                assert places, f"{name} is no file, in: {line}"
                files.append(places[0])
                folder = places[0].parent
            yield Hop(cells[0], row.get("where", ""), tuple(files), is_beside)


def told(*pages: str) -> set[str]:
    """The files that pages name anywhere, with those beside the way."""
    texts = [(WAYS / f"{page}.md").read_text() for page in pages]
    names = {name for text in texts for name in re.findall(r"`([\w/]+\.py)`", text)}
    found = {base / name for base in _BASES for name in names if (base / name).is_file()}
    return {_short(path) for path in found}


def _short(path: Path) -> str:
    return str(path.relative_to(SOURCE))


class Trace:
    """The files of potluck whose functions were called while ``recording``, by any thread that was
    started in ``watched``."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._is_on = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def check(self, page: str, *others: str, within: str = "") -> None:
        """The files of the tables of ``page`` were entered, and, of the folder ``within``, no files
        that neither it nor the ``others`` name."""
        compare(page, {(): self.files}, {(): told(page, *others)}, within)

    def _hook(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        # Functions alone: bodies of modules and classes run when something is imported.
        if not self._is_on or event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        _, found, name = code.co_filename.partition(_PREFIX)
        if found:
            self.files.add(name)


def compare(
    page: str, entered: Mapping[Roles, set[str]], named: Mapping[Roles, set[str]], within: str = ""
) -> None:
    """Processes with these roles ``entered`` the files of the hops of ``page``, and, of the folder
    ``within``, none but the ones that are ``named`` for their roles."""
    name = f"docs/dev/ways/{page}.md"
    way = [hop for hop in hops(page) if not hop.is_beside]
    assert way
    for hop in way:
        seen = set[str]().union(*(files for roles, files in entered.items() if hop.is_of(roles)))
        missing = set(map(_short, hop.files)) - seen
        assert not missing, f"{name}, {hop.number}: the run did not enter {sorted(missing)}"
    for roles, files in entered.items():
        strange = {each for each in files - named[roles] if each.startswith(within)}
        strange = {each for each in strange if not each.startswith("testing/")}
        assert not strange, f"{name} does not name for {roles}: {sorted(strange)}"


def of_roles(page: str, roles: Roles) -> set[str]:
    """The files of all rows of ``page`` that have one of these ``roles``."""
    return {_short(file) for hop in hops(page) for file in hop.files if hop.is_of(roles)}


_PREFIX = f"{SOURCE}/"


@contextlib.contextmanager
def watched() -> Iterator[Trace]:
    """A trace of this thread and of the threads that begin meanwhile."""
    trace = Trace()
    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(trace._hook)
    sys.setprofile(trace._hook)
    try:
        yield trace
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])


@contextlib.contextmanager
def dumped(path: str) -> Iterator[None]:
    """Record this process meanwhile; at the end its files are written to ``path``."""
    with watched() as trace:
        try:
            with trace.recording():
                yield
        finally:
            Path(path).write_text("\n".join(sorted(trace.files)))
