"""The output of commands: JSON, and a check of output files before the command's work begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import typer

from potluck._core.printable import json_text
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
    """``value`` as indented JSON, safe to show on a terminal."""
    return json_text(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()).encode()


def print_json(value: Any) -> None:
    """Write ``value`` to stdout as indented JSON."""
    typer.echo(as_json(value).decode())
