"""Slurm: the batch script, and the members of an allocation, one on each node."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from potluck._core.cluster.launching import Fleet
from potluck.cli.launch.fleets import by_command
from potluck.errors import ConfigurationError

MARK = "# Made by `potluck launch slurm`, which may overwrite it."
_OWN = ("--no-kill", "--open-mode=append", "--signal=B:USR1@120")
"""The allocation stays when a node fails; the output of a requeued job goes on in its file; the
launcher, which is the batch script's process, is told two minutes before the end."""


def checked_text(text: str, what: str) -> str:
    """``text``; ConfigurationError if it has control characters (a newline would begin another
    line of a file)."""
    if not text.isprintable():
        raise ConfigurationError(f"{what} {text!r} has characters that can't be written on a line")
    return text


def batch_script(
    options: Sequence[str], command: Sequence[str], *, requeue: bool, directory: str
) -> str:
    """The text of a batch script with these sbatch ``options``, whose only ``command`` is `potluck
    launch slurm` again, in the allocation. ConfigurationError for an option that a line #SBATCH
    can't have."""
    given = [f"--chdir={directory}", *(["--requeue"] if requeue else []), *options]
    lines = [f"#SBATCH {_line(each)}" for each in (*_OWN, *given)]
    line = shlex.join(["exec", *(checked_text(word, "the argument") for word in command)])
    return "\n".join(["#!/bin/bash", MARK, *lines, "", line, ""])


def _line(option: str) -> str:
    checked_text(option, "the sbatch option")
    if set(option) & set("\"'\\"):
        raise ConfigurationError(
            f"the sbatch option {option} has a quote or backslash; give it to sbatch itself, which "
            "takes options before the batch script's"
        )
    return f'"{option}"' if set(option) & set(" #") else option


def write_script(path: Path, text: str) -> None:
    """Write the batch script; ConfigurationError if ``path`` is another file."""
    if path.exists() and MARK not in path.read_text(errors="replace"):
        raise ConfigurationError(f"{path} is there already, and not made by potluck: move it away")
    path.write_text(text)


def submit(path: Path) -> str:
    """Submit the batch script; the number of its job. ConfigurationError in sbatch's own words."""
    try:
        done = subprocess.run(["sbatch", "--parsable", path], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no sbatch on this machine; copy {path} to a login node of the cluster"
        ) from None
    if done.returncode:
        raise ConfigurationError(f"sbatch does not take {path}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def on_slurm(environment: Mapping[str, str]) -> tuple[Fleet, int]:
    """The members on all nodes of the allocation in whose batch script this is, and how many."""
    num = int(environment["SLURM_JOB_NUM_NODES"])
    options = [f"--nodes={num}", f"--ntasks={num}", "--ntasks-per-node=1", "--no-kill"]
    if cpus := environment.get("SLURM_CPUS_PER_TASK"):
        options.append(f"--cpus-per-task={cpus}")  # srun does not inherit it
    return by_command("srun", *options, "--kill-on-bad-exit=0", "--input=all"), num


def requeue() -> None:
    """Have Slurm run this job again; what it trained is in its checkpoint."""
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
