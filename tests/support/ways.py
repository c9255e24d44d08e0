"""The ways through the code: the files that a page of ``docs/dev/ways`` names, and those that a
run enters."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from support.sources import ROOT

WAYS = ROOT / "docs" / "dev" / "ways"
SOURCE = ROOT / "src" / "potluck"
_BASES = (SOURCE, SOURCE / "_core", SOURCE / "_core" / "cluster")
_BESIDE = "\n## Asked beside the way\n"


def hops(page: str) -> list[tuple[str, list[Path]]]:
    """The rows of a page's tables that have a column *file*: the first cell, and the Python files.

    A name begins at ``src/potluck``, ``_core``, ``cluster`` or the folder of the name before it.
    """
    way, _, _ = (WAYS / f"{page}.md").read_text().partition(_BESIDE)
    rows: list[tuple[str, list[Path]]] = []
    column = 0
    for line in way.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if "file" in cells:
            column = cells.index("file")
        elif not cells:
            column = 0
        elif column:
            folder, files = SOURCE, list[Path]()
            for name in re.findall(r"`([\w/]+\.py)`", cells[column]):
                places = [base / name for base in (folder, *_BASES) if (base / name).is_file()]
                assert places, f"{name} is no file, in: {line}"
                files.append(places[0])
                folder = places[0].parent
            rows.append((cells[0], files))
    return rows


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
        wanted = {_short(file) for _, files in hops(page) for file in files}
        entered = {name for name in self.files if not name.startswith("testing/")}
        missing = wanted - entered
        strange = {name for name in entered if name.startswith(within)} - told(page, *others)
        assert wanted
        name = f"docs/dev/ways/{page}.md"
        assert not missing, f"{name} names files that the run did not enter: {sorted(missing)}"
        assert not strange, f"the run entered files that {name} does not name: {sorted(strange)}"

    def _hook(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        # Functions alone: bodies of modules and classes run when something is imported.
        if not self._is_on or event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        _, found, name = code.co_filename.partition(_PREFIX)
        if found:
            self.files.add(name)


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
