"""``potluck clean``: list the environments of scripts on this machine, and their wheels; free
them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli.terminal import console_on, date, print_json, say, table_of

if TYPE_CHECKING:
    from potluck._core.cluster.environments.making import Kept

SCHEMA_VERSION = 1


def clean(
    older_than: Annotated[
        float,
        typer.Option(min=0, metavar="DAYS", help="Only what was not used for so many days."),
    ] = 0.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing: list what is there.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Remove the environments that potluck made for scripts on this machine, and their wheels.

    What a running job uses stays. The next run of a script fetches and installs what it needs
    again; without a lock, its packages are then chosen anew.

    With --json: {"version": 1, "freed_bytes", "kept": [{"environment" (its key), "wheel" (its name
    in the content store; one of both is null), "bytes", "used" (Unix time), "packages", "source",
    "state" ("removed", "in use", "kept": used too recently; with --dry-run "free")}]}.
    """
    from potluck._core.cluster.environments.making import Environments
    from potluck._core.settings import load_settings

    environments = Environments(load_settings())
    states: list[tuple[Kept, str]] = []
    for kept in environments.kept():
        state = "free"
        if time.time() - kept.used < older_than * 86_400:
            state = "kept"
        elif environments.is_used(kept):
            state = "in use"
        elif not dry_run:
            state = "removed" if environments.remove(kept) else "in use"
        states.append((kept, state))
    if not (dry_run or older_than):
        environments.forget_plans()
    freed = sum(kept.num_bytes for kept, state in states if state == "removed")
    if json:
        listed = [_as_json(kept, state) for kept, state in states]
        print_json({"version": SCHEMA_VERSION, "freed_bytes": freed, "kept": listed})
    elif not states:
        say("There are no environments on this machine.")
    else:
        _show(states)
        total = sum(kept.num_bytes for kept, _ in states)
        say(
            f"{total / 1e6:.0f} MB in all; `potluck clean` frees what no job uses"
            if dry_run
            else f"freed {freed / 1e6:.0f} MB"
        )


def _as_json(kept: Kept, state: str) -> dict[str, Any]:
    return {
        "environment": None if kept.path is None else kept.key,
        "wheel": kept.key if kept.path is None else None,
        "bytes": kept.num_bytes,
        "used": kept.used,
        "packages": kept.num_packages,
        "source": kept.source,
        "state": state,
    }


def _show(states: list[tuple[Kept, str]]) -> None:
    """Environments one by one, wheels together."""
    rows = [
        (kept.key[:8], kept.source, str(kept.num_packages), kept.num_bytes, kept.used, state)
        for kept, state in states
        if kept.path is not None
    ]
    for state in dict.fromkeys(state for kept, state in states if kept.path is None):
        wheels = [kept for kept, each in states if kept.path is None and each == state]
        size, used = sum(each.num_bytes for each in wheels), max(each.used for each in wheels)
        rows.append(("wheels", "", str(len(wheels)), size, used, state))
    titles = ("environment", "from", "packages", "MB", "used", "state")
    table = table_of(*titles, right=("packages", "MB"))
    for key, source, packages, size, used, state in rows:
        table.add_row(key, source, packages, f"{size / 1e6:.1f}", date(used), state)
    console_on().print(table)
