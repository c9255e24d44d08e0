"""``potluck jobs``, ``wait``, ``logs`` and ``attach``: what ran on the cluster, what runs, what it
writes, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
from msgspec import structs

from potluck._core.printable import coloured, json_text, plain
from potluck.cli.asking import typed
from potluck.cli.completion import complete_job
from potluck.cli.terminal import console_on, date, print_json, say, table_of
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from potluck._core.cluster.jobs.summary import Summary
    from potluck._core.cluster.members import Machines
    from potluck._core.cluster.past_jobs import KnownJob
    from potluck._core.wire.jobs import LogLine

SCHEMA_VERSION = 1
T = TypeVar("T")
_SHOWN = 20

Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="The job: its id, or an unambiguous beginning of it.",
        autocompletion=complete_job,
    ),
]
"""The job that several commands are about."""


def jobs(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Only this job, with all that is known of it.",
            autocompletion=complete_job,
        ),
    ] = None,
    all: Annotated[
        bool, typer.Option("--all", "-a", help=f"All jobs, not only the newest {_SHOWN}.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List the jobs of the cluster: what runs, what ran, and how it ended.

    Works on every member, and asks all machines that are there. The end of a job is kept on the
    machines that ran it, the one that started it, and on two at least: up to 256 jobs, 90 days.

    A job is *placed* (its machines get ready), *running*, *ended* with its exit code, or *lost*: no
    machine that is there runs it or knows its end.

    With --json: {"version": 1, "jobs": [{"job", "state", "machine" (its starter's name), "starter",
    "script", "started", "ended" (Unix times; 0: not yet), "seconds", "machines", "exit_code" (null:
    not ended), "exits" ([worker, last exit code]), "commit", "package", "plan" (SHA-256 of the
    code, and of the plan of its environment),
    "problem", "step"}]}; of a JOB also "summary", as `potluck run --json` writes it.
    """
    from potluck._core.cluster.past_jobs import all_jobs, find_job, summary_of

    async def one(machines: Machines) -> tuple[KnownJob, Summary | None]:
        found = await find_job(machines, job or "")
        is_over = found.state == "ended"
        return found, await summary_of(machines, found) if is_over else None

    if job is not None:
        found, summary = _on_cluster(one)
        if json:
            print_json({"version": SCHEMA_VERSION, "jobs": [_as_json(found, summary)]})
        else:
            _tell(found, summary)
        return
    listed = _on_cluster(all_jobs)
    if json:
        print_json({"version": SCHEMA_VERSION, "jobs": list(map(_as_json, listed))})
    elif not listed:
        say("No machine that is there knows a job. Start one with: potluck run --detach train.py")
    else:
        _show(listed if all else listed[:_SHOWN])
        if len(listed) > _SHOWN and not all:
            say(f"{len(listed) - _SHOWN} older jobs: potluck jobs --all")


def wait(
    job: Job,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Wait no longer than this (exit code 2)."),
    ] = None,
) -> None:
    """Wait until JOB is over; the exit code is the job's.

    Works on every member, also when the job ended long ago. Exit code 2 with the reason if the end
    can't be told. Ctrl-C ends the waiting, not the job.
    """
    from potluck._core.cluster.past_jobs import find_job, summary_of, wait_for

    async def end(machines: Machines) -> tuple[KnownJob, Summary]:
        found = await find_job(machines, job)
        try:
            async with asyncio.timeout(timeout):
                found = await wait_for(machines, found)
        except TimeoutError:
            raise ConfigurationError(
                f"job {found.info.job} still runs after {timeout:g} s; `potluck jobs "
                f"{found.info.job}` shows how far it is"
            ) from None
        return found, await summary_of(machines, found)

    found, summary = _on_cluster(end)
    say(f"job {found.info.job} {_how(found)}")
    for problem in summary.problems:
        say(f"potluck: {problem}", err=True)
    raise typer.Exit(summary.exit_code)


Rank = Annotated[int | None, typer.Option(min=0, metavar="N", help="Only the lines of this rank.")]


