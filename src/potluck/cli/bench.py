"""``potluck bench``: how fast collectives are here, next to other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli.files import as_json, check_writable
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck.bench.comparison import ComparisonPlan
    from potluck.bench.placement import Here

_MAX_WORKERS = 64


def bench(
    operation: Annotated[
        str,
        typer.Argument(
            metavar="OPERATION",
            help="all-reduce, reduce-scatter, all-gather, broadcast, reduce or all-to-all.",
            show_default=False,
        ),
    ],
    against: Annotated[
        str,
        typer.Option(
            help="Whom to measure next to potluck, with commas: gloo, mpi, mlx; or potluck in "
            "another way: potluck-tls (no shared memory), potluck-python (no native core), "
            "potluck-plain (not encrypted), potluck-bf16, potluck-int8 (compressed), potluck-ring, "
            "potluck-hierarchical (always that algorithm); or none.",
        ),
    ] = "gloo,mpi,mlx",
    workers: Annotated[
        str,
        typer.Option(help="How many workers on this machine: a number, or several with commas."),
    ] = "2,4",
    peers: Annotated[
        str,
        typer.Option(
            help="Measure between machines instead, one worker on each: their host:port, with "
            "commas. Start the same command on all, each with its own --rank.",
            show_default=False,
        ),
    ] = "",
    rank: Annotated[
        int, typer.Option(help="With --peers: which of them this machine is, from 0.")
    ] = 0,
    sizes: Annotated[
        str,
        typer.Option(help="Sizes of the data, float32, with commas: 4KiB, 1MiB, or bytes."),
    ] = "4KiB,64KiB,1MiB,16MiB,100MiB",
    rounds: Annotated[int, typer.Option(help="Rounds per size and peer; figures are medians.")] = 7,
    round_seconds: Annotated[float, typer.Option(help="About how long one round takes.")] = 0.1,
    json: Annotated[
        Path | None,
        typer.Option(help="Write all figures to this file, as JSON.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw them into this file (.png, .svg, .pdf); needs matplotlib.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure OPERATION, here or between machines: potluck and other libraries side by side.

    Starts the workers of all libraries by itself, checks that each one's results are right, then
    times them in turns: a round of one, a round of the next, and so on, while the others sleep.
    What else the machine does so hits all alike. A library that is not installed is named, with
    the command that installs it, and left out.

    Between machines (--peers) all must hold the same cluster secret, and firewalls must let any
    port through: the other libraries take free ones. Gloo and MLX do not encrypt.

    The table shows the median time of one call of the slowest worker, the bus bandwidth as
    nccl-tests defines it, and CPU seconds per GB of data. Below it stands which engine and which
    algorithm potluck used. Close other programs first; compare figures of one run only.

    The exit code is 1 if a library gave a wrong result.
    """
    from potluck.bench.comparison import compare
    from potluck.bench.machine import heading, machine
    from potluck.bench.table import Table, is_right

    check_writable("--json", json)
    _check_plot(plot)
    machines = _names(peers)
    _check_rank(machines, rank)
    workers = str(len(machines)) if machines else workers
    plan, missing = _plan(operation, against, workers, sizes, rounds, round_seconds)
    _check_memory(plan, num_workers=1 if machines else max(plan.world_sizes))
    typer.echo(heading(machine()))
    with _place(machines, rank) as place:
        plan, missing = _agreed(place, plan, missing)
        for name, why in missing.items():
            typer.echo(f"left out: {name}: {why}")
        table = Table(plan.peers)
        typer.echo(f"\n{table.head()}")
        with _progress() as (report, show):
            result = compare(
                plan,
                placement=place,
                report=report,
                on_row=lambda row: show(table.line(row)),
            )
    result["left_out"] |= missing
    typer.echo(f"\n{table.foot(result)}")
    if json is not None:
        json.write_bytes(as_json(result) + b"\n")
    if plot is not None:
        from potluck.bench.plot import draw

        draw(result, plot)
    raise typer.Exit(0 if is_right(result) else 1)


