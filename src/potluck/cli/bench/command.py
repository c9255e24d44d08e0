"""``potluck bench``: measure a collective of potluck and of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli.terminal import check_writable, write_json
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck.cli.bench.comparison import ComparisonPlan
    from potluck.cli.bench.placement import Here

_MAX_WORKERS = 64
_SIZES = "4KiB,64KiB,1MiB,16MiB,100MiB"


def bench(
    operation: Annotated[
        str,
        typer.Argument(
            metavar="OPERATION",
            help="all-reduce, reduce-scatter, all-gather, broadcast, reduce or all-to-all; or "
            "compress: the compressors on one core, next to torch, on the first of --sizes "
            "(26 million elements if it is not given).",
            show_default=False,
        ),
    ],
    against: Annotated[
        str,
        typer.Option(
            help="Peers to compare with, separated by commas: gloo, mpi, mlx; potluck with other "
            "settings: potluck-tls (no shared memory), potluck-python (no native core), "
            "potluck-bf16, potluck-int8 (compressed), "
            "potluck-ring, potluck-hierarchical (always that algorithm); or none.",
        ),
    ] = "gloo,mpi,mlx",
    workers: Annotated[
        str,
        typer.Option(help="Numbers of workers on this machine, separated by commas."),
    ] = "2,4",
    peers: Annotated[
        str,
        typer.Option(
            help="Measure between machines, with one worker on each: the host:port of all "
            "machines, separated by commas. Run the same command on every machine, each with its "
            "own --rank.",
            show_default=False,
        ),
    ] = "",
    rank: Annotated[
        int, typer.Option(help="With --peers: the index of this machine in that list, from 0.")
    ] = 0,
    sizes: Annotated[
        str,
        typer.Option(help="Sizes of the float32 data, separated by commas: 4KiB, 1MiB, or bytes."),
    ] = _SIZES,
    rounds: Annotated[int, typer.Option(help="Rounds per size and peer; figures are medians.")] = 7,
    round_seconds: Annotated[float, typer.Option(help="Seconds that a round takes, about.")] = 0.1,
    json: Annotated[
        Path | None,
        typer.Option(help="Write all figures to this file, as JSON.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the figures into this file (.png, .svg, .pdf); needs matplotlib.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure OPERATION on this machine or between machines, for potluck and other libraries.

    Starts the workers of all libraries, checks their results, then measures the libraries in turns:
    a round of one while the workers of the others sleep. Other load on the machine thus slows all
    libraries alike. A library that is not installed is left out, and the command that installs it
    is shown.

    Between machines (--peers) all machines must be in one cluster, and firewalls must
    let all TCP ports through: the other libraries use any free port. Gloo and MLX do not encrypt.

    The table shows the median time of one call of the slowest worker, the bus bandwidth as
    nccl-tests defines it, and CPU seconds per GB of data. The lines below the table name the engine
    and the algorithms that potluck used. Close other programs first, and compare only figures of
    the same run.

    The exit code is 1 if a library gave a wrong result.
    """
    check_writable("--json", json)
    if operation == "compress":
        _compress(sizes, rounds, json)
        return
    from potluck.cli.bench.comparison import compare
    from potluck.cli.bench.machine import heading, machine
    from potluck.cli.bench.table import Table, is_right

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
        write_json(json, result)
    if plot is not None:
        from potluck.cli.bench.table import draw

        draw(result, plot)
    raise typer.Exit(0 if is_right(result) else 1)


def _compress(sizes: str, rounds: int, json: Path | None) -> None:
    """Measure the compressors on one core."""
    from potluck.cli.bench import compression
    from potluck.cli.bench.machine import heading, machine

    if rounds < 1:
        raise ConfigurationError(f"--rounds {rounds}: at least 1 round is needed")
    count = compression.COUNT if sizes == _SIZES else _bytes_of(sizes)[0] // 4
    facts = machine()
    typer.echo(f"{heading(facts)}\n{count} float32, one core\n\n{compression.head()}")
    rows = []
    for row in compression.measure(count, rounds):
        rows.append(row)
        typer.echo(compression.line(row))
    if json is not None:
        write_json(json, {"machine": facts, "count": count, "rows": rows})


