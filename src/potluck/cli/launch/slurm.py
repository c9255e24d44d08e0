"""Slurm: a job, and the members of its allocation, one on each node."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from potluck._core.cluster.launching import Fleet
from potluck.cli.launch.fleets import by_command
from potluck.errors import ConfigurationError

_OWN = ("--no-kill", "--open-mode=append", "--signal=B:USR1@120")
"""The allocation stays when a node fails; the output of a requeued job goes on in its file; the
launcher, which is the batch script's process, is told two minutes before the end."""


def sbatch(options: Sequence[str], command: Sequence[str], *, requeue: bool) -> list[str]:
    """The words that submit a job with these ``options`` of sbatch, whose batch script is
    ``command``, `potluck launch slurm` again: it finds itself in the allocation."""
    again = ["--requeue"] if requeue else []
    return ["sbatch", *_OWN, *again, *options, f"--wrap=exec {shlex.join(command)}"]


def submit(command: Sequence[str]) -> str:
    """Run sbatch; the number of the job. ConfigurationError in sbatch's own words."""
    try:
        done = subprocess.run([*command, "--parsable"], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigurationError(
            "there is no sbatch on this machine; call `potluck launch slurm` on a login node"
        ) from None
    if done.returncode:
        raise ConfigurationError(f"sbatch does not take the job: {done.stderr.strip()}")
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
