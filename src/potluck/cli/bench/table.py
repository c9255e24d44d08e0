"""The table of a comparison as text, line by line while it is measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck._core.optional import require
from potluck.cli.bench.machine import heading

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse(text: str) -> int:
    """The bytes that ``text`` means: 65536 for ``"64KiB"``; a number without a unit is bytes.
    ValueError unless it is a positive multiple of 4, the size of a float32."""
    number, factor = text.strip(), 1
    for unit, bytes_of_one in sorted(UNITS.items(), key=lambda item: -len(item[0])):
        if number.lower().endswith(unit.lower()):
            number, factor = number[: -len(unit)], bytes_of_one
            break
    try:
        nbytes = float(number) * factor
    except ValueError:
        raise ValueError(f"{text!r} is not a size; write 4KiB, 1MiB or 4096") from None
    if nbytes <= 0 or nbytes % 4:
        raise ValueError(f"{text}: a positive multiple of 4 bytes (one float32) is needed")
    return int(nbytes)


def show(nbytes: int) -> str:
    """The text of a size: ``"64 KiB"`` for 65536."""
    for unit, factor in sorted(UNITS.items(), key=lambda item: -item[1]):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return "0 B"


def show_seconds(seconds: float) -> str:
    """The text of a time with three digits: ``"340 us"`` for 0.00034."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * factor:
            figure = seconds / factor
            return f"{figure:.3g} {unit}" if figure < 1000 else f"{figure:.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"


EXPLANATION = """\
Times are medians over rounds, of the slowest worker; "(2.0x)": that peer takes 2.0 times as long.
bus: bus bandwidth as nccl-tests defines it. CPU: CPU seconds of all workers per GB of data.
model: the time that the cost model gives the first peer, where that goes over links.
best/1st: the fastest other library's time over the first column's; above 1, the first is faster.
"""


class Table:
    """A table with a column for each peer; the others are compared with the first."""

    def __init__(self, peers: Sequence[str]) -> None:
        self._first, *self._rest = peers
        self._rivals = [name for name in self._rest if not name.startswith("potluck")]

    def head(self) -> str:
        """The line of column titles."""
        text = f"{'operation':<14}{'workers':>7}{'size':>9}{self._first:>15}{'model':>11}"
        text += f"{'bus GB/s':>10}{'CPU s/GB':>10}"
        text += "".join(f"{name:>19}" for name in self._rest)
        if self._rivals:
            text += f"{'best/1st':>10}{'its CPU':>9}"
        return text

    def line(self, row: Mapping[str, Any]) -> str:
        """The line of one row of a result."""
        peers = row["peers"]
        text = f"{row['operation']:<14}{row['world_size']:>7}{show(row['nbytes']):>9}"
        mine = peers.get(self._first)
        if mine is None:
            return f"{text}{'-':>15}"
        predicted = mine.get("predicted_s")
        text += f"{_time(mine):>15}{'-' if predicted is None else show_seconds(predicted):>11}"
        text += f"{mine['bus_bytes_per_s'] / 1e9:>10.3g}"
        text += f"{mine['cpu_s_per_gb']:>10.3g}"
        for name in self._rest:
            cell = peers.get(name)
            shown = "-" if cell is None else f"{_time(cell)} ({_times(ratio(cell, mine))})"
            text += f"{shown:>19}"
        best = best_of(row, self._rivals)
        if best is not None:
            text += f"{ratio(best, mine):>10.2f}{best['cpu_s_per_gb']:>9.3g}"
        return text

    def foot(self, result: Mapping[str, Any]) -> str:
        """The lines below the table: each peer's version, its memory, the peers left out, the
        load."""
        lines = [f"{name}: {text}" for name, text in result["peers"].items()]
        for row in result["rows"]:
            held = {name: cell.get("memory_bytes") for name, cell in row["peers"].items()}
            if any(count is not None for count in held.values()):
                shown = ", ".join(
                    f"{name} {count / (1 << 20):.1f} MiB"
                    for name, count in held.items()
                    if count is not None
                )
                lines.append(
                    f"memory above the buffers, per worker, {row['operation']}, "
                    f"{row['world_size']} workers, {show(row['nbytes'])}: {shown}"
                )
        lines += [f"left out: {name}: {why}" for name, why in result["left_out"].items()]
        hops = [row["core_to_core_s"] for row in result["rows"] if row.get("core_to_core_s")]
        if hops:
            near, far = f"{min(hops) * 1e9:.0f}", f"{max(hops) * 1e9:.0f}"
            lines.append(f"from core to core: {near} ns{f' to {far} ns' if far != near else ''}")
        after = result["machine"].get("load_after")
        if after is not None:
            lines.append(f"load after: {after:g}")
        wrapped = [textwrap.fill(line, 100, subsequent_indent="  ") for line in lines]
        return "\n".join([EXPLANATION, *wrapped])


