"""What a command writes: JSON, and files that are checked before its work begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import typer

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


def as_json(value: Any) -> bytes:
    """``value`` for programs, in lines that people can read as well."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def print_json(value: Any) -> None:
    """Write ``value`` to stdout."""
    typer.echo(as_json(value).decode())
