"""``potluck launch``: the commands, and the launcher's process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli.launch.manifests import Kind
from potluck.cli.run import ScriptArguments, Wait, script_of
from potluck.cli.terminal import say
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck._core.cluster.jobs.summary import Summary
    from potluck._core.cluster.launching import Fleet, Invitation
    from potluck._core.settings import Settings
    from potluck._core.wire.local import RunRequest

app = typer.Typer(
    name="launch",
    help="Run a script where machines are managed already: Slurm, Ray, Dask, MPI, Kubernetes.",
    epilog="Example:\n\npotluck launch slurm --nodes=3 --time=2:00:00 train.py --epochs 3",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Script = Annotated[
    Path, typer.Argument(metavar="SCRIPT", help="The Python script that every worker runs.")
]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="[OPTIONS OF THE LAUNCHER] SCRIPT [ARGS]",
        help="Options of the other launcher, one word each (--nodes=3); the script; its arguments.",
    ),
]
Nodes = Annotated[int, typer.Option(min=1, max=250, help="How many machines.")]
Workers = Annotated[int, typer.Option(min=1, help="How many workers to start on each machine.")]
Collect = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where files that workers wrote into POTLUCK_OUTPUT are brought at the end (default: "
        "a folder of the job's name).",
    ),
]
_PASSES_ON = {
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": ["--help"],
}
_STOPS = {"allow_interspersed_args": False}


@app.callback()
def launch() -> None:
    """Run a script where machines are managed already."""


@dataclass
class Launching:
    """What is launched: ``script`` with ``arguments``, ``workers`` on each machine. ``is_warned``:
    the manager gave notice that the allocation ends."""

    script: Path
    arguments: Sequence[str]
    workers: int
    collect: Path | None
    wait: float = 60.0
    is_warned: bool = False

    def run(self, fleet: Fleet, num: int, *, trains: bool = False, **settings: Any) -> int:
        """Run it on at least ``num`` machines, those of ``fleet``; its exit code."""
        from potluck._core.cluster.launching import launch
        from potluck._core.settings import load_settings
        from potluck.cli.job_display import print_summary, watcher_for

        loaded = load_settings(**{"discovery_port": 0} | settings)
        if not trains:  # the environment of a login may name another cluster
            loaded = replace(loaded, psk=None)
        request = self.request(min_nodes=num, peer_timeout_s=loaded.peer_timeout_s)
        summary = asyncio.run(
            launch(
                request,
                loaded,
                watcher_for(sys.stdout, plain=True),
                fleet,
                collect=self._bring,
                trains=trains,
                warned=self._warned,
            )
        )
        print_summary(summary, is_collected=True)
        return summary.exit_code

    def request(self, **fields: Any) -> RunRequest:
        """What the launcher's agent is asked; ConfigurationError if there is no such script."""
        from potluck._core.cluster.run import checked
        from potluck._core.wire.local import RunRequest

        said = script_of(self.script, module=False, root=None, arguments=self.arguments)
        return checked(RunRequest(**said, **fields, per_node=self.workers, wait_s=self.wait))

    def _warned(self) -> None:
        self.is_warned = True

    def _bring(self, settings: Settings, summary: Summary) -> None:
        from potluck.cli.fetch import bring

        if summary.written:
            bring(settings, summary.job, self.collect or Path(summary.job))


