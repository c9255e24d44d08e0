"""The commands' way to a terminal for text that others may have written: lines and tables."""

from __future__ import annotations

import datetime
import logging
import sys
from typing import TYPE_CHECKING, Any, TextIO

import typer

from potluck._core.printable import paragraph

if TYPE_CHECKING:
    from rich.console import Console


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


class PlainFormatter(logging.Formatter):
    """Log lines that may quote others."""

    def format(self, record: logging.LogRecord) -> str:
        return paragraph(super().format(record))


def log_to_stderr() -> None:
    """Have log lines of this process written to stderr by ``PlainFormatter``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter())
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