def logs(
    job: Job,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until the job is over.")
    ] = False,
    rank: Rank = None,
    since: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Only what is younger: 90s, 10m, 2h, 3d (by the machines' clocks)."
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show what the workers of JOB wrote, and potluck's notes about it, also when it is over.

    Each rank's newest 32 MiB are kept, on the machine that it ran on and on a second one; what is
    not kept any more is counted in place. Of a progress bar the last state is kept. It works on the
    machine that started the job, on those that ran it, and on members whose scripts may run there.

    With --json: {"at" (Unix time), "rank", "machine", "stream" (stdout, stderr, note), "text",
    "missed" (lines before this one that are not kept)}.
    """
    from potluck._core.cluster.past_jobs import Cursor, attach, find_job, read_log

    seconds = seconds_of("--since", since)
    cursor = Cursor(round(1e6 * (time.time() - seconds)) if since else 0, is_partial=bool(since))

    def show(line: LogLine) -> None:
        _show_line(line, cursor.take(line), json=json)

    async def read(machines: Machines) -> None:
        found = await find_job(machines, job)
        try:
            async for line in read_log(machines, found.info, cursor, rank):
                show(line)
        except ConfigurationError:
            if not follow or found.is_over or rank is not None:
                raise  # else it has just begun
        if follow and not found.is_over:
            await attach(machines, found, cursor, show, rank=rank)

    _on_cluster(read)


_TIME = re.compile("".join(rf"(?:(\d{{1,9}}(?:\.\d+)?){unit})?" for unit in "dhms"))


def seconds_of(option: str, text: str) -> float:
    """The time in ``text``, such as 1h30m, in seconds; 0 if it is empty. ConfigurationError, which
    names ``option``, if it is no time."""
    match = _TIME.fullmatch(text.strip().lower())
    found = [float(each or 0) for each in match.groups()] if match else [0.0]
    seconds = sum(count * size for count, size in zip(found, (86400, 3600, 60, 1), strict=False))
    if text and not 0 < seconds < 1e9:
        raise ConfigurationError(f"{option} {text!r}: write 90s, 10m, 2h, 1h30m or 3d")
    return seconds


def _on_cluster(do: Callable[[Machines], Coroutine[Any, Any, T]]) -> T:
    """``do`` what a command is for with the machines of this machine's cluster."""
    from potluck._core.cluster.members import reached
    from potluck._core.settings import load_settings

    async def run() -> T:
        async with reached(load_settings()) as machines:
            return await do(machines)

    return asyncio.run(run())


def _show_line(line: LogLine, missed: int, *, json: bool) -> None:
    rank, _, machine = line.label.partition(" ")
    if json:
        told = {
            "at": line.at / 1e6,
            "rank": int(rank) if rank.isdigit() else None,
            "machine": machine,
            "stream": line.stream,
            "text": line.text,
            "missed": missed,
        }
        typer.echo(json_text(msgspec.json.encode(told).decode()))
        return
    if missed:
        say(f"potluck: {missed} lines of {line.label or 'notes'} before this are not kept any more")
    if line.stream == "note":
        say(f"potluck: {line.text}")
    elif line.end != "\r":
        typer.echo(f"[{plain(line.label)}] {coloured(line.text)}", err=line.stream == "stderr")


def attach(
    job: Job,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Debug this rank, at its breakpoints.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines instead of the live table, also on a terminal.")
    ] = False,
) -> None:
    """Show a running JOB as `potluck run` does: its last lines, what comes, and its end.

    Any number of terminals, on any machine that may read its logs. Nothing that is typed reaches
    the job. Ctrl-C leaves it running; a second Ctrl-C within 2 s asks whether to cancel it. The
    exit code is the job's if it ends meanwhile.

    With --rank N, rank N is debugged: what it writes is shown, and what is typed goes to the prompt
    of pdb at which it sits after `breakpoint()`, or comes to next. One terminal at a time, on the
    machine that started the job or on that of the rank. Ctrl-D, Ctrl-C and a lost connection let
    the script go on; `q` ends it, as pdb does.
    """
    from potluck._core.cluster.debugging import debug
    from potluck._core.cluster.run import attach_to
    from potluck._core.settings import load_settings
    from potluck.cli.job_display import print_summary, watcher_for

    if rank is not None:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(debug(load_settings(), job, rank, partial(_show_line, json=False), typed))
        say(f"potluck: left rank {rank} of job {job}", err=True)
        return

    def is_to_cancel(name: str) -> bool:
        return sys.stdin.isatty() and typer.confirm(f"Cancel job {name}?")

    watcher = watcher_for(sys.stdout, plain=plain)
    summary = attach_to(load_settings(), job, watcher, is_to_cancel)
    if summary is None:
        say("potluck: detached; the job goes on")
        return
    print_summary(summary)
    raise typer.Exit(summary.exit_code)


def cancel(
    job: Job,
    kill: Annotated[
        bool, typer.Option("--kill", help="End its workers at once, by SIGKILL.")
    ] = False,
) -> None:
    """End JOB: SIGTERM to its workers, SIGKILL after 15 s, or a second time.

    Only the machine that started the job may, and the admins of the cluster. The owner of another
    machine takes that out of all jobs of a member with `potluck deny`, or of all jobs with
    `potluck pause`.
    """
    from potluck._core.cluster.past_jobs import cancel, find_job

    async def end(machines: Machines) -> str:
        found = await find_job(machines, job)
        await cancel(machines, found, kills=kill)
        return found.info.job

    name = _on_cluster(end)
    say(f"job {name} is ending; `potluck wait {name}` returns when it is over")


