"""``potluck clean``: list the environments of scripts on this machine, and their wheels; free
them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.terminal import console_on, date, print_json, say, table_of

if TYPE_CHECKING:
    from potluck._core.cluster.environments.making import Kept

SCHEMA_VERSION = 2


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

    With --json: {"version": 2, "freed_bytes", "kept": [{"key" (of an environment, or of a wheel in
    the content store), "is_wheel", "num_bytes", "used" (Unix time), "num_packages", "source",
    "state" ("removed", "in use", "kept": used too recently; with --dry-run "free")}]}.
    """
    import msgspec

    from potluck._core.cluster.environments.making import Environments
    from potluck._core.settings import load_settings

    environments = Environments(load_settings())
    states: list[tuple[Kept, str]] = []
    for kept in environments.kept():
        state = "kept"
        if time.time() - kept.used >= older_than * 86_400:
            is_free = environments.remove(kept, dry_run=dry_run)
            state = ("free" if dry_run else "removed") if is_free else "in use"
        states.append((kept, state))
    if not (dry_run or older_than):
        environments.forget_plans()
    freed = sum(kept.num_bytes for kept, state in states if state == "removed")
    if json:
        listed = [msgspec.structs.asdict(kept) | {"state": state} for kept, state in states]
        print_json({"version": SCHEMA_VERSION, "freed_bytes": freed, "kept": listed})
    elif not states:
        say("There are no environments on this machine.")
    else:
        titles = ("environment", "from", "packages", "MB", "used", "state")
        table = table_of(*titles, right=("packages", "MB"))
        for kept, state in states:
            source = "wheel" if kept.is_wheel else kept.source
            words = (kept.key[:8], source, str(kept.num_packages), f"{kept.num_bytes / 1e6:.1f}")
            table.add_row(*words, date(kept.used), state)
        console_on().print(table)
        total = sum(kept.num_bytes for kept, _ in states)
        say(f"freed {freed / 1e6:.0f} of {total / 1e6:.0f} MB")