def _plan(
    operation: str, against: str, workers: str, sizes: str, rounds: int, round_s: float
) -> tuple[ComparisonPlan, dict[str, str]]:
    """The comparison that was asked for, and why each missing library can't take part in it."""
    from potluck.bench.comparison import ComparisonPlan
    from potluck.bench.operations import OPERATIONS
    from potluck.bench.peers import PEERS, missing
    from potluck.bench.sizes import parse

    if operation not in OPERATIONS:
        raise ConfigurationError(
            f"{operation!r} can't be measured; choose from {', '.join(OPERATIONS)}"
        )
    peers, absent = ["potluck"], {}
    for name in _names("" if against == "none" else against):
        if name not in PEERS:
            choices = ", ".join(each for each in PEERS if each != "potluck")
            raise ConfigurationError(f"--against {name}: unknown; choose from {choices}, or none")
        why = missing(PEERS[name])
        if why:
            absent[name] = why
        elif name not in peers:
            peers.append(name)
    counts = [_count(text) for text in _names(workers)]
    try:
        nbytes = [parse(text) for text in _names(sizes)]
    except ValueError as error:
        raise ConfigurationError(f"--sizes {error}") from None
    if not counts or not nbytes:
        raise ConfigurationError("--workers and --sizes need at least one value each")
    if min(nbytes) < 4 * max(counts):
        raise ConfigurationError(
            f"--sizes: {min(nbytes)} bytes are less than one float32 for each of "
            f"{max(counts)} workers"
        )
    if rounds < 1 or not 0 < round_s <= 60:
        raise ConfigurationError(
            f"--rounds {rounds}, --round-seconds {round_s:g}: at least 1 round, of above 0 and at "
            "most 60 seconds"
        )
    plan = ComparisonPlan(
        peers=peers,
        world_sizes=counts,
        cases=[(operation, size) for size in nbytes],
        rounds=rounds,
        round_s=round_s,
    )
    return plan, absent


@contextmanager
def _place(machines: list[str], rank: int) -> Iterator[Here]:
    """This machine, or this machine among others once all have come."""
    from potluck.bench.placement import Here, OnCluster

    if not machines:
        yield Here()
        return
    typer.echo(f"machine {rank} of {len(machines)}; waiting for the others")
    with OnCluster(machines, rank) as cluster:
        yield cluster


def _agreed(
    place: Here, plan: ComparisonPlan, missing: dict[str, str]
) -> tuple[ComparisonPlan, dict[str, str]]:
    """The plan without the peers that another machine lacks, or that one machine only can run."""
    from dataclasses import replace

    from potluck.bench.peers import PEERS
    from potluck.bench.placement import OnCluster

    if not isinstance(place, OnCluster):
        return plan, missing
    cases = ", ".join(f"{operation} of {nbytes} bytes" for operation, nbytes in plan.cases)
    place.agree("operation, sizes, rounds", f"{cases}; {plan.rounds} of {plan.round_s:g} s")
    wanted = [*plan.peers, *missing]
    place.agree("--against", ", ".join(sorted(wanted)))
    for name in wanted:
        if PEERS[name].one_launcher:
            missing[name] = "its launcher is for one machine here"
    for number, found in enumerate(place.exchange({"missing": missing})):
        for name, why in found["missing"].items():
            missing.setdefault(name, f"on machine {number}: {why}")
    return replace(plan, peers=[name for name in plan.peers if name not in missing]), missing


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _count(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= _MAX_WORKERS:
        raise ConfigurationError(
            f"--workers {text}: a number from 2 to {_MAX_WORKERS} is needed; one worker has nobody "
            "to talk to"
        )
    return int(text)


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    from potluck.optional import require

    check_writable("--plot", path)
    require("matplotlib", "bench")
    from matplotlib.backend_bases import FigureCanvasBase

    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in endings:
        raise ConfigurationError(
            f"--plot {path}: the ending says the format; choose from {', '.join(sorted(endings))}"
        )


def _check_rank(machines: list[str], rank: int) -> None:
    if not machines and rank:
        raise ConfigurationError(f"--rank {rank}: which machines there are is for --peers to say")
    if len(machines) == 1:
        raise ConfigurationError(f"--peers {machines[0]}: at least two machines are needed")
    if machines and not 0 <= rank < len(machines):
        raise ConfigurationError(
            f"--rank {rank}: with {len(machines)} machines in --peers the last is "
            f"{len(machines) - 1}; the first is 0"
        )


def _check_memory(plan: ComparisonPlan, num_workers: int) -> None:
    """Every worker of every library holds its data while the others are measured."""
    import psutil

    from potluck.bench.sizes import show

    nbytes = max(size for _, size in plan.cases)
    needed, there = nbytes * num_workers * len(plan.peers), psutil.virtual_memory().total
    if needed > there:
        raise ConfigurationError(
            f"--sizes {show(nbytes)}: the workers would hold at least {show(needed)} together, and "
            f"this machine has {show(there)}; choose smaller sizes"
        )


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, float], None], Callable[[str], Any]]]:
    """What to call with a text and a part of the whole, and what prints a line above the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    if not console.is_terminal:
        yield (lambda text, part: None), typer.echo
        return
    columns = (BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn())
    # Drawing takes time from the workers: twice a second is often enough.
    options: dict[str, Any] = {"console": console, "transient": True, "refresh_per_second": 2}
    with Progress(*columns, **options) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(line: str) -> None:
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield (lambda text, part: progress.update(task, description=text, completed=part)), show
