"""Patterns that name files of a script's folder: ``.gitignore``, ``.potluckignore`` and
``--include``.

All have git's syntax, which the library ``pathspec`` reads. A path is relative to the script's
folder; that of a folder ends with ``/``. Callers ask about a folder before what is in it, and never
about what is in an ignored folder, as git does.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec, RegexPattern

from potluck.errors import ConfigurationError

GIT_FILE = ".gitignore"
IGNORE_FILE = ".potluckignore"


@dataclass(frozen=True, slots=True)
class Match:
    """The pattern that decides about a path. ``ignores``: it is a plain one, not a negated one."""

    pattern: str
    ignores: bool

    @property
    def is_literal(self) -> bool:
        """Whether the pattern has no wildcards."""
        return not set("*?[") & set(self.pattern)


class Patterns:
    """The patterns of one file, ``source``, which count for paths below its ``folder``: ``""`` is
    the script's folder. ``above`` leads from a folder above that one to it."""

    def __init__(
        self, lines: Iterable[str], source: str = "", *, folder: str = "", above: str = ""
    ) -> None:
        self.source = source
        self._lines = [line for line in lines if line.strip() and not line.startswith("#")]
        self._patterns = list(GitIgnoreSpec.from_lines(self._lines).patterns)
        self._folder = folder
        self._above = above

    def match(self, path: str) -> Match | None:
        """The last pattern that matches ``path`` itself; None if none does.

        pathspec's patterns match all that is in a folder with the folder. git asks about each path
        by itself: what is in a folder that was named again after ``*`` is still ignored by ``*``.
        """
        below = self._above + path.removeprefix(self._folder)
        for line, pattern in zip(reversed(self._lines), reversed(self._patterns), strict=True):
            if pattern.include is not None and _matches(line, pattern, below):
                return Match(line, pattern.include)
        return None


def _matches(line: str, pattern: RegexPattern, path: str) -> bool:
    if line.rstrip().endswith("/**"):  # what is in the folder, not the folder
        path = path.rstrip("/")
    elif "/" not in line.rstrip().rstrip("/"):  # it names things at any depth
        is_folder = path.endswith("/")
        path = path.rstrip("/").rpartition("/")[2] + "/" * is_folder
    found = pattern.match_file(path)
    if found is None:
        return False
    # The library's only group is the slash after a folder that matches as a whole.
    last = found.match.lastindex
    return last is None or found.match.end(last) == len(path)


class Included:
    """The patterns of ``--include``."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._texts = [pattern.removeprefix("./") for pattern in patterns]
        for text in self._texts:
            if not text.strip() or text.startswith(("!", "#")):
                raise ConfigurationError(
                    f"--include {text!r}: name a file or folder below the script's folder, as in "
                    ".gitignore: --include .config/ or --include 'data/*.csv'"
                )
        self._each = [Patterns([text]) for text in self._texts]
        self._unused = set(self._texts)

    def match(self, path: str) -> Match | None:
        """A pattern that matches ``path`` itself; one without wildcards if there is any."""
        found = [match for each in self._each if (match := each.match(path))]
        self._unused -= {match.pattern for match in found}
        return max(found, key=lambda match: match.is_literal, default=None)

    def leads_into(self, folder: str) -> bool:
        """Whether a pattern may match below ``folder`` because it begins with this path."""
        parts = folder.rstrip("/").split("/")
        for text in self._texts:
            leading = text.strip("/").split("/")[:-1][: len(parts)]
            if len(leading) == len(parts) and "**" not in leading:
                pairs = zip(parts, leading, strict=True)
                if all(fnmatch.fnmatchcase(part, pattern) for part, pattern in pairs):
                    return True
        return False

    def check_used(self, folder: Path) -> None:
        """ConfigurationError if a pattern has matched nothing in ``folder``."""
        for text in self._texts:
            if text in self._unused:
                raise ConfigurationError(
                    f"--include {text!r} names nothing in {folder}: give a path below that folder, "
                    "or a pattern as in .gitignore"
                )


def patterns_in(folder: Path, prefix: str) -> Iterator[Patterns]:
    """Those of the ignore files in ``folder``, whose paths begin with ``prefix``."""
    for source in (GIT_FILE, IGNORE_FILE):
        if (folder / source).is_file():
            yield Patterns(_lines(folder / source), prefix + source, folder=prefix)


def patterns_above(folder: Path) -> tuple[Patterns, ...]:
    """Those of the git repository that ``folder`` is in: of its ``info/exclude`` and of the
    ``.gitignore`` files above ``folder``, the outermost first. None if git ignores ``folder`` as a
    whole: a script that is run there has named it."""
    folder = folder.resolve()
    root = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
    if root is None:
        return ()
    outer = [each for each in reversed(folder.parents) if each.is_relative_to(root)]
    files = [
        (root, root / ".git" / "info" / "exclude"),
        *((each, each / GIT_FILE) for each in outer),
    ]
    found = [(base, _lines(file), str(file)) for base, file in files if file.is_file()]
    for way in (*outer[1:], folder) if outer else ():
        for base, lines, _ in reversed([each for each in found if each[0] in way.parents]):
            match = Patterns(lines).match(f"{way.relative_to(base).as_posix()}/")
            if match is not None and match.ignores:
                return ()
            if match is not None:
                break
    return tuple(
        Patterns(lines, source, above="" if base == folder else f"{folder.relative_to(base)}/")
        for base, lines, source in found
    )


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="surrogateescape").splitlines()