@app.command(
    context_settings=_PASSES_ON,
    epilog=(
        "Examples:\n\n"
        "potluck launch slurm --nodes=3 --time=2:00:00 train.py --epochs 3\n\n"
        "potluck launch slurm --requeue --nodes=3 --partition=gpu train.py\n\n"
        "salloc --nodes=3 potluck launch slurm train.py"
    ),
)
def slurm(
    words: Words,
    workers: Workers = 1,
    print_: Annotated[
        bool,
        typer.Option("--print", help="Write the call of sbatch to stdout, and submit nothing."),
    ] = False,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue",
            help="Before the time limit have the script write its checkpoint, and queue the job "
            "again: it resumes from there.",
        ),
    ] = False,
    collect: Collect = None,
    wait: Wait = 60.0,
) -> None:
    """Submit a job (sbatch) that runs SCRIPT on the nodes that Slurm gives.

    In an allocation (a batch script of yours, or salloc) the script is run at once: one agent on
    each node, with a secret of their own, and the workers. All options that potluck does not know
    are sbatch's. The job goes on without a node that fails (--no-kill), and ends with the node of
    the batch script. Two minutes before the time limit the workers get Ctrl-C, on which an elastic
    script writes its checkpoint.
    """
    from potluck.cli.launch import fleets

    options, script, arguments = split_words(words, "sbatch")
    launching = Launching(script, arguments, workers, collect, wait)
    launching.request()
    if "SLURM_JOB_ID" in os.environ and not print_:
        code = launching.run(*fleets.on_slurm(os.environ))
        if requeue and launching.is_warned:
            fleets.requeue()
        raise typer.Exit(code)
    ours = [f"--workers={workers}", f"--wait={wait:g}", *(["--requeue"] if requeue else [])]
    if collect is not None:
        ours.append(f"--collect={collect.absolute()}")
    again = [
        *fleets.potluck_command(),
        "launch",
        "slurm",
        *ours,
        "--",
        str(script.absolute()),
        *arguments,
    ]
    command = fleets.sbatch([f"--job-name={script.stem}", *options], again, requeue=requeue)
    if print_:
        print(shlex.join(command))
    else:
        say(f"job {fleets.submit(command)} is queued: squeue shows it; its output: slurm-JOB.out")


def split_words(words: Sequence[str], manager: str) -> tuple[list[str], Path, list[str]]:
    """The options of ``manager`` (each one word, as ``--nodes=3``), the script, and its arguments.

    ConfigurationError if there is no script, or an option has its value in a word of its own, which
    would be taken for the script.
    """
    options = []
    for index, word in enumerate(words):
        if word.startswith("-"):
            options.append(word)
            continue
        if options and "=" not in options[-1] and not Path(word).is_file():
            raise ConfigurationError(
                f"{word!r} is no script; options of {manager} are one word each: "
                f"{options[-1]}={word} in place of {options[-1]} {word}"
            )
        return options, Path(word), list(words[index + 1 :])
    raise ConfigurationError(f"name a SCRIPT after the options of {manager}")


@app.command(
    context_settings=_STOPS,
    epilog=(
        "Examples:\n\n"
        "potluck launch ray --nodes 3 train.py --epochs 3\n\n"
        "potluck launch ray --nodes 3 --cpus 8 --gpus 2 --workers 2 train.py"
    ),
)
def ray(
    script: Script,
    arguments: ScriptArguments = None,
    nodes: Nodes = 2,
    address: Annotated[
        str, typer.Option(help="The address of Ray's cluster (default: the one of this machine).")
    ] = "auto",
    cpus: Annotated[float, typer.Option(min=0, help="Ray's CPUs for SCRIPT on each node.")] = 1.0,
    gpus: Annotated[float, typer.Option(min=0, help="Ray's GPUs for SCRIPT on each node.")] = 0.0,
    workers: Workers = 1,
    collect: Collect = None,
    wait: Wait = 60.0,
) -> None:
    """Run SCRIPT on nodes of Ray: an actor on each, which Ray places.

    When a node is lost, the others go on; Ray starts its actor again on a node that is free, also
    one that comes later, and it joins.
    """
    from potluck.cli.launch.fleets import on_ray

    launching = Launching(script, arguments or (), workers, collect, wait)
    raise typer.Exit(launching.run(on_ray(address, nodes, cpus=cpus, gpus=gpus), nodes))


@app.command(
    context_settings=_STOPS,
    epilog="Example:\n\npotluck launch dask --scheduler tcp://10.0.0.1:8786 --nodes 3 train.py",
)
def dask(
    script: Script,
    scheduler: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Dask's scheduler: tcp://10.0.0.1:8786.")
    ],
    arguments: ScriptArguments = None,
    nodes: Nodes = 2,
    workers: Workers = 1,
    collect: Collect = None,
    wait: Wait = 60.0,
) -> None:
    """Run SCRIPT on all machines with workers of Dask, by a task on each; --nodes are enough to
    begin.

    When Dask's worker is lost, the machines of the others go on; a machine whose worker comes later
    joins.
    """
    from potluck.cli.launch.fleets import on_dask

    launching = Launching(script, arguments or (), workers, collect, wait)
    raise typer.Exit(launching.run(on_dask(scheduler), nodes))


