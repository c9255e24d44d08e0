"""The table of a comparison as text, line by line while it is measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from potluck.cli.bench.sizes import show, show_seconds

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
