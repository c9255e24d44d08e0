"""The output of commands: lines, tables and JSON, safe for a terminal where others may have written
the text."""

from __future__ import annotations

import datetime
import io
import logging
import os
import sys
from collections.abc import Collection
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import msgspec
import typer

from potluck._core.printable import json_text, paragraph
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


STDOUT = Path("-")


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


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path``; to stdout if that is ``-``."""
    if path == STDOUT:
        print_json(value)
    else:
        path.write_bytes(as_json(value) + b"\n")


def say(text: str, *, err: bool = False) -> None:
    """Write ``text`` and a line end to stdout, or to stderr; see ``paragraph``."""
    typer.echo(paragraph(text), err=err)


def date(at: float) -> str:
    """The Unix time ``at`` as a date; of 0 ``-``, and ``?`` of a time that no calendar has: other
    machines may tell any."""
    try:
        return f"{datetime.datetime.fromtimestamp(at):%Y-%m-%d %H:%M}" if at else "-"
    except (ValueError, OverflowError, OSError):
        return "?"


def console_on(file: TextIO | None = None) -> Console:
    """A console of rich that shows strings, also those in tables, by ``paragraph``, without
    markup."""
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(paragraph(text), **options)

    return PlainConsole(file=file, markup=False)


def table_of(
    *titles: str, right: Collection[str] = (), whole: Collection[str] = (), **options: Any
) -> Table:
    """A table with these columns, the ``right`` ones aligned to the right. Long words are folded,
    but those of ``whole`` columns, which people copy; ``options`` are a title and a caption."""
    from rich.table import Table

    table = Table(title_justify="left", caption_justify="left", **options)
    for title in titles:
        justify: Literal["right", "left"] = "right" if title in right else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=title in whole)
    return table


class PlainFormatter(logging.Formatter):
    """Log lines that may quote others."""

    def format(self, record: logging.LogRecord) -> str:
        return paragraph(super().format(record))


_LOG_BYTES = 1 << 20
_OLD_LOGS = 3
_MAX_LINE = 16 << 10


class RotatedLog(io.TextIOBase):
    """A stream that writes lines, with their times, to the file ``path``. A file of 1 MiB becomes
    ``path.1``, that one ``path.2``, and so on to 3. What can't be written (a full disk) is lost."""

    def __init__(self, path: Path) -> None:
        check_writable("--log", path)
        self._rest = ""
        self._handler = RotatingFileHandler(
            path, maxBytes=_LOG_BYTES, backupCount=_OLD_LOGS, encoding="utf-8", errors="replace"
        )
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        # logging's own would report it on stderr, which is this stream.
        setattr(self._handler, "handleError", lambda record: None)  # noqa: B010

    def write(self, text: str) -> int:
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest[-_MAX_LINE:]
        for line in lines:
            self._handler.emit(logging.makeLogRecord({"msg": line[:_MAX_LINE]}))
        return len(text)

    def close(self) -> None:
        self._handler.close()
        super().close()


def log_to_stderr() -> None:
    """Have log lines of this process written to stderr by ``PlainFormatter``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter())
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
