"""The figure of ``slow_networks.py``: the efficiency of each strategy, by network and hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.timed import GLOO, OURS
from potluck.cli.bench.machine import heading

EVERY_STEP, ROUNDS, GLOO_BLUE = ("#7a5c3e", "#a67c52", "#c8a27c"), "#c2410c", "#1d4ed8"
HIERARCHICAL = "#3f7d4e"
_ROUNDS = ("local-sgd", "diloco", "sparse")
_APART = 4.5
"""Between two labels, in percent."""


def draw(result: Mapping[str, Any], kinds: Mapping[str, Any], file: Path) -> None:
    """A panel for each number of hosts, a line for each strategy from fast networks to slow ones;
    of the model of 25 M parameters, if it was measured, and of one worker on each host."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row.get("workers_per_host", 1) == 1]
    rows = [row for row in rows if row["size"] == "25m"] or rows or result["rows"]
    networks = [key for key in kinds if any(row["network"] == key for row in rows)]
    counts = sorted({row["hosts"] for row in rows})
    figure = Figure(figsize=(5.6 * len(counts), 5.0), layout="constrained")
    [panels] = figure.subplots(1, len(counts), squeeze=False, sharey=True)
    for axes, count in zip(panels, counts, strict=True):
        here = [row for row in rows if row["hosts"] == count]
        labels = {}
        for name in (*GLOO, *OURS):
            points = {
                networks.index(row["network"]): row["efficiency"] * 100
                for row in here
                if row["strategy"] == name
            }
            if not points:
                continue
            places = sorted(points)
            color, width, dashes = _look(name)
            # A gap where a network was not measured.
            values = [points.get(each, math.nan) for each in range(len(networks))]
            axes.plot(values, dashes, color=color, lw=width, marker="o", ms=3)
            labels[name] = points[places[-1]], places[-1], color
        for row in here:
            if row.get("is_choice"):
                place, height = networks.index(row["network"]), row["efficiency"] * 100
                axes.plot(place, height, "*", color="black", ms=11, zorder=3)
        asked = [(networks.index(key), kinds[key].reach) for key in networks if kinds[key].reach]
        axes.plot(*zip(*((at, y * 100) for at, y in asked), strict=True), "_", color="#555", ms=22)
        _label(axes, labels, len(networks) - 1)
        names = [kinds[key].name.replace(", ", "\n") for key in networks]
        axes.set_xticks(range(len(networks)), names)
        axes.set_xlim(-0.2, len(networks) + 0.3)
        axes.set_ylim(0, 106)
        axes.tick_params(labelsize=8)
        axes.set_title(f"{count} hosts", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("efficiency: computation in % of a step", fontsize=9)
    note = "computation is timed waits; star: the plan's choice; bar: what was asked"
    figure.supxlabel(f"{note}\n{heading(result['machine'])}", fontsize=6, color="#555555")
    figure.savefig(file, dpi=130)


def _look(name: str) -> tuple[str, float, str]:
    """The color, width and dashes of a line."""
    if name in GLOO:
        return GLOO_BLUE, 1.3, ("-", "--", ":")[list(GLOO).index(name)]
    if name == "hierarchical":
        return HIERARCHICAL, 1.3, "-"
    if name in _ROUNDS:
        return ROUNDS, 1.8, ("-.", "-", "--")[_ROUNDS.index(name)]
    place = [each for each in OURS if each != "hierarchical"].index(name)
    return EVERY_STEP[place % 3], 1.2, ("-", "--")[place // 3 % 2]


def _label(axes: Any, labels: Mapping[str, tuple[float, int, str]], last: int) -> None:
    """The name of each line behind its end: in a column at the right, none over another."""
    lowest = -_APART
    for name, (height, place, color) in sorted(labels.items(), key=lambda item: item[1][0]):
        lowest = max(height, lowest + _APART)
        axes.annotate(
            name,
            xy=(place, height),
            xytext=(last + 0.25, lowest),
            color=color,
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.4, "alpha": 0.6},
        )