@app.command(
    context_settings=_STOPS,
    epilog=(
        "Examples:\n\n"
        "potluck launch mpi --hosts a,b,c --nodes 3 train.py --epochs 3\n\n"
        "potluck launch mpi --hosts ./hostfile --nodes 3 train.py"
    ),
)
def mpi(
    script: Script,
    arguments: ScriptArguments = None,
    nodes: Nodes = 1,
    hosts: Annotated[
        str,
        typer.Option(
            metavar="A,B|FILE",
            help="Names of machines, or a file of mpirun's with them (default: those that its "
            "manager gives, else this one).",
        ),
    ] = "",
    workers: Workers = 1,
    collect: Collect = None,
    wait: Wait = 60.0,
) -> None:
    """Run SCRIPT on machines that Open MPI's mpirun reaches: an agent on each, and the workers.

    A lost worker is started again, and takes the state of the others. A lost machine ends mpirun,
    and so the job: give the command again, and an elastic script resumes from its checkpoint.
    """
    from potluck.cli.launch.fleets import on_mpi

    launching = Launching(script, arguments or (), workers, collect, wait)
    raise typer.Exit(launching.run(on_mpi(nodes, hosts), nodes))


@app.command(
    context_settings=_STOPS,
    epilog=(
        "Examples:\n\n"
        "potluck launch kubernetes --image registry.lan/me/digits --nodes 3 train.py\n\n"
        "potluck launch kubernetes --kind trainjob --print --image digits train.py | kubectl apply "
        "-f -"
    ),
)
def kubernetes(
    script: Script,
    image: Annotated[
        str,
        typer.Option(
            help="The image, with SCRIPT, potluck and what SCRIPT needs (`potluck launch docker`)."
        ),
    ],
    arguments: ScriptArguments = None,
    nodes: Nodes = 2,
    kind: Annotated[
        Kind,
        typer.Option(
            help="What keeps the pods: a StatefulSet, which every cluster has, a JobSet, or a "
            "TrainJob of Kubeflow.",
        ),
    ] = Kind.STATEFULSET,
    name: Annotated[
        str, typer.Option(help="The name of all objects (default: SCRIPT's name).")
    ] = "",
    workers: Workers = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each pod.")] = 0,
    print_: Annotated[
        bool, typer.Option("--print", help="Write the manifest to stdout instead of a file.")
    ] = False,
) -> None:
    """Write a manifest (NAME.json, for kubectl apply -f) of pods that run SCRIPT.

    SCRIPT is a path in the image, below its working directory. The manifest has a secret made for
    these pods, so only you can read the file. A lost pod is left behind by the others, and taken
    back in when Kubernetes has started it again; with pod 0 all begin again, from the checkpoint.
    """
    from potluck.cli.launch import manifests

    stem = re.sub("[^a-z0-9]+", "-", script.stem.lower()).strip("-")
    command = ["potluck", "launch", "pod", f"--workers={workers}", "--", str(script)]
    listed = manifests.pods(
        kind,
        name=name or stem,
        image=image,
        num=nodes,
        command=[*command, *(arguments or ())],
        psk=secrets.token_hex(32),
        gpus=gpus,
    )
    text = json.dumps(listed, indent=2) + "\n"
    if print_:
        sys.stdout.write(text)
        return
    path = Path(f"{name or stem}.json")
    _write_new(path, text)
    say(f"{path} is written, with a secret; to start the pods: kubectl apply -f {path}")


