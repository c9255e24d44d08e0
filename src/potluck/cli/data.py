"""``potluck data``: which data sets lie where; remove and keep them here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck._core.printable import plain, size_in_words
from potluck.cli.terminal import console_on, date, print_json, say, table_of
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck._core.settings import Settings
    from potluck._core.wire.peers import DataHeld

SCHEMA_VERSION = 1


class Action(StrEnum):
    """What to do with a data set of this machine."""

    RM = "rm"
    PIN = "pin"
    UNPIN = "unpin"


def data(
    action: Annotated[
        Action | None, typer.Argument(help="What to do with NAME on this machine.")
    ] = None,
    name: Annotated[str, typer.Argument(help="The name of a data set, or how its id begins.")] = "",
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List the data sets of jobs: all that are on this machine, and where else those of this
    machine are.

    `potluck data rm NAME` removes one from this machine, `pin` keeps it whatever else needs room,
    `unpin` ends that. What was not used for the longest time goes by itself when a job needs room
    (`potluck up --data`).

    With --json: {"version": 1, "machines": [{"name", "quota" (bytes), "sets": [{"name", "id",
    "bytes", "from" (the node that it came from), "used" (Unix time), "state" ("in use", "pinned",
    "kept", "in part", or the folder that it lies in)}]}]}.
    """
    from potluck._core.settings import load_settings

    if (action is None) != (not name):
        raise ConfigurationError("write `potluck data`, or `potluck data rm|pin|unpin NAME`")
    found = asyncio.run(_asked(load_settings(), action, name))
    if json:
        listed = [_as_json(machine, held) for machine, held in found]
        print_json({"version": SCHEMA_VERSION, "machines": listed})
    elif action is not None:
        done = {"rm": "removed from this machine", "pin": "kept here", "unpin": "not pinned here"}
        say(f"{name} is {done[action]}")
    elif not any(held.sets for _, held in found):
        say("There are no data sets of jobs: potluck run --data DIR brings them.")
    else:
        table = table_of("data", "id", "machine", "size", "used", "state", right=("size",))
        for machine, held in found:
            for each in held.sets:
                size = size_in_words(each.num_bytes)
                words = (each.name, each.package.hex()[:8], machine, size, date(each.used))
                table.add_row(*map(plain, (*words, each.state)))
        console_on().print(table)


async def _asked(
    settings: Settings, action: Action | None, name: str
) -> list[tuple[str, DataHeld]]:
    """What the machines that answer have, this one first."""
    from potluck._core.cluster.members import reached
    from potluck._core.wire.peers import DataRequest

    async with reached(settings) as machines:
        if action is None:
            return await machines.data()
        here, request = machines.all[0], DataRequest(action.value, name)
        return [(here.name, await machines.held_data(here, request))]


def _as_json(machine: str, held: DataHeld) -> dict[str, object]:
    sets = [
        {
            "name": each.name,
            "id": each.package.hex(),
            "bytes": each.num_bytes,
            "from": each.starter,
            "used": each.used,
            "state": each.state,
        }
        for each in held.sets
    ]
    return {"name": machine, "quota": held.quota, "sets": sets}


def data_of(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The names and folders of ``potluck run --data``. ConfigurationError if there is no such
    folder, or a name is none."""
    from potluck._core.wire.jobs import DATA_NAME, MAX_DATA_SETS

    found: dict[str, str] = {}
    for text in texts:
        name, has_name, where = text.partition("=")
        if not has_name or Path(text).is_dir():
            name, where = "", text
        folder = Path(where).expanduser().resolve()
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise ConfigurationError(f"--data {text}: {folder} {what}; name a folder")
        name = name or folder.name
        if not re.fullmatch(DATA_NAME, name):
            raise ConfigurationError(
                f"--data {text}: {name!r} is no name for data, which has letters, digits, '.', '_' "
                "and '-', at most 64; give one by --data NAME=DIR"
            )
        if name in found:
            raise ConfigurationError(
                f"--data {text}: {found[name]} is called {name}, too; give it another name by "
                "--data NAME=DIR"
            )
        found[name] = str(folder)
    if len(found) > MAX_DATA_SETS:
        raise ConfigurationError(f"--data: at most {MAX_DATA_SETS} data sets are in a job")
    return tuple(found.items())
