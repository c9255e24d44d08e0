"""Which files of a script's folder travel to other machines, and which stay, and why.

The rules, of which the first that covers a file or folder decides:

1. never: the potluck home, also by a link or hard link; links, devices, pipes
2. what ``potluck run --include`` names travels
3. ``.potluckignore``: what its patterns match stays, what its negated patterns name travels
4. hidden files, and what is made again by itself (caches, environments), stay
5. what ``.gitignore`` ignores stays
6. the rest travels

A file that travels and looks like a key or credentials (``kind_of_name``, ``kind_of_head``) is
refused, unless rule 2 or 3 names it without wildcards. Some folders are refused as a whole
(``folders.py``).

All patterns have git's syntax, which the library ``pathspec`` reads. A path is relative to the
script's folder; that of a folder ends with ``/``. Callers ask about a folder before what is in it,
and never about what is in an ignored folder, as git does.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec, RegexPattern

from potluck._core.cluster.code_store.folders import NARROWER, Private, check_folder
from potluck._core.cluster.content.package import MAX_CODE_BYTES, objection_to_path
from potluck._core.printable import size_in_words
from potluck._core.wire.bulk import MAX_FILES
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


_HIDDEN = Patterns([".*"])
_MADE_AGAIN = Patterns(["__pycache__/", "*.pyc", "venv/", "node_modules/", "*.egg-info/"])


class Why(StrEnum):
    """The rule by which a file or folder stays."""

    HOME = "home"
    DATA = "data"
    LINK = "link"
    SPECIAL = "special"
    IGNORED = "ignored"
    HIDDEN = "hidden"
    MADE_AGAIN = "made again"


@dataclass(frozen=True, slots=True)
class Staying:
    """A file that stays, or a folder (``path`` ends with ``/``) that stays with all that is in it,
    with the ``reason`` for people."""

    path: str
    why: Why
    reason: str


@dataclass(frozen=True, slots=True)
class Travelling:
    """A file that travels, by its path below the folder."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a folder travels, and what stays, both by path."""

    files: tuple[Travelling, ...]
    staying: tuple[Staying, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all files that travel."""
        return sum(file.size for file in self.files)


def select(
    folder: Path, home: Path, include: Sequence[str] = (), data: Iterable[str] = ()
) -> Selection:
    """What of ``folder`` travels; ``home`` is the potluck home, ``include`` has patterns in git's
    syntax, ``data`` the job's folders of data, which travel by themselves. Reads the beginning of
    every file.

    ConfigurationError, with what to do, if the folder may not travel, can't be read, is too large
    or holds what looks like keys, or if a pattern names nothing.
    """
    check_folder(folder, home)
    included = Included(include)
    paths = (os.path.relpath(each, folder) for each in map(os.path.realpath, data))
    walk = _Walk(folder, included, Private(home), frozenset(f"{path}/" for path in paths))
    with readable(folder):
        walk.enter("", patterns_above(folder))
    included.check_used(folder)
    _check_size(folder, walk.files)
    if walk.keys:
        raise ConfigurationError(_about_keys(folder, walk.keys))
    files = sorted(walk.files, key=lambda file: file.path)
    return Selection(tuple(files), tuple(sorted(walk.staying, key=lambda each: each.path)))


def check_script(folder: Path, script: str, selection: Selection) -> None:
    """ConfigurationError, with the reason and what to do, if ``script`` (its path below ``folder``)
    is not in the ``selection``: it would be missing on the other nodes."""
    if any(file.path == script for file in selection.files):
        return
    path = folder / script
    ways = {script, *(f"{each}/" for each in PurePosixPath(script).parents)}
    found = next((each for each in selection.staying if each.path in ways), None)
    if found is None:
        why, todo = "it is not a file of its folder", "run one that is"
    elif found.why is Why.LINK:
        why = "it is a link, and links do not travel"
        todo = f"run the file that it leads to: potluck run {path.resolve()}"
    elif found.why in (Why.SPECIAL, Why.HOME, Why.DATA):
        why, todo = f"it is {found.reason}", "run another file"
    else:
        why = f"{found.path} stays here, because it is {found.reason}"
        todo = f"name it: potluck run --include {found.path} {path}"
    raise ConfigurationError(
        f"the script {path} can't travel to the other nodes: {why}. To run it on the cluster, "
        f"{todo}. Nothing was started"
    )


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """ConfigurationError, with what to do, for a file of ``folder`` that can't be read."""
    try:
        yield
    except OSError as error:
        named = Path(error.filename) if isinstance(error.filename, str) else None
        if named is None or not named.is_relative_to(folder):
            raise
        raise ConfigurationError(
            f"{named} can't be read, and would travel to the other nodes with the script: "
            f"{error.strerror}. Make it readable, or name it in {folder / IGNORE_FILE}"
        ) from error


@dataclass(slots=True)
class _Walk:
    """One pass over a folder. ``keys``: what looks like a key and would travel, with what it looks
    like."""

    folder: Path
    included: Included
    private: Private
    data: frozenset[str]
    files: list[Travelling] = field(default_factory=list)
    staying: list[Staying] = field(default_factory=list)
    keys: list[tuple[str, str]] = field(default_factory=list)

    def enter(self, prefix: str, above: tuple[Patterns, ...], *, stays: bool = False) -> None:
        """Look at all in the folder ``prefix``; if it ``stays``, at what is included there."""
        ignoring = (*above, *patterns_in(self.folder / prefix, prefix))
        with os.scandir(self.folder / prefix) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
        for entry in children:
            path = prefix + entry.name + "/" * entry.is_dir(follow_symlinks=False)
            included = self.included.match(path)
            if included is None and stays:
                self._look_below(path, ignoring)
                continue
            found = self._rule(entry, path, ignoring, included)
            if isinstance(found, Staying):
                self.staying.append(found)
                if found.why not in (Why.HOME, Why.DATA):
                    self._look_below(path, ignoring)
            elif path.endswith("/"):
                self.enter(path, ignoring)
            else:
                self._take(entry, path, is_named=found is not None and found.is_literal)

    def _look_below(self, path: str, ignoring: tuple[Patterns, ...]) -> None:
        """``path`` stays: take what ``--include`` names below it."""
        if path.endswith("/") and self.included.leads_into(path):
            self.enter(path, ignoring, stays=True)

    def _rule(
        self,
        entry: os.DirEntry[str],
        path: str,
        ignoring: tuple[Patterns, ...],
        included: Match | None,
    ) -> Staying | Match | None:
        """Why ``entry`` stays, or the pattern that names it as one that travels, or None."""
        if self.private.has(entry):
            return Staying(path, Why.HOME, "of potluck's home, which never travels")
        if path in self.data:
            return Staying(path, Why.DATA, "a data set of the job, which comes by --data")
        named = included or _ruled_out(path, ignoring)
        if isinstance(named, Staying):
            return named
        if entry.is_symlink():
            return Staying(path, Why.LINK, f"a link to {os.readlink(entry.path)}")
        if not path.endswith("/") and not entry.is_file(follow_symlinks=False):
            return Staying(path, Why.SPECIAL, "no regular file")
        return named

    def _take(self, entry: os.DirEntry[str], path: str, *, is_named: bool) -> None:
        """A file that travels."""
        why = objection_to_path(path)
        if why:
            raise ConfigurationError(
                f"{self.folder / path} can't travel to the other nodes: {why}. Rename it, or name "
                f"it in {self.folder / IGNORE_FILE}"
            )
        if not is_named and (kind := kind_of_name(entry.name) or kind_of_head(_head(entry))):
            self.keys.append((path, kind))
        self.files.append(Travelling(path, entry.stat(follow_symlinks=False).st_size))
        if len(self.files) > MAX_FILES:
            raise ConfigurationError(
                f"{self.folder} holds more than {MAX_FILES} files; it travels to all nodes with "
                "the script. Move the script to a folder of its own, or name what may stay in "
                f"{self.folder / IGNORE_FILE}. {NARROWER}"
            )


def _ruled_out(path: str, ignoring: tuple[Patterns, ...]) -> Staying | Match | None:
    """Rules 3 to 5; ``ignoring`` has the outermost patterns first."""
    own = _innermost(path, [each for each in ignoring if each.source.endswith(IGNORE_FILE)])
    if own is not None:
        patterns, match = own
        if match.ignores:
            return _ignored(path, patterns, match)
        return match
    if _HIDDEN.match(path):
        return Staying(path, Why.HIDDEN, "hidden")
    if _MADE_AGAIN.match(path):
        return Staying(path, Why.MADE_AGAIN, "a cache or an environment")
    git = _innermost(path, [each for each in ignoring if not each.source.endswith(IGNORE_FILE)])
    if git is not None and git[1].ignores:
        return _ignored(path, *git)
    return None


def _innermost(path: str, each: Sequence[Patterns]) -> tuple[Patterns, Match] | None:
    """The innermost of the patterns that say something about ``path``, and what."""
    for patterns in reversed(each):
        if match := patterns.match(path):
            return patterns, match
    return None


def _ignored(path: str, patterns: Patterns, match: Match) -> Staying:
    return Staying(path, Why.IGNORED, f"ignored by the line {match.pattern!r} of {patterns.source}")


def _head(entry: os.DirEntry[str]) -> bytes:
    with open(entry.path, "rb") as file:
        return file.read(HEAD_BYTES)


def _check_size(folder: Path, files: Sequence[Travelling]) -> None:
    total = sum(file.size for file in files)
    if total > MAX_CODE_BYTES:
        largest = sorted(files, key=lambda file: -file.size)[:3]
        named = ", ".join(f"{file.path} ({file.size / 2**20:.0f} MiB)" for file in largest)
        raise ConfigurationError(
            f"{folder} holds {total / 2**20:.0f} MiB; at most {MAX_CODE_BYTES >> 20} travel with a "
            f"script. The largest: {named}. Name what may stay in {folder / IGNORE_FILE}. "
            f"{NARROWER}"
        )


def _about_keys(folder: Path, keys: Sequence[tuple[str, str]]) -> str:
    shown = ", ".join(f"{path} ({kind})" for path, kind in keys[:5])
    more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    return (
        f"{folder} would travel to the other machines with what looks like keys or credentials: "
        f"{shown}{more}. Move it out of this folder, or name it in {folder / IGNORE_FILE} so that "
        f"it stays; to send it on purpose: potluck run --include {keys[0][0]} ... {NARROWER}. "
        "Nothing was started"
    )


HEAD_BYTES = 16 << 10
"""How much of a file ``kind_of_head`` looks at: JSON files with keys are no larger."""

_BACKUP = re.compile(r"(~|\.(bak|backup|old|orig|save|copy|tmp))$")
_TEXT = r"(\.(txt|json|ya?ml|toml|ini|cfg|conf|env|xml|csv|db|pickle|pkl))?"
_CLOUDS = "gcp|gcs|gcloud|google|aws|azure|firebase|vertex|bigquery|cloud"
_WHOSE_TOKEN = (
    "access api auth bearer bot discord gh github gitlab hf huggingface npm oauth pypi refresh "
    "session slack wandb"
).replace(" ", "|")

_NAMES: tuple[tuple[str, str], ...] = (
    ("an SSH key", r"id_(rsa|dsa|ecdsa|ed25519|xmss)([._-](?!pub$).*)?|id_[^.]*"),
    ("an SSH host key", r"ssh_host_.*_key"),
    ("a key", r".*\.(pem|key|p8|ppk|agekey|keytab)"),
    ("a key store", r".*\.(p12|pfx|pkcs12|jks|jceks|keystore|kdbx?|ovpn)|wallet\.dat"),
    ("credentials", rf"(.*[._-])?credentials?([._-].*)?{_TEXT}"),
    ("credentials", r"[._]?(netrc|htpasswd|pgpass|dockercfg)|\.(npmrc|pypirc)|\.?my\.cnf"),
    ("credentials", r"pgpass\.conf|\.?s3cfg|\.?boto|\.?rclone\.conf|\.?dockerconfigjson"),
    ("a cloud key", rf"(({_CLOUDS})[._-])*(key|sa|sa[._-]?key|({_CLOUDS})[._-]?keys?)\.json"),
    ("a cloud key", r".*firebase[._-]?adminsdk.*\.json"),
    ("credentials in a Terraform state", r".*\.(tfstate|tfvars)(\.json)?|.*\.tfstate\..*"),
    ("cookies of a browser", r"(.*[._-])?cookies?\.(txt|json|sqlite)"),
    ("credentials", r"(.*[._-])?service[._-]?accounts?([._-].*)?(\.json|\.ya?ml)?"),
    ("credentials", r"(.*[._-])?kube[._-]?config(\.ya?ml)?"),
    ("a secret", rf"(client|app|api|user|db|streamlit)[._-]?secrets?([._-].*)?{_TEXT}"),
    ("a secret", r".*[._-]secrets?\.(toml|ya?ml|json|ini|env)"),
    ("a secret", rf"\.?secrets?([._-](dev|local|prod|production|staging|test))?{_TEXT}"),
    ("a secret", rf"passwords?{_TEXT}|(.*[._-])?api[._-]?keys?{_TEXT}"),
    ("a token", rf"\.?token{_TEXT}|(.*[._-])?({_WHOSE_TOKEN})[._-]?tokens?{_TEXT}"),
    ("settings with secrets", r"\.env(\..*)?|\.envrc|.*\.env"),
    ("potluck's key", r"cluster_secret(\..*)?|node_keypair(\..*)?"),
)
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _NAMES)

