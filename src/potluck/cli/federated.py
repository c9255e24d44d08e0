"""``potluck federated``: train where the data is, on the machines of the cluster."""

from __future__ import annotations

import json as json_module
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.terminal import check_writable, say, write_json
from potluck.errors import ConfigurationError

app = typer.Typer(
    name="federated",
    help="Train where the data is: each machine's data stays there.",
    epilog="Example:\n\npotluck federated run server.py --clients client.py",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def federated() -> None:
    """Train where the data is: each machine's data stays there."""


@app.command(
    epilog=(
        "Examples:\n\n"
        "potluck federated run server.py --clients client.py --data-dir /srv/fl\n\n"
        "potluck federated run server.py --clients client.py --data-dir /srv/fl --dry-run\n\n"
        "potluck federated run --workers 4 server.py --clients client.py"
    )
)
def run(
    server: Annotated[
        Path,
        typer.Argument(
            metavar="SERVER",
            help="The file with the server's function (@potluck.federated.server). It runs on this "
            "machine.",
        ),
    ],
    clients: Annotated[
        Path,
        typer.Option(
            "--clients",
            metavar="FILE",
            help="The file with the clients' function (@potluck.federated.client), in SERVER's "
            "folder or below it. It runs on every machine that takes part.",
        ),
    ],
    data_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The folder of each machine's data, on that machine: an absolute path, or one "
            "that begins with ~ (quote it). Nothing of it is sent. A machine without this folder "
            "is no client, and the run says so. The function finds it as site().data_dir.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", "-n", help="How many clients to start on each machine.")
    ] = 1,
    nodes: Annotated[
        int, typer.Option(min=0, help="On how many machines, this one among them; 0: on all.")
    ] = 0,
    min_nodes: Annotated[
        int, typer.Option(min=1, help="How many machines must be there before the run starts.")
    ] = 1,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for machines before the run starts.")
    ] = 60.0,
    max_restarts: Annotated[
        int, typer.Option(help="How often a killed client, or server, is started again.")
    ] = 1000,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Send this file, too: by its path below SERVER's folder. Without it only Python "
            "modules that the two files import are sent. May be given several times.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of all random choices of the run.")] = 0,
    show_output: Annotated[
        bool,
        typer.Option(
            "--show-output",
            help="Show what clients on other machines print, and the texts of their errors. It may "
            "quote their data; without this option it stays there, in a file.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Start nothing: list the files that would travel.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write the rounds and the job's summary (with --dry-run: the list of files; '-' "
            "is stdout) to this file, as JSON.",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines instead of the live table, also on a terminal.")
    ] = False,
) -> None:
    """Run a federation on the cluster: SERVER here, a client on each machine, this one included.

    Only code travels: SERVER, the clients' file, the modules that they import from SERVER's folder,
    and what --include names; no other file, and nothing of --data-dir. What comes back are
    parameters, numbers of samples and metrics.

    Clients come and go: a killed one is started again and takes part in the next round; the round
    goes on without it. Without `potluck up` all clients run on this machine.

    Exit code 0 if the server's function returned.
    """
    from potluck._core.cluster.home.node_state import find_agent
    from potluck._core.cluster.run import checked, run_job
    from potluck._core.settings import load_settings
    from potluck._core.wire.local import RunRequest
    from potluck.cli.job_display import print_summary, watcher_for
    from potluck.cli.launched import check_alone
    from potluck.federated.bundle import files_of, stage

    folder = _own_folder(data_dir)
    if not server.is_file():
        raise ConfigurationError(f"the server's file {str(server)!r} does not exist")
    if not clients.is_file():
        raise ConfigurationError(f"the clients' file {str(clients)!r} does not exist")
    root, files = files_of(server, clients, folder, include or ())
    if dry_run:
        _show(root, files, json)
        return
    check_writable("--json", json)
    check_alone(os.environ, "potluck federated run")
    settings = load_settings()
    agent = find_agent(settings.home)
    if agent is None and max(nodes, min_nodes) > 1:
        raise ConfigurationError(
            "--nodes and --min-nodes: this machine is in no cluster; start its agent with: "
            "potluck up"
        )
    with tempfile.TemporaryDirectory(prefix="potluck-federated-") as temporary:
        staged = Path(temporary) / "code"
        staged.mkdir()
        history = Path(temporary) / "history.json"
        script = stage(root, files, staged, f"federated-{server.stem}.py")
        words = ["--server", server.name, "--seed", str(seed), "--history", str(history)]
        words += ["--client", clients.absolute().relative_to(root).as_posix()]
        words += ["--data-dir", data_dir] if data_dir else []
        words += [] if agent is None or show_output else ["--keep-output"]
        request = checked(
            RunRequest(
                script=str(script),
                arguments=tuple(words),
                per_node=workers,
                extra_workers=1,
                max_nodes=nodes,
                max_restarts=max_restarts,
                restarts_worlds=False,
                wait_s=wait,
                min_nodes=min_nodes,
                peer_timeout_s=settings.peer_timeout_s,
                include=tuple(include or ()),
                modules=tuple(each.as_posix() for each in files if each.suffix == ".py"),
                keeps_files=True,
            )
        )
        summary = run_job(request, settings, watcher_for(sys.stdout, plain=plain), agent)
        runs = json_module.loads(history.read_text()) if history.is_file() else []
    print_summary(summary)
    if json is not None:
        write_json(json, {"version": 1, "runs": runs, "job": summary})
    raise typer.Exit(summary.exit_code)


def _own_folder(data_dir: str | None) -> Path | None:
    if data_dir is None:
        return None
    folder = Path(data_dir).expanduser()
    if not folder.is_absolute():
        raise ConfigurationError(
            f"--data-dir {data_dir}: it is a folder of each machine, so it must be an absolute "
            "path, or one that begins with ~"
        )
    return folder


def _show(root: Path, files: list[Path], json: Path | None) -> None:
    listed = [
        {"path": path.as_posix(), "num_bytes": (root / path).stat().st_size} for path in files
    ]
    if json is not None:
        write_json(json, {"version": 1, "folder": str(root), "files": listed})
        return
    for each in listed:
        say(f"{each['num_bytes']:>11}  {each['path']}")
    say(f"{len(listed)} files of {root} would travel, and nothing else")
