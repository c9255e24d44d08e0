"""``potluck run``: train with several workers, watch them, survive the loss of some."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from potluck._core import native
from potluck.cli.data import data_of
from potluck.cli.jobs import say_started, seconds_of
from potluck.cli.terminal import check_writable, write_json
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck._core.cluster.home.node_state import AgentRecord
    from potluck._core.cluster.jobs.agent_parts import OuterWorld
    from potluck._core.cluster.jobs.summary import Summary
    from potluck._core.settings import Settings
    from potluck._core.wire.local import RunRequest
    from potluck.cli.launched import LaunchedWorkers

ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Everything after SCRIPT is the script's."),
]
"""The last parameter of commands that run a script."""

MinNodes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How many machines must be there before the job starts (default: "
        "POTLUCK_MIN_PEERS others).",
    ),
]
Wait = Annotated[
    float,
    typer.Option(help="Seconds to wait for machines, and for workers that are not ready."),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        help="A variable for the workers on all machines: NAME=VALUE, or NAME to take it "
        "from here. Several with --env again.",
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Send this, too: a hidden or ignored file or folder, or one that looks like a key "
        "(that without wildcards). A path below SCRIPT's folder or a pattern as in "
        ".gitignore; may be given several times.",
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The folder that travels, and whose modules SCRIPT may import; SCRIPT is in or "
        "below it. Default: SCRIPT's own, or its git repository if it imports modules from "
        "there.",
    ),
]
Module = Annotated[
    bool,
    typer.Option(
        "--module",
        "-m",
        help="SCRIPT is the name of a module, as for python -m: pkg.train. It is looked for in "
        "this directory, in --root (default: its git repository), and in src there.",
    ),
]
On = Annotated[
    str,
    typer.Option(
        metavar="MACHINES",
        help="Only on these machines: names or ids, with commas between.",
    ),
]
"""Options that several commands have that run a script."""


def machines_of(text: str) -> tuple[str, ...]:
    """The machines that ``On`` names; ConfigurationError if that are none."""
    names = tuple(each.strip() for each in text.split(",") if each.strip())
    if text and not names:
        raise ConfigurationError(f"--on {text}: name machines, with commas between")
    return names


def part_of_machines(cores: int, gpus: int, memory: str) -> dict[str, Any]:
    """The part of each machine that a job takes, as fields of a ``RunRequest``. ConfigurationError
    for GPUs or memory without cores, or for no size."""
    if cores == 0 and (gpus or memory):
        given = f"--gpus {gpus}" if gpus else f"--memory {memory}"
        raise ConfigurationError(
            f"{given}: give --cores, too, how many of each machine's cores the job takes; without "
            "them it takes whole machines"
        )
    from potluck._core.cluster.sharing.limits import parse_size

    size = parse_size(memory) if memory else 0
    return {"cores": cores, "gpus": gpus, "memory_bytes": size}


def check_cluster(request: RunRequest, settings: Settings, *, min_nodes: int | None) -> None:
    """ConfigurationError if ``request`` names machines or a number of them, on a machine without an
    agent. ``min_nodes`` is what the caller said."""
    if not request.on and max(request.max_nodes, request.min_nodes) <= 1:
        return
    given = f"POTLUCK_MIN_PEERS={settings.min_peers}"
    if request.on:
        given = f"--on {','.join(request.on)}"
    elif request.max_nodes > 1:
        given = f"--nodes {request.max_nodes}"
    elif min_nodes is not None:
        given = f"--min-nodes {min_nodes}"
    raise ConfigurationError(
        f"{given}: this machine is in no cluster; start its agent with: potluck up"
    )


class OnHangup(StrEnum):
    """What becomes of a job of a cluster when its terminal goes, or its command is killed."""

    DETACH = "detach"
    END = "end"


class OnLoss(StrEnum):
    """What follows when a script that is not elastic loses a worker."""

    RESTART = "restart"
    FAIL = "fail"


def run(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", help="The Python script that every worker runs."),
    ],
    arguments: ScriptArguments = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "--workers-per-node",
            "-n",
            help="How many workers to start on each machine (on this one, without a cluster). "
            "1 if not said: it has all cores. With several GPUs give their number: a worker "
            "drives one.",
        ),
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            min=0, help="On how many machines of the cluster, this one among them; 0: on all."
        ),
    ] = 0,
    min_nodes: MinNodes = None,
    module: Module = False,
    root: Root = None,
    on: On = "",
    min_workers: Annotated[
        int,
        typer.Option(help="How many workers are enough to begin when --wait is over."),
    ] = 1,
    wait: Wait = 60.0,
    cores: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of each machine take so many cores, so that other jobs can run beside this one; "
            "0: the whole machine, alone.",
        ),
    ] = 0,
    gpus: Annotated[
        int, typer.Option(min=0, help="With --cores: so many GPUs of each machine.")
    ] = 0,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="With --cores: so much memory of each machine, such as 4GiB (default: in "
            "proportion to the cores). The workers get no more.",
        ),
    ] = "",
    priority: Annotated[
        int,
        typer.Option(
            min=-100, max=100, help="Of jobs that wait for machines, the higher goes first."
        ),
    ] = 0,
    time: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="End the job after so long: 90m, 2h, 1h30m. A short job may pass longer ones that "
            "wait.",
        ),
    ] = "",
    now: Annotated[
        bool, typer.Option("--now", help="Fail if the machines are busy, in place of waiting.")
    ] = False,
    on_loss: Annotated[
        OnLoss,
        typer.Option(
            help="When a script that is not elastic loses a worker: restart all workers, up to "
            "--max-restarts, or fail."
        ),
    ] = OnLoss.RESTART,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="How often a worker that was killed by a signal is started again, or all workers "
            "of a script that is not elastic."
        ),
    ] = 3,
    peer_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds an operation waits for a silent worker (default 30)."),
    ] = None,
    chaos: Annotated[
        str,
        typer.Option(
            help="Faults to inject, for real: 'kill rank 2 at step 60', "
            "'stop rank 1 at step 20 for 5 s', several with ';' between.",
        ),
    ] = "",
    debug_rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Run rank N under debugpy, for VS Code and others: it waits for them on a port of "
            "its machine, up to 10 minutes, and the other ranks wait for it.",
        ),
    ] = None,
    env: Env = None,
    include: Include = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]DIR",
            help="A folder of data, which each machine gets that runs SCRIPT: there "
            'potluck.data.shared("NAME") is its path (NAME: that of the folder, if not said). '
            "Several with --data again.",
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            "-d",
            help="Return when the job was started, with its id on stdout (needs `potluck up`): "
            "`potluck attach`, `logs` and `wait` go on from there, on any machine.",
        ),
    ] = False,
    on_hangup: Annotated[
        OnHangup | None,
        typer.Option(
            help="What becomes of a cluster's job when the terminal or the ssh session goes, or "
            "this command is killed: it goes on (detach, the default), or ends. Without "
            "`potluck up` it ends.",
        ),
    ] = None,
    installed: Annotated[
        bool,
        typer.Option(
            "--installed",
            help="Run with the packages that each machine has, whatever SCRIPT's block, uv.lock, "
            "pylock.toml or requirements.txt says.",
        ),
    ] = False,
    allow_builds: Annotated[
        bool,
        typer.Option(
            "--allow-builds",
            help="Build packages without a wheel from source, here and where owners allow it "
            "(`potluck up --environments builds`).",
        ),
    ] = False,
    collect: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="At the end bring the files that workers wrote on the machines here, into DIR, as "
            "`potluck fetch` does.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Start nothing: list the files that would travel to the other machines, and what "
            "stays here, and why.",
        ),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write the summary (with --dry-run: the list of files; '-' is stdout) to this "
            "file, as JSON.",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines instead of the live table, also on a terminal.")
    ] = False,
) -> None:
    """Run SCRIPT in several worker processes that train together.

    Where `potluck up` runs, they start on every machine of the cluster: the folder that SCRIPT is
    in travels there, without hidden files, links, and what `.gitignore` and `.potluckignore` name;
    what looks like a key or credentials is refused. Machines may come and go meanwhile. Elsewhere
    they start on this machine.

    What SCRIPT needs is installed on each machine, in an environment of its own: what its block
    `# /// script` says (PEP 723), else a `uv.lock` beside `pyproject.toml`, a `pylock.toml` or a
    `requirements.txt`, in SCRIPT's folder or above it within the folder that travels. Without any
    of them it runs with the packages that each machine has.

    Each line a worker writes is shown with its rank (and machine) in front. A worker
    that is killed is left behind by the others within a step, started again, and taken back in; a
    script that is not elastic (torch's init_process_group) is started again on all workers, and
    resumes from its own checkpoint.
    Ctrl-C is passed on to all workers; a second Ctrl-C kills them. On a cluster the job goes on
    when the terminal is closed; `potluck attach` shows it again.

    With RANK, WORLD_SIZE and MASTER_ADDR set, on machines without `potluck up`, the commands of
    all machines make one world: WORLD_SIZE counts its workers, RANK is that of the first one here.
    Under mpirun or srun each command is one part of it.

    Without `potluck up` workers have the environment of this command. On a cluster they have a
    part of the environment of each machine's agent, without its tokens and keys, and what --env
    says; every member of the cluster can read that, so it is no place for a secret.

    Files that workers write are kept on their machines, and the end says where; `potluck fetch`
    brings them. The directory POTLUCK_OUTPUT, in the environment of workers, is for such files.

    The exit code is that of the first worker whose own code failed; 0 if all went well.
    """
    from potluck._core.cluster.jobs.chaos import parse_chaos
    from potluck._core.cluster.jobs.environment import given_variables
    from potluck._core.cluster.run import checked, run_job, start_job
    from potluck._core.settings import load_settings
    from potluck._core.wire.local import RunRequest
    from potluck.cli.dry_run import show_dry_run
    from potluck.cli.job_display import PlainView, print_summary, watcher_for

    parse_chaos(chaos)
    settings = load_settings(peer_timeout_s=peer_timeout)
    request = checked(
        RunRequest(
            **script_of(script, module=module, root=root, arguments=arguments),
            per_node=1 if workers is None else workers,
            max_nodes=nodes,
            max_restarts=max_restarts,
            restarts_worlds=on_loss is OnLoss.RESTART,
            wait_s=wait,
            min_workers=min_workers,
            min_nodes=settings.min_peers + 1 if min_nodes is None else min_nodes,
            peer_timeout_s=settings.peer_timeout_s,
            chaos=chaos,
            debug_rank=-1 if debug_rank is None else debug_rank,
            environment=given_variables(env or (), os.environ),
            include=tuple(include or ()),
            on=machines_of(on),
            outlives=on_hangup is not OnHangup.END,
            is_installed=installed,
            allows_builds=allow_builds,
            data=data_of(data) if data else (),
            priority=priority,
            seconds=seconds_of("--time", time) if time else 0.0,
            starts_now=now,
            **part_of_machines(cores, gpus, memory),
        )
    )
    if dry_run:
        show_dry_run(Path(request.script), Path(request.root), request.include, settings, json)
        return
    if detach and (json is not None or collect is not None):
        raise ConfigurationError(
            "--detach returns before there is anything for --json and --collect: later, "
            "`potluck jobs JOB --json` and `potluck fetch JOB`"
        )
    results = Results(settings, json, collect)
    place = find_place(request, settings, workers=workers, min_nodes=min_nodes)
    if place.agent is None and (detach or on_hangup is OnHangup.DETACH):
        option = "--detach" if detach else "--on-hangup detach"
        raise ConfigurationError(
            f"{option}: without an agent on this machine a job ends with its command; start the "
            "agent with: potluck up. Without one: nohup potluck run ... &"
        )
    if detach and place.agent is not None:
        say_started(start_job(request, settings, PlainView(to_stderr=True), place.agent))
        return
    if place.launched is not None:
        request = msgspec.structs.replace(request, max_restarts=0)  # none could join again
    watcher = watcher_for(sys.stdout, plain=plain or place.launched is not None)
    summary = run_job(request, settings, watcher, place.agent, place.outer_world)
    print_summary(summary, is_collected=collect is not None)
    raise typer.Exit(results.deliver(summary))


class Results:
    """Where the end of a job goes, beside the terminal: its summary to the file ``json``, the files
    of its workers to the folder ``collect``. ConfigurationError if nothing can be written there."""

    def __init__(self, settings: Settings, json: Path | None, collect: Path | None) -> None:
        from potluck._core.cluster.code_store.folders import check_target

        check_writable("--json", json)
        if collect is not None:
            check_target(collect.absolute(), settings.home, option="--collect")
        self._settings = settings
        self._json = json
        self._collect = collect

    def deliver(self, summary: Summary) -> int:
        """Write ``summary``, and bring the files; the exit code of the command."""
        from potluck.cli.fetch import bring

        code = summary.exit_code
        try:
            if self._json is not None:
                write_json(self._json, summary)
        except OSError as error:
            typer.echo(f"potluck: the summary can't be written: {error}", err=True)
            code = code or 2
        if self._collect is None or not summary.written:
            return code
        return code if bring(self._settings, summary.job, self._collect) else code or 1


@dataclass(frozen=True)
class Place:
    """Where a job runs: on the cluster of this machine's ``agent``, else on this machine alone, or
    as a part of the world of another launcher (``launched``)."""

    agent: AgentRecord | None
    launched: LaunchedWorkers | None

    @property
    def outer_world(self) -> OuterWorld | None:
        return None if self.launched is None else self.launched.variables


def find_place(
    request: RunRequest, settings: Settings, *, workers: int | None, min_nodes: int | None
) -> Place:
    """The place for ``request``, with hints on stderr. ``workers`` and ``min_nodes`` are the user's
    options. ConfigurationError if this machine alone is too little for it."""
    from potluck._core.cluster.home.node_state import find_agent
    from potluck._core.cluster.jobs.chaos import check_ranks, parse_chaos
    from potluck._core.cluster.topology.hardware import own_accelerators
    from potluck.cli.launched import launched_workers

    agent = find_agent(settings.home)
    hints = [idle_accelerators(own_accelerators(), workers, os.environ)]
    if agent is None:  # else `potluck up` has given it
        hints.append(native.advice())
    for hint in filter(None, hints):
        typer.echo(f"potluck: {hint}", err=True)
    launched = launched_workers(
        os.environ, request.per_node, has_agent=agent is not None, chaos=request.chaos
    )
    if launched is not None:
        typer.echo(f"potluck: {launched}", err=True)
    if agent is None:
        check_cluster(request, settings, min_nodes=min_nodes)
        if request.min_workers > request.per_node:
            raise ConfigurationError(
                f"--min-workers {request.min_workers} is more than the {request.per_node} of "
                "--workers"
            )
        check_ranks(parse_chaos(request.chaos), request.per_node)
        if request.debug_rank >= request.per_node:
            raise ConfigurationError(
                f"--debug-rank {request.debug_rank}: the highest rank is {request.per_node - 1}, "
                f"with --workers {request.per_node}"
            )
    return Place(agent, launched)


def script_of(
    script: Path, *, module: bool, root: Path | None, arguments: Sequence[str] | None
) -> dict[str, Any]:
    """The fields of a ``RunRequest`` about the script, from the options of a command."""
    return {
        "script": "" if module else str(script),
        "module": str(script) if module else "",
        "root": "" if root is None else str(root),
        "arguments": tuple(arguments or ()),
    }


def idle_accelerators(
    accelerators: Sequence[str], workers: int | None, environment: Mapping[str, str]
) -> str:
    """A hint about the GPUs here that one worker leaves idle; empty if the user has chosen the
    number of ``workers`` or the GPUs to use."""
    has_chosen = workers is not None or any(
        name in environment for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    )
    if has_chosen or len(accelerators) < 2:
        return ""
    return (
        f"this machine has {len(accelerators)} GPUs, and one worker drives one of them: "
        f"--workers-per-node {len(accelerators)} starts one for each"
    )
