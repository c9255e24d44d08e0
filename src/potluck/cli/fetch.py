"""``potluck fetch``: bring the files that the workers of a job wrote on other machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.completion import complete_job
from potluck.cli.terminal import console_on, date, print_json, say, table_of
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck._core.cluster.fetch import Found, Outcome
    from potluck._core.settings import Settings

SCHEMA_VERSION = 1


def fetch(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="The job, as the end of `potluck run` names it. Without it the jobs are listed "
            "whose workers left files.",
            autocompletion=complete_job,
        ),
    ] = None,
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN",
            help="Only these: a folder, a path, or a name with * and ?. Quote it.",
        ),
    ] = "",
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to put the files (default: ./JOB)."),
    ] = None,
    remove: Annotated[
        bool,
        typer.Option("--remove", help="Delete the files of JOB on all machines that are there."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Bring the files that workers of JOB wrote on the machines of the cluster into one folder.

    Those are all files in POTLUCK_OUTPUT, and all that were written in the job's folder and did not
    come with the script; no hidden files, no links. Each machine keeps them for 14 days
    (POTLUCK_KEEP_RESULTS_DAYS). Only the machine that started the job gets them from others; on
    another machine the command finds what is there.

    A path that two machines wrote differently gets the machine's name: model.attic.pt. No file is
    replaced or renamed; one that is here already is left out, also if it has no machine's name.
    Exit code 1 if something is missing, because a machine is away, for example: the others' files
    are here, and the same command brings the rest.

    With --json: {"version": 1, "jobs": [{"job", "script", "began" (Unix time), "machines":
    [{"node", "machine", "num_files", "num_bytes" (null: not known), "is_away", "is_running", "gone"
    (why the files were deleted; empty: they were not)}]}]}; for a JOB {"version": 1, "job",
    "folder", "files": [{"path", "machine", "size"}], "already", "missing": [sentences]}; with
    --remove {"version": 1, "job", "machines": [names]}.
    """
    from potluck._core.settings import load_settings

    settings = load_settings()
    if job is None:
        if remove or to is not None:
            raise ConfigurationError("name a JOB; `potluck fetch` lists them")
        _show(asyncio.run(_find(settings)), json=json)
    elif remove:
        machines = asyncio.run(_remove(settings, job))
        if json:
            print_json({"version": SCHEMA_VERSION, "job": job, "machines": machines})
        else:
            say(f"the files of {job} were deleted on {', '.join(machines)}")
    elif not bring(settings, job, Path(job) if to is None else to, pattern, json=json):
        raise typer.Exit(1)


def bring(
    settings: Settings, job: str, folder: Path, pattern: str = "", *, json: bool = False
) -> bool:
    """Bring the files of ``job`` that match ``pattern`` into ``folder``, and say so; whether all
    are here. ConfigurationError if there is no such job, or ``folder`` can't take them."""
    from potluck._core.cluster.code_store.folders import check_target

    folder = folder.absolute()
    check_target(folder, settings.home)
    with _progress() as progress:
        outcome = asyncio.run(_fetch(settings, job, pattern, folder, progress))
    if json:
        print_json(
            {
                "version": SCHEMA_VERSION,
                "job": job,
                "folder": str(folder),
                "files": outcome.files,
                "already": outcome.already,
                "missing": outcome.missing,
            }
        )
    else:
        _tell(outcome, folder)
    return not outcome.missing


def _tell(outcome: Outcome, folder: Path) -> None:
    from potluck._core.printable import size_in_words

    count = len(outcome.files)
    size = size_in_words(sum(each.size for each in outcome.files))
    already = f"; {outcome.already} were there already" if outcome.already else ""
    say(f"{count} file{'s' * (count != 1)} ({size}) brought into {folder}{already}")
    for each in outcome.unnamed:
        say(f"{each.path} is that of {each.machine}; those of others have their machine's name")
    for text in outcome.missing:
        say(f"potluck: {text}", err=True)


async def _find(settings: Settings, job: str = "") -> list[Found]:
    from potluck._core.cluster.fetch import find
    from potluck._core.cluster.members import reached

    async with reached(settings) as machines:
        return await find(machines, job)


async def _fetch(
    settings: Settings, job: str, pattern: str, folder: Path, progress: Callable[[int, int], None]
) -> Outcome:
    from potluck._core.cluster.fetch import fetch, find_one
    from potluck._core.cluster.members import reached

    async with reached(settings) as machines:
        found = await find_one(machines, job)
        return await fetch(machines, found, pattern, folder, progress)


async def _remove(settings: Settings, job: str) -> list[str]:
    from potluck._core.cluster.fetch import find_one, remove
    from potluck._core.cluster.members import reached

    async with reached(settings) as machines:
        found = await find_one(machines, job)
        await remove(machines, found)
        return [each.machine for each in found.here]


def _show(jobs: list[Found], *, json: bool) -> None:
    if json:
        print_json({"version": SCHEMA_VERSION, "jobs": jobs})
        return
    if not jobs:
        say("No job left files on the machines that are there.")
        return
    from potluck._core.printable import size_in_words

    table = table_of("job", "began", "machine", "files", "size", "", right=("files", "size"))
    for found in jobs:
        began = date(found.began)
        for each in found.machines:
            count = "?" if each.num_files is None else str(each.num_files)
            size = "?" if each.num_bytes is None else size_in_words(each.num_bytes)
            state = "runs" if each.is_running else "away" if each.is_away else ""
            table.add_row(found.job, began, each.machine, count, size, each.gone or state)
    console_on().print(table)
    say("To bring the files of one here: potluck fetch JOB")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Shows how much has arrived, if stderr is a terminal."""
    import sys

    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console_on(sys.stderr), transient=True) as shown:
        task = shown.add_task("")
        yield lambda done, total: shown.update(task, completed=done, total=total)
