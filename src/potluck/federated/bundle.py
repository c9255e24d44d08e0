"""The files of a federation that travel to the clients' machines: two Python files, the modules
that they import from their own folder, and files that were named. Nothing else, and no data."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from potluck.errors import ConfigurationError

LAUNCHER = """import sys

from potluck.federated.worker import main

main(sys.argv[1:])
"""


def files_of(
    server: Path, client: Path, data_dir: Path | None, include: Sequence[str] = ()
) -> tuple[Path, list[Path]]:
    """The folder of ``server``, and the files below it that travel, as paths below it.

    Imports are read, not run; what is imported by a name made at run time must be in ``include``,
    as must every file that is no module. ConfigurationError, with what to do, for files that do not
    exist, lie outside of the folder, are links, or are in ``data_dir``.
    """
    root = server.absolute().parent
    found: dict[Path, None] = {}
    waiting = [_below(root, server.absolute()), _below(root, client.absolute())]
    folders = [root, client.absolute().parent]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        _check(root, path, data_dir)
        found[path] = None
        if path.suffix == ".py":
            waiting += [_below(root, each) for each in _imported(root / path, folders)]
    for name in include:
        path = _below(root, root / name)
        if (root / path).is_dir():
            raise ConfigurationError(
                f"--include {name}: it is a folder, and only files that are named travel"
            )
        _check(root, path, data_dir)
        found[path] = None
    return root, sorted(found)


def stage(root: Path, files: Sequence[Path], folder: Path, launcher: str) -> Path:
    """Copy ``files`` of ``root`` into ``folder``, with the script ``launcher`` that all workers
    run; its path."""
    for path in files:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, target)
    script = folder / launcher
    script.write_text(LAUNCHER)
    return script


def _below(root: Path, path: Path) -> Path:
    try:
        return path.relative_to(root)
    except ValueError:
        raise ConfigurationError(
            f"{path} is not in the server's folder {root}: all code of a federation is in one "
            "folder, or in folders below it"
        ) from None


def _check(root: Path, path: Path, data_dir: Path | None) -> None:
    whole = root / path
    if ".." in path.parts:
        raise ConfigurationError(f"{whole} is not in the server's folder {root}")
    for part in (path, *list(path.parents)[:-1]):
        if (root / part).is_symlink():
            raise ConfigurationError(f"{root / part} is a link, and links do not travel")
    if not whole.is_file():
        raise ConfigurationError(f"{whole} does not exist, or is no file")
    if data_dir is not None and whole.resolve().is_relative_to(data_dir.resolve()):
        raise ConfigurationError(
            f"{whole} is in --data-dir {data_dir}, of which nothing travels: keep code and data in "
            "folders of their own"
        )


def _imported(path: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """The files of the modules that the file at ``path`` imports, if they are below ``folders``."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigurationError(f"{path} is not Python: {error}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name.split("."), folders)
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            places = folders
            if node.level:
                places = [path.parents[node.level - 1]]
            yield from _files(module, places)
            for alias in node.names:
                yield from _files([*module, alias.name], places)


def _files(names: Sequence[str], folders: Sequence[Path]) -> Iterator[Path]:
    """The files that the import of a dotted name runs: packages on the way, and the module."""
    for folder in dict.fromkeys(folders):
        place = folder
        for name in names:
            if (place / f"{name}.py").is_file():
                yield place / f"{name}.py"
                break
            place = place / name
            if not place.is_dir():
                break
            if (place / "__init__.py").is_file():
                yield place / "__init__.py"
