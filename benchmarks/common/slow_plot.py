"""The figure of ``slow_networks.py``: the efficiency of each strategy, by network and hosts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.timed import GLOO
from potluck.bench.machine import heading

OURS_COLOR, GLOO_COLOR, AUTO_COLOR = "#e2a27e", "#1d4ed8", "#c2410c"


def draw(result: Mapping[str, Any], kinds: Mapping[str, Any], file: Path) -> None:
    """A panel for each network and number of hosts, a bar for each strategy; of the model of 25 M
    parameters, if it was measured."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    rows = [row for row in rows if row["size"] == "25m"] or rows
    networks = [key for key in kinds if any(row["network"] == key for row in rows)]
    counts = sorted({row["hosts"] for row in rows})
    names = list(dict.fromkeys(row["strategy"] for row in rows))[::-1]
    size = (1.6 + 3.1 * len(networks), 1.0 + 0.27 * len(names) * len(counts))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(counts), len(networks), squeeze=False, sharex=True, sharey=True)
    for panel, count in zip(panels, counts, strict=True):
        for axes, key in zip(panel, networks, strict=True):
            found = [row for row in rows if (row["network"], row["hosts"]) == (key, count)]
            here = {row["strategy"]: row["efficiency"] * 100 for row in found}
            chosen = {row["strategy"] for row in found if row.get("is_choice")}
            values = [here.get(name, 0.0) for name in names]
            colors = [
                GLOO_COLOR if name in GLOO else AUTO_COLOR if name in chosen else OURS_COLOR
                for name in names
            ]
            bars = axes.barh(names, values, color=colors, height=0.7)
            labels = [f"{here[name]:.3g}%" if name in here else "" for name in names]
            axes.bar_label(bars, labels, padding=2, fontsize=7)
            if kinds[key].reach is not None:
                axes.axvline(kinds[key].reach * 100, color="#555555", lw=0.8, ls=":")
            axes.set_xlim(0, 118)
            axes.set_xticks([0, 25, 50, 75, 100])
            axes.tick_params(labelsize=8)
            axes.set_title(f"{kinds[key].name}\n{count} hosts", fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    note = "efficiency in % (computation is timed waits); strong: the plan's choice; dotted: asked"
    figure.supxlabel(f"{note}\n{heading(result['machine'])}", fontsize=6, color="#555555")
    figure.savefig(file, dpi=130)
