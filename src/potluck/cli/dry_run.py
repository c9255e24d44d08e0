"""``potluck run --dry-run``: the files that would travel with a script, and what stays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from potluck._core.cluster.code_store.selection import (
    Selection,
    check_script,
    in_words,
    links_in_words,
    select,
)
from potluck._core.printable import size_in_words
from potluck._core.settings import Settings
from potluck.cli.nodes import ask_nodes
from potluck.cli.terminal import STDOUT, check_writable, say, write_json

SCHEMA_VERSION = 1


def show_dry_run(
    script: Path, root: Path, include: Sequence[str], settings: Settings, json: Path | None
) -> None:
    """Print what ``potluck run`` would send of ``root`` with ``script``, or write it to ``json``.

    ConfigurationError as the run itself would meet it: if a file looks like a key, for example.
    """
    if json != STDOUT:
        check_writable("--json", json)
    path = script.absolute()
    selection = select(root, settings.home, include)
    check_script(root, path.relative_to(root).as_posix(), selection)
    machines = asyncio.run(_other_machines(settings))
    if json is None:
        _show(selection, machines)
        return
    listed = {
        "version": SCHEMA_VERSION,
        "folder": str(root),
        "machines": machines,
        "num_bytes": selection.num_bytes,
        "files": selection.files,
        "staying": selection.staying,
    }
    write_json(json, listed)


async def _other_machines(settings: Settings) -> list[str] | None:
    """The names of the cluster's other machines; None without a cluster."""
    reply = await ask_nodes(settings)
    if reply is None:
        return None
    return [each.name for each in reply.nodes if each.role and each.node != reply.node]


def _show(selection: Selection, machines: list[str] | None) -> None:
    for file in selection.files:
        say(f"{size_in_words(file.size):>11}  {file.path}")
    if selection.staying:
        say("")
        say("Not sent:")
    width = max((len(each.path) for each in selection.staying), default=0)
    for each in selection.staying:
        say(f"  {each.path:<{min(width, 40)}}  {each.reason}")
    say("")
    say(f"{in_words(selection, machines or ())}")
    if links := links_in_words(selection):
        say(links)
    if machines is None:
        say("This machine is in no cluster (potluck up): the job would run here, in place.")