@app.command(
    context_settings=_STOPS,
    epilog=(
        "Example:\n\n"
        "potluck launch docker train.py && docker build -t digits . && "
        "docker run --network host digits"
    ),
)
def docker(
    script: Script,
    arguments: ScriptArguments = None,
    base: Annotated[
        str, typer.Option("--from", help="The image to begin with, with Python and its venv.")
    ] = "python:3.12-slim",
    install: Annotated[
        list[str] | None,
        typer.Option(
            help="What pip installs (default: potluck[torch] in this release); several with "
            "--install again. A requirements.txt in this folder is installed, too."
        ),
    ] = None,
) -> None:
    """Write a Dockerfile for an image that runs SCRIPT, with this folder in it.

    Hidden files do not get into the image (Dockerfile.dockerignore); everything else here does.
    """
    from potluck.cli.launch import manifests

    Launching(script, arguments or (), 1, None).request()
    packages = install or [f"potluck[torch]=={version('potluck')}"]
    command = ["potluck", "run", str(script), *(arguments or ())]
    has_requirements = Path("requirements.txt").is_file()
    text = manifests.dockerfile(base, packages, command, has_requirements=has_requirements)
    for name, content in (("Dockerfile", text), ("Dockerfile.dockerignore", manifests.IGNORED)):
        _write_new(Path(name), content, mode=0o644)
    say("Dockerfile is written; to make the image: docker build -t NAME .")


def _write_new(path: Path, text: str, mode: int = 0o600) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise ConfigurationError(f"{path} is there already: move it away") from None
    with open(descriptor, "w") as file:
        file.write(text)


@app.command(hidden=True, context_settings=_STOPS)
def pod(
    script: Script,
    arguments: ScriptArguments = None,
    workers: Workers = 1,
    stay: Annotated[bool, typer.Option("--stay", help="After the end wait for SIGTERM.")] = False,
) -> None:
    """Take part in the allocation of these pods; pod 0 starts the job."""
    from potluck._core.backends.launchers import read_launched_rank
    from potluck._core.cluster.launching import MEET_S, Invitation, by_themselves, take_part
    from potluck._core.settings import load_settings
    from potluck.cli.launch.manifests import PORT

    launched = read_launched_rank(os.environ)
    if launched.rank == 0:
        launching = Launching(script, arguments or (), workers, None, MEET_S)
        code = launching.run(by_themselves, launched.world_size, trains=True, discovery_port=PORT)
    else:
        settings = load_settings(discovery_port=0)
        invitation = Invitation(settings.psk or "", ((launched.host, PORT),))
        code = asyncio.run(take_part(invitation, settings, asyncio.Event()))
    if stay and code == 0:
        for number in (signal.SIGTERM, signal.SIGINT):  # no process with the number 1 heeds these
            signal.signal(number, lambda *_: sys.exit(0))
        say("the job is over; this pod waits to be deleted")
        threading.Event().wait()
    raise typer.Exit(code)


@app.command(hidden=True)
def member() -> None:
    """Take part in an allocation; the launcher's invitation is in stdin, or in the environment."""
    from potluck._core.cluster.launching import MAX_INVITATION, parse_invitation, take_part
    from potluck._core.settings import load_settings
    from potluck.cli.launch.fleets import INVITATION

    given = os.environ.pop(INVITATION, "")
    invitation = parse_invitation(given.encode() or sys.stdin.buffer.readline(MAX_INVITATION))
    for name in ("POTLUCK_PSK", "POTLUCK_PASSPHRASE"):
        os.environ.pop(name, None)
    settings = load_settings(discovery_port=0, name=os.environ.get("SLURMD_NODENAME"))
    if given:
        raise typer.Exit(asyncio.run(take_part(invitation, settings, asyncio.Event())))
    raise typer.Exit(asyncio.run(_until_input_ends(invitation, settings)))


async def _until_input_ends(invitation: Invitation, settings: Settings) -> int:
    """The launcher holds the other end of the pipe."""
    from potluck._core.cluster.launching import take_part

    leaving = asyncio.Event()

    def read() -> None:
        if not os.read(0, 4096):
            asyncio.get_running_loop().remove_reader(0)
            leaving.set()

    asyncio.get_running_loop().add_reader(0, read)
    return await take_part(invitation, settings, leaving)
