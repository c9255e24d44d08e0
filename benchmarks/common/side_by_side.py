"""The tables of docs/performance.md, from results: potluck's figures beside the others'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from potluck.cli.bench.table import ratio, show, show_seconds

Figures = Mapping[str, Any]
NAMES = {"gloo": "Gloo", "mpi": "Open MPI", "mlx": "MLX"}
WAYS = {
    "potluck-bf16": "potluck, bf16",
    "potluck-int8": "potluck, int8",
}
EQUAL = 1.05
"""Times whose ratio is smaller are called equal: rounds differ by as much."""
MIB = 1 << 20


def one_host(result: Figures) -> str:
    """A row for each call: everybody's time, the faster library, and the CPU time."""
    others = [name for name in NAMES if name in result["peers"]]
    head = ["call", "processes", "size", "potluck", *(NAMES[name] for name in others), "faster"]
    rows = []
    for row in result["rows"]:
        mine, theirs = row["peers"]["potluck"], _only(row["peers"], others)
        times = (_time(row["peers"].get(name)) for name in ("potluck", *others))
        cpu = mine["cpu_s_per_gb"], min(cell["cpu_s_per_gb"] for cell in theirs.values())
        call = row["operation"], str(row["world_size"]), show(row["nbytes"])
        rows.append([*call, *times, faster(mine, theirs), *(f"{each:.3g}" for each in cpu)])
    return _table([*head, "CPU s per GB: potluck", "most frugal other"], rows)


def hosts(result: Figures) -> str:
    """A row for each network and size, and the times of two workers on each host."""
    networks = result["networks"]
    cells = [row["peers"] for each in networks.values() for row in each["rows"]]
    ways = [name for name in WAYS if any(name in peers for peers in cells)]
    head = ["hosts", "size", "potluck, TLS", "Gloo, clear text", "faster"]
    head += [WAYS[name] for name in ways]
    head += ["CPU s per GB: potluck", "Gloo", "memory: potluck", "Gloo"]
    rows = []
    for network, measured in networks.items():
        for row in measured["rows"]:
            pair = [row["peers"][name] for name in ("potluck-tls", "gloo")]
            rows.append(
                [
                    network.replace("gbit", " Gbit/s"),
                    show(row["nbytes"]),
                    *(_time(cell, row["nbytes"]) for cell in pair),
                    faster(pair[0], {"gloo": pair[1]}),
                    *(_time(row["peers"].get(name)) for name in ways),
                    *(f"{cell['cpu_s_per_gb']:.3g}" for cell in pair),
                    *(_memory(cell) for cell in pair),
                ]
            )
    tables = [_table(head, rows)]
    if several := result.get("several_workers"):
        seconds = {name: cell["seconds"] for name, cell in several["peers"].items()}
        where = f"2 hosts of 2 workers, 1 Gbit/s, {show(several['nbytes'])}"
        rows = [[where, *map(show_seconds, seconds.values())]]
        names = (NAMES.get(name, name.replace("-", ", ")) for name in seconds)
        tables.append(_table(["hosts", *names], rows))
    return "\n\n".join(tables)


def torch_ddp(result: Figures) -> str:
    """The milliseconds of a step."""
    kinds = ("potluck", "gloo", "hollow", "single")
    rows = [
        [
            str(row["world_size"]),
            *(_time(row[name]) for name in kinds),
            faster(row["potluck"], {"gloo": row["gloo"]}),
        ]
        for row in result["rows"]
    ]
    head = ["workers", "potluck", "Gloo", "DDP without communication", "one worker alone", "faster"]
    return _table(head, rows)


def busy(result: Figures) -> str:
    """The time of a bucket, by what the main thread does meanwhile."""
    rows = [
        [place, *(show_seconds(row[f"{how}_s"]) for how in ("idle", "busy"))]
        for place, row in result["places"].items()
    ]
    return _table(["all-reduce of 25 MiB", "main thread idle", "main thread busy"], rows)


TABLES: dict[str, Callable[[Figures], str]] = {
    "one_host": one_host,
    "hosts": hosts,
    "torch_ddp": torch_ddp,
    "busy": busy,
}
"""By the name of the part of ``run_all.py``, which is the name of the part of the page."""


def faster(mine: Figures, others: Mapping[str, Figures]) -> str:
    """The faster of potluck and the best of ``others``, with the factor; **bold** if it is not
    potluck."""
    best = min(others, key=lambda name: float(others[name]["median_s"]))
    factor = ratio(others[best], mine)
    if factor >= EQUAL:
        return f"potluck, {factor:.2g}x"
    return "equal" if factor > 1 / EQUAL else f"**{NAMES[best]}, {1 / factor:.2g}x**"


def _only(peers: Mapping[str, Figures], names: Sequence[str]) -> dict[str, Figures]:
    return {name: peers[name] for name in names if name in peers}


def _time(cell: Figures | None, nbytes: int = 0) -> str:
    if cell is None:
        return "-"
    rate = f" ({cell['bus_bytes_per_s'] * 8 / 1e9:.3f} Gbit/s)" if nbytes >= MIB else ""
    return show_seconds(cell["median_s"]) + rate


def _memory(cell: Figures) -> str:
    held = cell.get("memory_bytes")
    return "-" if held is None else f"{held / MIB:.1f} MiB"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles, *lines = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([titles, f"|{'---|' * len(head)}", *lines])
