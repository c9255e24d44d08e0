"""The same figures as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import report, sizes
from potluck.optional import require

COLORS = {"gloo": "#888888", "potluck-tls": "#0e7490", "potluck": "#c2410c"}


def draw(result: dict[str, Any], file: Path) -> None:
    """One panel per number of processes: milliseconds over bytes, both axes logarithmic.

    Raises MissingDependency without matplotlib. The file's ending chooses the format.
    """
    require("matplotlib", "bench")
    from matplotlib.figure import Figure

    rows = result["rows"]
    worlds = sorted({row["world_size"] for row in rows})
    figure = Figure(figsize=(5 * len(worlds), 4), layout="constrained")
    for axes, world in zip(
        figure.subplots(1, len(worlds), squeeze=False, sharey=True)[0], worlds, strict=True
    ):
        here = [row for row in rows if row["world_size"] == world]
        ticks = [row["nbytes"] for row in here]
        for name, color in COLORS.items():
            if name in here[0]:
                times = [row[name]["median_s"] * 1e3 for row in here]
                axes.plot(ticks, times, "o-", label=name, color=color)
        axes.set(xscale="log", yscale="log", title=f"{world} processes")
        axes.set_xticks(ticks, [sizes.show(nbytes) for nbytes in ticks], rotation=30)
        axes.set(xlabel="buffer", ylabel="milliseconds per all-reduce")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(report.heading(result["machine"]).replace("\n", "; "), fontsize=6)
    figure.savefig(file, dpi=150)
