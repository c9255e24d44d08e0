"""The command line ``potluck``: all commands, with the examples in their help."""

from __future__ import annotations

import copy
import errno
import io
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command_name
from typer.models import CommandInfo

from potluck._core import hints
from potluck._core.system import need_posix
from potluck.cli.bench.command import bench
from potluck.cli.clean import clean
from potluck.cli.data import data
from potluck.cli.doctor import doctor
from potluck.cli.federated import app as federated
from potluck.cli.fetch import fetch
from potluck.cli.init import init
from potluck.cli.job_display import silence
from potluck.cli.jobs import attach, cancel, jobs, logs, rerun, wait
from potluck.cli.join import join
from potluck.cli.launch.command import app as launch
from potluck.cli.owner_commands import allow, continue_, deny, pause, resume
from potluck.cli.pair import pair
from potluck.cli.plan import plan
from potluck.cli.roster import nodes
from potluck.cli.run import run
from potluck.cli.services import services
from potluck.cli.status import status
from potluck.cli.terminal import say
from potluck.cli.trust import admit, ban, lock, rotate, unban
from potluck.cli.up import up
from potluck.errors import PotluckError


class _Group(TyperGroup):
    """All commands. A PotluckError is one line on stderr, and exit code 2. An option of other
    launchers gets potluck's word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PotluckError as error:
            say(f"potluck: {error}", err=True)
            raise typer.Exit(2) from None
        except Exception as error:
            hints.of_option(error)
            raise


class _Commands(typer.Typer):
    """The application. A full disk is one line on stderr, and exit code 1."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _open_closed_streams()
        app = self if args or kwargs else self.only(*sys.argv[1:2])
        try:
            return typer.Typer.__call__(app, *args, **kwargs)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            where = f" (writing {error.filename})" if error.filename else ""
            silence(sys.stdout)  # its buffer can't be written at exit either
            print(
                f"potluck: {error.strerror}{where}; make room or write elsewhere", file=sys.stderr
            )
            sys.exit(1)

    def only(self, name: str = "") -> _Commands:
        """The application with the command ``name`` alone, if there is one: typer reads the
        signatures of all commands that it is given, which takes 15 ms."""
        commands = [each for each in self.registered_commands if _name_of(each) == name]
        if not commands:
            return self
        one = copy.copy(self)
        one.registered_commands, one.registered_groups = commands, []
        return one


def _name_of(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.name or get_command_name(command.callback.__name__)


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that this process was started without
    (``>&-``).

    Python leaves such a stream None, and the next file or socket would get its descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


app = _Commands(
    name="potluck",
    cls=_Group,
    help="Train on the machines you already own.",
    epilog="Begin with: potluck run --workers 4 train.py",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    context_settings={"allow_interspersed_args": False},
    epilog=(
        "Examples:\n\n"
        "potluck run train.py\n\n"
        "potluck run --workers 4 train.py --epochs 3 --lr 0.1\n\n"
        "potluck run --workers 4 -m pkg.train --epochs 3\n\n"
        'potluck run --workers 4 --chaos "kill rank 2 at step 60" train.py'
    ),
)(run)
app.command(
    context_settings={"allow_interspersed_args": False},
    epilog=(
        "Examples:\n\n"
        "potluck plan train.py\n\n"
        "potluck plan --workers 2 --json plan.json train.py --lr 0.1\n\n"
        "potluck plan --json - train.py"
    ),
)(plan)
app.command(
    epilog=(
        "Examples:\n\n"
        "potluck bench all-reduce\n\n"
        "potluck bench all-reduce --workers 2,4,8 --sizes 4KiB,1MiB --plot all-reduce.png\n\n"
        "potluck bench broadcast --against gloo,mpi --json broadcast.json\n\n"
        "potluck bench compress --json compress.json"
    ),
)(bench)
app.add_typer(federated)
app.add_typer(launch)
app.command(epilog="Examples:\n\npotluck init\n\npotluck init --json")(init)
app.command(epilog="Examples:\n\npotluck pair\n\npotluck pair --minutes 1 --port 52420")(pair)
app.command(
    epilog=(
        "Examples:\n\n"
        "potluck join\n\n"
        "potluck join --address 192.168.1.20:41234\n\n"
        "echo 274-831-927 | potluck join --yes"
    )
)(join)
app.command(epilog="Examples:\n\npotluck nodes\n\npotluck nodes --json")(nodes)
app.command(epilog='Examples:\n\npotluck ban attic\n\npotluck ban 3f2a91c0 --reason "sold"')(ban)
app.command(epilog="Example:\n\npotluck unban attic")(unban)
app.command(epilog="Examples:\n\npotluck admit attic --admin\n\npotluck admit attic --days 30")(
    admit
)
app.command(epilog="Example:\n\npotluck lock")(lock)
app.command(
    epilog=(
        "Examples:\n\n"
        "potluck up\n\n"
        "potluck up --run-for attic,3f2a91c0\n\n"
        "potluck up --peers attic.local,192.168.1.20"
    )
)(up)
app.command(epilog="Examples:\n\npotluck allow attic\n\npotluck allow 3f2a91c0")(allow)
app.command(epilog="Examples:\n\npotluck deny attic\n\npotluck deny 3f2a91c0")(deny)
app.command(epilog="Example:\n\npotluck pause")(pause)
app.command(epilog="Example:\n\npotluck resume")(resume)
app.command(epilog="Example:\n\npotluck rotate")(rotate)
app.command("continue", epilog="Example:\n\npotluck continue --alone")(continue_)
app.command(epilog="Examples:\n\npotluck status\n\npotluck status --json")(status)
app.command(
    epilog=(
        "Examples:\n\n"
        "potluck fetch\n\n"
        "potluck fetch sweep-14e60dab\n\n"
        "potluck fetch sweep-14e60dab --to models '*.pt'\n\n"
        "potluck fetch --remove sweep-14e60dab"
    )
)(fetch)
app.command(epilog="Examples:\n\npotluck data\n\npotluck data rm pets\n\npotluck data pin pets")(
    data
)
app.command(epilog="Examples:\n\npotluck clean --dry-run\n\npotluck clean --older-than 30")(clean)
app.command(epilog="Examples:\n\npotluck jobs\n\npotluck jobs sweep-14e6\n\npotluck jobs --json")(
    jobs
)
app.command(
    epilog=(
        "Examples:\n\n"
        "potluck logs sweep-14e6\n\n"
        "potluck logs -f --rank 1 sweep-14e6\n\n"
        "potluck logs --since 10m sweep"
    )
)(logs)
app.command(epilog="Example:\n\npotluck attach sweep-14e6")(attach)
app.command(epilog="Examples:\n\npotluck cancel sweep-14e6\n\npotluck cancel --kill sweep")(cancel)
app.command(epilog="Examples:\n\npotluck rerun sweep-14e6\n\npotluck rerun -d sweep")(rerun)
app.command(epilog="Examples:\n\npotluck wait sweep-14e6\n\npotluck wait sweep --timeout 60")(wait)
app.command(epilog="Examples:\n\npotluck services\n\npotluck services --json")(services)
app.command(epilog="Examples:\n\npotluck doctor\n\npotluck doctor --json")(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"potluck {version('potluck')}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train on the machines you already own."""
    for stream in (sys.stdout, sys.stderr):
        # Workers may write characters that the terminal can't encode.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if context.invoked_subcommand != "doctor":
        need_posix(f"potluck {context.invoked_subcommand}")


if __name__ == "__main__":
    app(prog_name="potluck")
