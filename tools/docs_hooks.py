"""mkdocs hook (mkdocs.yml): the reference of the command line, written from the commands."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import typer
from typer.main import get_command

from potluck.cli.main import app

gc.disable()  # a build keeps what it makes to its end: 7.2 s of processor time in place of 9.2

MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands where a page has the mark for them."""
    return markdown.replace(MARK, "\n".join(_program())) if MARK in markdown else markdown


def _program() -> Iterator[str]:
    program = get_command(app)
    context = typer.Context(program, info_name="potluck")
    for name, command in program.commands.items():
        yield from _command(command, typer.Context(command, info_name=name, parent=context))


def _command(command: Any, context: Any) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    usage = usage.replace("{", "").replace("}", "")
    yield from (f"## {context.command_path}", "", "```console", f"$ {usage}", "```", "")
    yield from (command.help, "")
    rows = [each.get_help_record(context) for each in command.params if not each.hidden]
    if rows:
        yield from ("| argument or option | what it is |", "|---|---|")
        for name, text in rows:
            yield f"| {name.replace(', ', '`, `').join('``')} | {_cell(text)} |"
        yield ""
    examples = (command.epilog or "").split("\n\n")[1:]
    if examples:
        yield from ("```console", *(f"$ {each}" for each in examples), "```", "")
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(inner, typer.Context(inner, info_name=name, parent=context))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("  [", " [")