def best_of(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """The cell of the fastest of the peers ``names``; None if none of them has this operation."""
    cells: list[dict[str, Any]] = [row["peers"][name] for name in names if name in row["peers"]]
    return min(cells, key=lambda cell: float(cell["median_s"]), default=None)


def ratio(other: Mapping[str, Any], mine: Mapping[str, Any]) -> float:
    """The median time of ``other`` divided by that of ``mine``."""
    return float(other["median_s"] / mine["median_s"])


def is_right(result: Mapping[str, Any]) -> bool:
    """Whether all results were correct, with the same bits on all ranks."""
    return all(cell["correct"] for row in result["rows"] for cell in row["peers"].values())


def _times(factor: float) -> str:
    return f"{factor:.0f}x" if factor >= 100 else f"{factor:.2g}x"


def _time(cell: Mapping[str, Any]) -> str:
    return show_seconds(cell["median_s"]) + ("" if cell["correct"] else " WRONG")


_COLORS = {
    "potluck": "#c2410c",
    "potluck-tls": "#0e7490",
    "potluck-python": "#d9a05b",
    "potluck-bf16": "#db2777",
    "potluck-int8": "#9f1239",
    "gloo": "#1d4ed8",
    "mpi": "#4d7c0f",
    "mlx": "#7e22ce",
}
_OTHER_COLORS = ("#be185d", "#78716c", "#0f172a")


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Write the figure to ``file``, whose suffix chooses the format. It has a column of panels for
    each operation and number of workers: time and bus bandwidth over the size, with log axes.

    MissingDependency without matplotlib.
    """
    require("matplotlib", "bench")
    from matplotlib.figure import Figure

    rows = result["rows"]
    columns = list(dict.fromkeys((row["operation"], row["world_size"]) for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    others = iter(_OTHER_COLORS * len(names))
    colors = {name: _COLORS.get(name) or next(others) for name in names}
    figure = Figure(figsize=(1.5 + 4.2 * len(columns), 7.2), layout="constrained")
    panels = figure.subplots(2, len(columns), squeeze=False, sharex="col", sharey="row")
    for (operation, world_size), upper, lower in zip(columns, *panels, strict=True):
        here = [
            row for row in rows if (row["operation"], row["world_size"]) == (operation, world_size)
        ]
        for name in names:
            has = [row for row in here if name in row["peers"]]
            sizes = [row["nbytes"] for row in has]
            cells = [row["peers"][name] for row in has]
            width = 2.4 if name == "potluck" else 1.3
            for axes, values in (
                (upper, [cell["median_s"] * 1e6 for cell in cells]),
                (lower, [cell["bus_bytes_per_s"] / 1e9 for cell in cells]),
            ):
                axes.plot(sizes, values, "o-", color=colors[name], label=name, lw=width, ms=4)
        ticks = [row["nbytes"] for row in here]
        upper.set_title(f"{operation}, {world_size} workers")
        for axes in (upper, lower):
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(ticks, [show(nbytes) for nbytes in ticks], rotation=35, ha="right")
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.yaxis.set_major_formatter("{x:g}")
        lower.set_xlabel("size of the data")
    panels[0][0].set_ylabel("time of one call (µs)")
    panels[1][0].set_ylabel("bus bandwidth (GB/s)")
    panels[0][0].legend(frameon=False)
    figure.supxlabel(heading(result["machine"]), fontsize=6, color="#555555")
    figure.savefig(file, dpi=130)
