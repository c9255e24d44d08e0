"""The figure of ``time_to_loss.py``: validation loss over the time of training, by network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.loss_tasks import TASKS
from common.loss_worker import GLOO
from common.networks import KINDS
from potluck.cli.bench.machine import heading

_GLOO_COLOR = "#1d4ed8"
_COLORS = ("#c2410c", "#15803d", "#7c3aed", "#b45309", "#0e7490")


def draw(result: Mapping[str, Any], file: Path) -> None:
    """A panel for each task and network, a line for each strategy, of its first seed."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    networks = list(dict.fromkeys(row["network"] for row in rows))
    names = list(dict.fromkeys(row["strategy"] for row in rows if row["strategy"] != GLOO))
    colors = dict(zip(names, _COLORS, strict=False)) | {GLOO: _GLOO_COLOR}
    size = (1.0 + 3.6 * len(networks), 1.0 + 2.7 * len(tasks))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(tasks), len(networks), squeeze=False, sharey="row")
    for panel, task in zip(panels, tasks, strict=True):
        for axes, key in zip(panel, networks, strict=True):
            for row in rows:
                if (row["task"], row["network"]) != (task, key):
                    continue
                name = row["strategy"]
                _, seconds, losses = zip(*row["curves"][0], strict=True)
                axes.plot(seconds, losses, color=colors[name], lw=1.2, label=name)
            axes.axhline(TASKS[task].target, color="#555555", lw=0.8, ls=":")
            axes.set_xscale("log")
            axes.tick_params(labelsize=8)
            axes.set_title(f"{TASKS[task].title}\n{KINDS[key].name}", fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        panel[0].set_ylabel("validation loss", fontsize=8)
    panels[0][0].legend(fontsize=7, frameon=False)
    note = (
        "seconds of training on 2 hosts; dotted: the loss to reach. Gloo below 1 Gbit/s: losses "
        "of 1 Gbit/s, at the measured time of a step"
    )
    figure.supxlabel(f"{note}\n{heading(result['machine'])}", fontsize=6, color="#555555")
    figure.savefig(file, dpi=130)