_CODE = re.compile(
    r"\.(py|pyi|pyx|ipynb|c|cc|cpp|cu|h|hpp|rs|go|java|kt|js|mjs|ts|tsx|jsx|rb|pl|r|jl|swift|cs|"
    r"sh|html?|css|md|rst|proto|sql)$"
)
"""``credentials.py`` is code that handles credentials."""

_HEADS = (
    ("a private key", re.compile(rb"\s*-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----")),
    ("a private key", re.compile(rb"PuTTY-User-Key-File-|AGE-SECRET-KEY-")),
    ("a password store", re.compile(rb"\x03\xd9\xa2\x9a")),
    ("cookies of a browser", re.compile(rb"# (Netscape )?HTTP Cookie File")),
)
_IN_JSON = re.compile(
    rb'"(private_key|privateKey|client_secret|clientSecret|refresh_token|aws_secret_access_key|'
    rb'SecretAccessKey|secret_key|secretKey)"\s*:\s*"[^"]{8}'
)
_LONG_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----(\\n|\s)")
"""A key in quotes, as in JSON, or behind something else."""


def kind_of_name(name: str) -> str:
    """What a file of this ``name`` (without folders) most likely is, with its article; empty if
    there is nothing special about it."""
    plain = name.casefold()
    while (shorter := _BACKUP.sub("", plain)) != plain:
        plain = shorter
    if _CODE.search(plain):
        return ""
    return next((kind for kind, pattern in _PATTERNS if pattern.fullmatch(plain)), "")


