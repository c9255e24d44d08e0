"""The members of an allocation (``cluster/launching.py``), started by srun or mpirun, as actors of
Ray, or as tasks of Dask.

On each machine a member is a process of its own, ``potluck launch member``, which reads the
invitation from its standard input: so the secret is in no argument and no environment, and a member
whose starter was killed sees the end of its input, and ends. mpirun gives its input to one member
only: there the environment has the invitation, which the person's own processes can read. Ray and
Dask carry the invitation as an argument of a call, which their own connections protect or not.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from potluck._core.cluster.launching import Fleet, Invitation
from potluck._core.optional import require
from potluck.errors import ConfigurationError, LinkError

INVITATION = "POTLUCK_INVITATION"
"""The variable with a member's invitation, where the standard input can't bring it."""
_MAIN = "from potluck.cli.main import app; app()"
_SBATCH = ("--no-kill", "--open-mode=append", "--signal=B:USR1@120")
"""The allocation stays when a node fails; the output of a requeued job goes on in its file; the
launcher, which is the batch script's process, is told two minutes before the end."""
_END_S = 30.0
_LOOK_S = 1.0


def potluck_command() -> list[str]:
    """The command ``potluck`` of this interpreter's environment."""
    found = shutil.which("potluck", path=str(Path(sys.executable).parent))
    return [found] if found else [sys.executable, "-P", "-c", _MAIN]


def by_command(*command: str, variable: str = "") -> Fleet:
    """``command`` (srun, mpirun) starts the members, and gives each its own standard input, or
    the environment's ``variable``."""

    async def fleet(invitation: Invitation) -> None:
        given = {variable: invitation.line().decode().strip()} if variable else {}
        try:
            process = await asyncio.create_subprocess_exec(
                *(*command, *potluck_command(), "launch", "member"),
                stdin=subprocess.PIPE,
                env=os.environ | given,
                start_new_session=bool(variable),  # Ctrl-C is the launcher's
            )
        except FileNotFoundError:
            raise ConfigurationError(f"there is no program {command[0]} on this machine") from None
        assert process.stdin is not None
        try:
            process.stdin.write(invitation.line())
            code = await process.wait()
            raise LinkError(f"{command[0]} ended with exit code {code}; its own words are above")
        finally:
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()

    return fleet


def sbatch(options: Sequence[str], command: Sequence[str], *, requeue: bool) -> list[str]:
    """The words that submit a job with these ``options`` of sbatch, whose batch script is
    ``command``, `potluck launch slurm` again: it finds itself in the allocation."""
    again = ["--requeue"] if requeue else []
    return ["sbatch", *_SBATCH, *again, *options, f"--wrap=exec {shlex.join(command)}"]


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


def on_mpi(num: int, hosts: str) -> Fleet:
    """A member on each of ``num`` machines, by mpirun of Open MPI; ``hosts`` are names or the path
    of a hostfile."""
    where = ["--hostfile" if Path(hosts).is_file() else "--host", hosts] if hosts else []
    place = ["-n", str(num), "--map-by", "ppr:1:node", "--bind-to", "none", *where]
    return by_command("mpirun", *place, "-x", INVITATION, variable=INVITATION)


def run_member(invitation: bytes) -> int:
    """Run a member on this machine to its end, in an actor of Ray or a task of Dask; its exit
    code."""
    command = [*potluck_command(), "launch", "member"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(invitation)
        process.stdin.flush()  # it stays open as long as this process lives
        return process.wait()


class Member:
    """An actor of Ray."""

    def run(self, invitation: bytes) -> int:
        """See ``run_member``."""
        return run_member(invitation)


def on_ray(address: str, num: int, *, cpus: float, gpus: float) -> Fleet:
    """``num`` actors, each on a node of its own with ``cpus`` and ``gpus``. Ray starts a lost one
    again, on another node as soon as one is free. MissingDependency without Ray."""
    ray: Any = require("ray", "ray")
    strategies: Any = require("ray.util.scheduling_strategies", "ray")

    async def fleet(invitation: Invitation) -> None:
        try:
            await asyncio.to_thread(ray.init, address=address)
        except ConnectionError as error:
            raise LinkError(f"there is no cluster of Ray at {address}: {error}") from error
        bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        group = ray.util.placement_group([bundle] * num, strategy="STRICT_SPREAD")
        options = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": cpus, "num_gpus": gpus}
        actors = []
        for index in range(num):
            place = strategies.PlacementGroupSchedulingStrategy(group, index)
            actor = ray.remote(Member).options(scheduling_strategy=place, **options)
            actors.append(actor.remote())
        running = [each.run.remote(invitation.line()) for each in actors]
        try:
            codes = await asyncio.gather(*running)
            raise LinkError(f"the members on Ray's nodes ended with the exit codes {codes}")
        finally:
            await asyncio.to_thread(ray.wait, running, num_returns=num, timeout=_END_S)
            await asyncio.to_thread(ray.shutdown)  # which ends actors that are left

    return fleet


def on_dask(address: str) -> Fleet:
    """A task on each machine with workers of Dask, also on machines that come later.
    MissingDependency without Dask."""
    distributed: Any = require("distributed", "dask")

    async def fleet(invitation: Invitation) -> None:
        members: dict[str, Any] = {}
        try:
            client = await distributed.Client(address, asynchronous=True, set_as_default=False)
        except OSError as error:
            raise LinkError(f"there is no scheduler of Dask at {address}: {error}") from error
        async with client:
            try:
                while True:
                    workers = await client.nthreads()
                    for worker, future in list(members.items()):
                        if worker not in workers or future.done():
                            await client.cancel([members.pop(worker)], force=True)
                    hosts = {urlsplit(worker).hostname for worker in members}
                    for worker in workers:
                        if (host := urlsplit(worker).hostname) not in hosts:
                            hosts.add(host)
                            members[worker] = client.submit(
                                run_member, invitation.line(), workers=[worker], pure=False
                            )
                    await asyncio.sleep(_LOOK_S)
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_S):
                        await distributed.wait(members.values())

    return fleet
