"""``shared``: the folder of a data set that came with the job, or is still on its way."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from potluck._core.printable import plain
from potluck.errors import DataError

_NAP_S = 0.05
_SILENCE_S = 60.0
"""So long a machine's agent may give no sign of life while something is waited for."""


class SharedFolder(os.PathLike[str]):
    """The folder of a data set, whose files may still be on their way to this machine.

    What takes a path gets one: ``os.fspath`` and ``str`` of it, and all that a ``pathlib.Path`` can
    do, such as ``iterdir``, wait for all files. ``folder / name`` waits for that file or folder
    only, and the readers of ``potluck.data`` for each shard when it is read.

    Every wait raises DataError, which names the file and the machine's reason, if the rest can't
    come any more.
    """

    def __init__(self, name: str, folder: Path, root: Path) -> None:
        self.name, self.folder, self._root = name, folder, root
        self.outlines, self._news = root / "outlines" / name, root / "news" / name

    def stamps(self) -> dict[str, list[int] | None]:
        """By path below the folder, of all files; None of a file that may not be here."""
        try:
            found = json.loads((self._root / "lists" / self.name).read_text())
        except FileNotFoundError:  # a job of one machine: nothing travels
            files = (each for each in self.folder.rglob("*") if each.is_file())
            found = {each.relative_to(self.folder).as_posix(): None for each in files}
        return dict(sorted(found.items()))

    def shards(self, pattern: str = "*") -> list[Path]:
        """The files whose path below the folder matches ``pattern``, as in ``fnmatch``, by name. It
        waits for none: pass them to ``ParquetFiles`` and the like, or to ``open``."""
        return [self.folder / each for each in self.stamps() if fnmatch.fnmatchcase(each, pattern)]

    def open(self, path: str | os.PathLike[str]) -> BinaryIO:
        """The file ``path``, opened for reading, once all of it is here."""
        return (self / path).open("rb")

    def _arrived(self, path: str | os.PathLike[str] = "") -> Path:
        """The file or folder ``path`` below this folder, once it is here; without one all."""
        wanted = self.folder / path
        if wanted.is_file() or not self._news.exists():
            return wanted
        paths = (self.folder / each for each in self.stamps())
        missing = [each for each in paths if each.is_relative_to(wanted) and not each.exists()]
        for each in missing if path else [*missing][:1]:
            self._ask(each.relative_to(self.folder).as_posix() if path else "")
        sign, since = 0, time.monotonic()
        for each in missing:
            while not each.exists():
                now = time.monotonic()
                try:
                    last, why = self._news.stat().st_mtime_ns, self._news.read_text()
                except FileNotFoundError:
                    last, why = 0, "the job is over here"
                if last != sign:
                    sign, since = last, now
                elif now - since > _SILENCE_S:
                    why = why or f"the agent of this machine is silent for {_SILENCE_S:.0f} s"
                if why and not each.exists():
                    where = plain(str(each))
                    raise DataError(f"{where}, of the data set {self.name}, can't come: {why}")
                time.sleep(_NAP_S)
        return wanted

    def _ask(self, path: str) -> None:
        """Ask this machine's agent, which tells people of the wait. A pipe takes such a line as a
        whole; if it is full, or the agent has ended, the file comes in its turn, or never."""
        line = f"{os.environ.get('POTLUCK_WORKER', '')}\t{self.name}\t{path}\n".encode()
        with contextlib.suppress(OSError):
            pipe = os.open(self._root / "asked", os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
            try:
                os.write(pipe, line)
            finally:
                os.close(pipe)

    def __truediv__(self, path: str | os.PathLike[str]) -> Path:
        return self._arrived(path)

    def __fspath__(self) -> str:
        return os.fspath(self._arrived())

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"SharedFolder({self.name!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._arrived(), name)


def _sets() -> dict[str, SharedFolder]:
    found = json.loads(os.environ.get("POTLUCK_DATA_SETS", "{}"))
    return {
        name: SharedFolder(name, Path(each["folder"]), Path(each["root"]))
        for name, each in found.items()
    }


def arrived(path: Path, *, outline: bool = False) -> Path:
    """``path``, once it is here, if it is a file of a data set of this job. If an ``outline`` will
    do, of a shard that is not here: a file as large, in which a reader finds how many samples there
    are, but no samples."""
    for each in () if path.exists() else _sets().values():
        if path.is_relative_to(each.folder):
            listed = each.outlines / path.relative_to(each.folder)
            return listed if outline and listed.exists() else each / path
    return path


def shared(name: str) -> SharedFolder:
    """The data set that ``potluck run --data NAME=DIR`` brought: on every machine the same files.
    They are not to be changed: on the machine that started the job it is that folder itself, on the
    others the files are read-only, and some may still be on their way.

    Cost: a look at each file that is here. DataError if the job has no data set of this name, or a
    file of it, which the text names, was changed since the job was started.
    """
    sets = _sets()
    if name not in sets:
        has = f"it has {', '.join(sorted(sets))}" if sets else "it has none"
        raise DataError(
            f"this job has no data set {name!r} ({has}): potluck run --data {name}=DIR SCRIPT"
        )
    folder = sets[name]
    for path, stamp in folder.stamps().items():
        if stamp is None:
            continue
        where = plain(str(folder.folder / path))
        try:
            found = os.lstat(folder.folder / path)
        except OSError as error:
            raise DataError(f"{where}, of the data set {name}, is gone: {error}") from error
        if [found.st_ino, found.st_size, found.st_mtime_ns] != stamp:
            raise DataError(
                f"{where}, of the data set {name}, was changed after the job was started: other "
                "machines have what it was before. Start the job again"
            )
    return folder
