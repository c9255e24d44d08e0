"""Tables, the machine they were taken on, and dated result files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import sizes

PACKAGES = ("potluck", "torch", "numpy", "cryptography")


def machine() -> dict[str, Any]:
    """What a reader must know to compare: no host name, no path."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": cores,
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": commit(),
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for text in cpuinfo.read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def commit() -> str:
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()


def heading(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return (
        f"{facts['date']}, {facts['processor']}, {facts['cores']} cores, {facts['system']}\n"
        f"Python {facts['python']}, {versions}, commit {facts['commit']}"
    )


def line(row: dict[str, Any], *, first: bool) -> str:
    """One row of the table, with the table's head in front of the first."""
    peers = [name for name, cell in row.items() if isinstance(cell, dict)]
    head = f"{'processes':>9}{'size':>10}"
    text = f"{row['world_size']:>9}{sizes.show(row['nbytes']):>10}"
    for name in peers:
        wrong = "" if row[name]["correct"] else " WRONG"
        head += f"{name + ' ms':>16}{'max error':>11}"
        text += f"{row[name]['median_s'] * 1e3:>16.3f}{row[name]['max_error']:>11.1e}{wrong}"
    for name in peers:
        if name != "gloo" and "gloo" in row:
            head += f"{'gloo/' + name:>18}"
            text += f"{row['gloo']['median_s'] / row[name]['median_s']:>18.2f}"
    return f"\n{head}\n{text}" if first else text


def explanation() -> str:
    return (
        "\nMedian milliseconds per call of the slowest rank; max error against a float64 sum."
        "\ngloo/X: Gloo's time over X's; above 1, X is faster."
    )


def save(result: dict[str, Any], folder: Path) -> Path:
    """Write ``DATE-BENCHMARK.json`` and the same table as text beside it; never overwrite."""
    folder.mkdir(exist_ok=True)
    stem = f"{result['machine']['date']}-{result['benchmark']}"
    number = 1
    while (path := folder / f"{stem}{f'-{number}' if number > 1 else ''}.json").exists():
        number += 1
    path.write_text(json.dumps(result, indent=1) + "\n")
    lines = [line(row, first=index == 0) for index, row in enumerate(result["rows"])]
    table = "\n".join([heading(result["machine"]), *lines, explanation()])
    path.with_suffix(".txt").write_text(table + "\n")
    return path
