"""Files that a command is to write: a complaint before its work is worth more than after it."""

from __future__ import annotations

import os
from pathlib import Path

from potluck.errors import ConfigurationError


def check_writable(option: str, path: Path | None) -> None:
    """ConfigurationError that names ``option`` if no file can be written at ``path``."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigurationError(f"{option} {path}: there is no directory {folder}")
    if path.is_dir():
        raise ConfigurationError(f"{option} {path}: that is a directory; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(f"{option} {path}: you may not write there")