def _bytes_of(sizes: str) -> list[int]:
    from potluck.cli.bench.table import parse

    try:
        return [parse(text) for text in _names(sizes)]
    except ValueError as error:
        raise ConfigurationError(f"--sizes {error}") from None


def _plan(
    operation: str, against: str, workers: str, sizes: str, rounds: int, round_s: float
) -> tuple[ComparisonPlan, dict[str, str]]:
    """The comparison that the options describe, and for each missing library the reason."""
    from potluck.cli.bench.comparison import ComparisonPlan
    from potluck.cli.bench.operations import OPERATIONS
    from potluck.cli.bench.peers import PEERS, missing

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
    nbytes = _bytes_of(sizes)
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
    """The placement: this machine, or with ``machines`` all of them, once all have connected."""
    from potluck.cli.bench.placement import Here, OnCluster

    if not machines:
        yield Here()
        return
    typer.echo(f"machine {rank} of {len(machines)}; waiting for the others")
    with OnCluster(machines, rank) as cluster:
        yield cluster


def _agreed(
    place: Here, plan: ComparisonPlan, missing: dict[str, str]
) -> tuple[ComparisonPlan, dict[str, str]]:
    """The plan without peers that a machine lacks, or that run on a single machine only."""
    from dataclasses import replace

    from potluck.cli.bench.peers import PEERS
    from potluck.cli.bench.placement import OnCluster

    if not isinstance(place, OnCluster):
        return plan, missing
    cases = ", ".join(f"{operation} of {nbytes} bytes" for operation, nbytes in plan.cases)
    place.agree("operation, sizes, rounds", f"{cases}; {plan.rounds} of {plan.round_s:g} s")
    wanted = [*plan.peers, *missing]
    place.agree("--against", ", ".join(sorted(wanted)))
    for name in wanted:
        if PEERS[name].one_launcher:
            missing[name] = "potluck bench runs its launcher on a single machine only"
    for number, found in enumerate(place.exchange({"missing": missing})):
        for name, why in found["missing"].items():
            missing.setdefault(name, f"on machine {number}: {why}")
    return replace(plan, peers=[name for name in plan.peers if name not in missing]), missing


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _count(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= _MAX_WORKERS:
        raise ConfigurationError(
            f"--workers {text}: a number from 2 to {_MAX_WORKERS} is needed; a collective needs at "
            "least two workers"
        )
    return int(text)


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    from potluck._core.optional import require

    check_writable("--plot", path)
    require("matplotlib", "bench")
    from matplotlib.backend_bases import FigureCanvasBase

    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in endings:
        raise ConfigurationError(
            f"--plot {path}: the suffix chooses the format: {', '.join(sorted(endings))}"
        )


def _check_rank(machines: list[str], rank: int) -> None:
    if not machines and rank:
        raise ConfigurationError(f"--rank {rank} needs --peers, the list of all machines")
    if len(machines) == 1:
        raise ConfigurationError(f"--peers {machines[0]}: at least two machines are needed")
    if machines and not 0 <= rank < len(machines):
        raise ConfigurationError(
            f"--rank {rank}: the ranks of the {len(machines)} machines in --peers are 0 to "
            f"{len(machines) - 1}"
        )


def _check_memory(plan: ComparisonPlan, num_workers: int) -> None:
    """ConfigurationError if the buffers of all workers do not fit into memory at the same time.

    The workers of every library keep their buffers while the others are measured."""
    import psutil

    from potluck.cli.bench.table import show

    nbytes = max(size for _, size in plan.cases)
    needed, there = nbytes * num_workers * len(plan.peers), psutil.virtual_memory().total
    if needed > there:
        raise ConfigurationError(
            f"--sizes {show(nbytes)}: the workers would hold at least {show(needed)} together, and "
            f"this machine has {show(there)}; choose smaller sizes"
        )


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, float], None], Callable[[str], Any]]]:
    """A progress bar on terminals: a function that updates it with a text and the part (0 to 1)
    that is done, and a function that prints a line above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    if not console.is_terminal:
        yield (lambda text, part: None), typer.echo
        return
    columns = (BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn())
    # Drawing takes CPU time from the workers, so it happens twice a second only.
    options: dict[str, Any] = {"console": console, "transient": True, "refresh_per_second": 2}
    with Progress(*columns, **options) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(line: str) -> None:
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield (lambda text, part: progress.update(task, description=text, completed=part)), show
