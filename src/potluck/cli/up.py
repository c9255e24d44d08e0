"""``potluck up``: run this machine's agent in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck._core import native
from potluck._core.background import why
from potluck._core.printable import plain
from potluck._core.system import SIGHUP, has_terminal, heard, is_root, user_name
from potluck.cli.terminal import RotatedLog, log_to_stderr
from potluck.errors import ConfigurationError, PotluckError

if TYPE_CHECKING:
    from collections.abc import Callable

    from potluck._core.cluster.node_agent import NodeAgent
    from potluck._core.settings import Settings


def up(
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="TCP and UDP port (default 52415)."),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Addresses of other machines, for networks without multicast: attic,10.0.0.7.",
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Listen and look for others on this network interface only (or one address), and "
            "on the loopback: eth0, 10.0.0.7. Default: all.",
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where this machine stands, the outermost level first: home, home/rack1. What "
            "machines of different sites send each other goes once between two sites. Give it on "
            "all machines (default: found by measuring links).",
        ),
    ] = None,
    run_for: Annotated[
        str | None,
        typer.Option(
            help="Whose scripts may run on this machine: all, ask (for each node), none, or names "
            "or ids of nodes with commas (default: ask). Kept; another rule than before replaces "
            "earlier decisions.",
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(min=0, help="Processors for jobs (default: all)."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory for jobs: 8GiB, 50% (default: all)."),
    ] = None,
    nice: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=19,
            help="Priority of jobs, 19 is the lowest (default 0).",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="GPUs for jobs: 0,2, or none (default: all)."),
    ] = None,
    sandbox: Annotated[
        bool,
        typer.Option(
            "--sandbox",
            help="Run scripts of other members with an empty home and a read-only system "
            "(needs bubblewrap).",
        ),
    ] = False,
    environments: Annotated[
        str | None,
        typer.Option(
            metavar="off|wheels|builds",
            help="Whether the packages that a script asks for are installed here, in an "
            "environment of its own: wheels (the default); builds: also those that are built from "
            "source, in a sandbox without network; or off: such a script does not run here.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|off",
            help="How much of the disk the data of other machines' jobs may take here, such as "
            "50G (default 20G); off: no job with data runs here.",
        ),
    ] = None,
    allow_root: Annotated[
        bool,
        typer.Option(
            "--allow-root",
            help="Run as root all the same (in a container): scripts of other members are then "
            "root here.",
        ),
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write lines to this file instead of the terminal, with their times: at most "
            "1 MiB, and three older files of that size.",
        ),
    ] = None,
    install_service: Annotated[
        bool,
        typer.Option(
            "--install-service",
            help="Have this machine run `potluck up`, with these options and POTLUCK_* variables, "
            "as a service (a user unit of systemd, or a launchd agent); then return.",
        ),
    ] = False,
    remove_service: Annotated[
        bool, typer.Option("--remove-service", help="End and remove that service; then return.")
    ] = False,
) -> None:
    """Make this machine part of its cluster, until Ctrl-C.

    Runs the machine's agent in the foreground. The agent finds the other machines of the cluster
    (by mDNS, by a beacon, or by --peers), keeps links to their agents, and agrees with them on the
    members of the cluster; each change is one line, with its reason. Founds a cluster if this
    machine is in none: then run `potluck pair` here and `potluck join` on the next machine.
    `potluck status` shows what the agent knows, `potluck nodes` who is in.

    Machines of a cluster run each other's scripts: `potluck run` on any of them starts workers on
    all, as the user who runs `potluck up` there. Before scripts of another machine run here you are
    asked once. Where nobody can be asked (in the background, or as a service) they don't run before
    `potluck allow`, unless --run-for says otherwise. `potluck allow`, `potluck deny` and `potluck
    pause` change that while it runs.

    With --install-service the agent runs without a terminal and comes back after a login.
    """
    from potluck._core.settings import load_settings
    from potluck.cli import service

    if remove_service:
        if install_service:
            raise ConfigurationError("give one of --install-service and --remove-service")
        service.remove_service()
        return
    if log is not None and not install_service:
        sys.stdout = sys.stderr = RotatedLog(log)
    log_to_stderr()
    try:
        settings = load_settings(
            discovery_port=port,
            bind=interface,
            peers=peers,
            site=site,
            run_for=run_for,
            cpus=cpus,
            memory=memory,
            nice=nice,
            gpus=gpus,
            sandbox=sandbox or None,
            environments=environments,
            data=data,
            allow_root=allow_root or None,
        )
        check_user(settings)
        if install_service:
            if log is not None:
                raise ConfigurationError("--log: a service's lines go to the system's log")
            service.install_service(settings, lambda: keep_rule(settings))
            return
        keep_rule(settings)
        asyncio.run(_run(settings))
    except PotluckError:
        raise
    except Exception as error:
        traceback.print_exc()
        typer.echo(
            f"potluck: this node's agent broke ({why(error)}) and has ended; the other nodes go on "
            "without it. Start `potluck up` again, and please report this with the traceback above",
            err=True,
        )
        raise typer.Exit(1) from None


def check_user(settings: Settings) -> None:
    """ConfigurationError if workers would run as root and the owner has not said that they may."""
    if is_root() and not settings.allow_root:
        raise ConfigurationError(
            "potluck up runs scripts of other members as the user that starts it; this is root, "
            "and they could change anything here. Start it as another user: sudo -u NAME potluck "
            "up. Where there is only root, as in a container: potluck up --allow-root, or "
            "POTLUCK_ALLOW_ROOT=1"
        )


def keep_rule(settings: Settings) -> None:
    """Keep whose scripts run here, if the owner says it now."""
    from potluck._core.cluster.sharing.offers import SharingStore
    from potluck._core.cluster.sharing.rules import ruled
    from potluck.cli.nodes import find_known

    if settings.run_for:
        store = SharingStore(settings.home)
        kept = ruled(store.read(), settings.run_for, lambda text: find_known(settings, text))
        store.write(kept)


def _say(line: str) -> None:
    """Write a line to stdout. The agent goes on if it can't be written."""
    with contextlib.suppress(OSError):
        typer.echo(f"potluck: {plain(line)}")


