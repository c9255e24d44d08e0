"""A description of the machine that was measured, without host names and paths."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from potluck._core import native
from potluck._core.optional import installed
from potluck._core.system import processor_name, usable_cpus

PACKAGES = ("potluck", "numpy", "torch", "mpi4py", "mlx")


def machine(*packages: str) -> dict[str, Any]:
    """Date, processor, cores, memory, system, versions (of ``packages``, too), commit (in a
    checkout), load, engine."""
    names = (*PACKAGES, *packages)
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "cores": len(usable_cpus()),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: number for name in names if (number := installed(name))},
        "engine": native.describe(),
        "commit": commit(),
        "load": load(),
    }


def load() -> float | None:
    """The load average of the last minute; None on systems without one."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def core_to_core_s() -> float | None:
    """The latency between two cores: seconds until one sees what the other has written, both
    spinning.

    Takes about 3 ms. None without the native core or a second core. In a virtual machine it may
    change within a second, when the host moves the virtual cores to other physical ones.
    """
    return (native.core.shm_costs()[0] or None) if native.available else None


def commit() -> str:
    """The commit of this checkout, with ``-dirty`` if a file was changed; empty outside of Git."""
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.strip()


def heading(facts: dict[str, Any]) -> str:
    """The facts of ``machine()`` in three lines of text."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    load = "" if facts["load"] is None else f", load before: {facts['load']:g}"
    return (
        f"{facts['date']}, {facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB,"
        f" {facts['system']}{load}\n"
        f"Python {facts['python']}, {versions}{commit}\n"
        f"engine: {facts['engine']}"
    )
