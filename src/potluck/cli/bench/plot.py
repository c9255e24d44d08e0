"""The figure of a comparison, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from potluck._core.optional import require
from potluck.cli.bench.machine import heading
from potluck.cli.bench.sizes import show

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