async def _run(settings: Settings) -> None:
    from potluck._core.cluster.discovery.configured import all_finders
    from potluck._core.cluster.node_agent import NodeAgent

    is_asking = has_terminal() and not isinstance(sys.stdout, RotatedLog)
    reminders: list[Callable[[], None]] = []

    def note(line: str) -> None:
        _say(line)
        for remind in reminders:
            remind()

    agent = NodeAgent(
        settings,
        on_note=note,
        finders=all_finders(settings),
    )
    running = asyncio.create_task(agent.run())
    loop = asyncio.get_running_loop()
    for number in heard(signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    if not is_asking:  # `potluck up &` outlives its terminal; workers inherit no handler
        loop.add_signal_handler(SIGHUP, lambda: None)
    ready = asyncio.create_task(agent.ready.wait())
    await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if not running.done():
        node = agent.credentials.node_id[:12]
        _say(f"node {node} is up on port {agent.port}; Ctrl-C takes it down")
        if native.advice():
            _say(native.advice())
        if agent.report.is_open:
            _say(
                "this cluster is open: whoever holds its secret (POTLUCK_PSK or "
                "POTLUCK_PASSPHRASE) is in; `potluck lock` closes it"
            )
        reminders += _say_who_may(agent, is_asking=is_asking)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _say_who_may(agent: NodeAgent, *, is_asking: bool) -> list[Callable[[], None]]:
    """Say who may run scripts here, as which user, and ask if the owner is to decide. Returns what
    is to be called after each further line."""
    from potluck._core.cluster.sharing.rules import who_may
    from potluck.cli.asking import Questions, read_answers

    user, called, offer = user_name(), agent.names.called, agent.offers.mine
    hints = "`potluck deny NODE`, `potluck up --run-for`"
    _say(f"members whose scripts run here, as {user}: {who_may(offer, called)} ({hints})")
    if offer.rule == "ask" and not is_asking:
        _say(
            "nobody can be asked here (no terminal in the foreground): scripts of other members "
            "run after `potluck allow NODE`, or of all with `potluck up --run-for all`"
        )
    if limits := agent.report.limits:
        _say(f"jobs get {limits} here")
    if offer.is_paused:
        _say("paused: this machine runs no workers until `potluck resume`")
    if not is_asking:
        return []
    questions = Questions(agent.offers, called, user, _say)
    agent.offers.listeners.append(questions.look)
    questions.look()
    read_answers(questions.answer)
    return [questions.remind]