def rerun(
    job: Job,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it was started, as `potluck run`.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines instead of the live table, also on a terminal.")
    ] = False,
) -> None:
    """Start JOB again as a new job: the same code, as it was then, the same options and variables.

    Only on the machine that started JOB: nobody runs a job in the name of another. Code that is no
    longer here is fetched from a machine that has it.
    """
    from potluck._core.cluster.links.local import running_agent
    from potluck._core.cluster.past_jobs import find_job
    from potluck._core.cluster.run import run_job, start_job
    from potluck._core.settings import load_settings
    from potluck._core.wire.local import RunRequest
    from potluck.cli.job_display import PlainView, print_summary, watcher_for

    async def own(machines: Machines) -> str:
        info = (await find_job(machines, job)).info
        if info.starter != machines.all[0].node:
            raise ConfigurationError(
                f"job {info.job} was started on {info.machine}, and runs in that machine's name "
                f"only: potluck rerun {info.job} there"
            )
        return info.job

    settings = load_settings()
    agent = running_agent(settings)
    name = _on_cluster(own)
    request = RunRequest(script=name, again=name, outlives=True)
    if detach:
        say_started(start_job(request, settings, PlainView(to_stderr=True), agent))
        return
    summary = run_job(request, settings, watcher_for(sys.stdout, plain=plain), agent)
    print_summary(summary)
    raise typer.Exit(summary.exit_code)


def say_started(job: str) -> None:
    """The id of a detached job on stdout, what to do with it on stderr."""
    typer.echo(job)
    say(f"potluck: it goes on by itself; to see it: potluck attach {job}", err=True)


def _as_json(job: KnownJob, summary: Summary | None = None) -> dict[str, Any]:
    told = structs.asdict(job.info)
    del told["phase"], told["summary"]
    told |= {
        "state": job.state,
        "package": job.info.package.hex(),
        "plan": job.info.plan.hex(),
        "step": None if job.status is None else job.status.step,
    }
    return told if summary is None else told | {"summary": summary}


def _show(listed: list[KnownJob]) -> None:
    table = table_of(
        "job",
        "state",
        "who",
        "machines",
        "began",
        "took",
        "",
        right=("took",),
        whole=("job", "state"),
    )
    for each in listed:
        info = each.info
        table.add_row(
            info.job,
            _state(each),
            info.machine,
            ", ".join(info.machines),
            date(info.started),
            _took(each),
            info.problem or ("" if each.status is None else f"step {max(each.status.step, 0):,}"),
        )
    console_on().print(table)


def _state(job: KnownJob) -> str:
    return f"ended {job.info.exit_code}" if job.state == "ended" else job.state


def _took(job: KnownJob) -> str:
    from potluck.cli.job_display import duration

    if job.state == "ended":
        return duration(job.info.seconds)
    return "-" if job.is_over else duration(time.time() - job.info.started)


def _how(job: KnownJob) -> str:
    """What became of it so far, in words."""
    if job.state == "ended":
        when, took = date(job.info.ended), _took(job)
        return f"ended with exit code {job.info.exit_code} on {when}, after {took}"
    if job.state == "lost":
        return "is lost: no machine that is there runs it or knows its end"
    text = f"is {job.state} since {_took(job)}"
    return text if job.status is None else f"{text}, at step {max(job.status.step, 0):,}"


def _tell(job: KnownJob, summary: Summary | None) -> None:
    info = job.info
    say(f"{info.job}: {PurePosixPath(info.script).name}, started on {info.machine} {_how(job)}")
    lines = {
        "machines": ", ".join(info.machines),
        "code": info.package.hex(),
        "environment": info.plan.hex(),
        "commit": info.commit,
        "exit codes": ", ".join(
            f"worker {worker}: {'none' if code is None else code}" for worker, code in info.exits
        ),
    }
    if summary is not None:
        lines["files"] = ", ".join(
            f"{'?' if each.num_files is None else each.num_files} on {each.machine}"
            for each in summary.written
        )
        lines |= {name.replace("_", " "): str(value) for name, value in summary.facts.items()}
    for name, text in lines.items():
        if text:
            say(f"  {name}: {text}")
    for problem in () if summary is None else summary.problems:
        say(f"  problem: {problem}")
    if summary is not None and summary.written:
        say(f"  To bring the files here: potluck fetch {info.job}")