def kind_of_head(head: bytes) -> str:
    """The same by the first ``HEAD_BYTES`` of a file."""
    kind = next((kind for kind, pattern in _HEADS if pattern.match(head)), "")
    if not kind and head.lstrip()[:1] in (b"{", b"["):
        if _LONG_KEY.search(head):
            return "JSON with a private key"
        if _IN_JSON.search(head):
            return "JSON with a secret"
    return kind


_MAX_SHOWN = 3

_COUNTED = {
    Why.HOME: ("of potluck's home", "of potluck's home"),
    Why.LINK: ("link", "links"),
    Why.SPECIAL: ("special file", "special files"),
    Why.IGNORED: ("ignored", "ignored"),
    Why.HIDDEN: ("hidden", "hidden"),
    Why.MADE_AGAIN: ("cache", "caches"),
}


def in_words(selection: Selection, machines: Sequence[str]) -> str:
    """``42 files, 1.3 MiB travel to 3 machines (ada, bob, carl)``, and how much stays."""
    num_files, num = len(selection.files), len(machines)
    files = f"{num_files} file{'s' * (num_files != 1)}, {size_in_words(selection.num_bytes)}"
    verb = "travels" if num_files == 1 else "travel"
    to = f"{num} machine{'s' * (num != 1)} ({_some(machines)})" if num else "machines that join"
    counts = {why: sum(each.why is why for each in selection.staying) for why in Why}
    stay = ", ".join(
        f"{count} {_COUNTED[why][count > 1]}" for why, count in counts.items() if count
    )
    return f"{files} {verb} to {to}" + (
        f"; not sent: {stay} (see potluck run --dry-run; --include names what is needed)"
        if stay
        else ""
    )


def links_in_words(selection: Selection) -> str:
    """A sentence about links that stay, which a script may miss; empty if there are none."""
    links = [each.path for each in selection.staying if each.why is Why.LINK]
    if not links:
        return ""
    return (
        f"links do not travel, so other machines don't have {_some(links)}: put the files "
        "themselves into the folder, or give the script a path that exists on every machine"
    )


def _some(names: Sequence[str]) -> str:
    left = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {left} more" if left > 0 else "")
