"""A process's rank in its world, from the variables of torchrun, mpirun, Slurm or Kubernetes.

Pure: variables in, a ``LaunchedRank`` out. ``RANK`` and ``WORLD_SIZE`` win, because a user may have
set them on purpose under another launcher. The indices of Kubernetes' pods come last, because
mpirun and srun may run inside pods.

``placed`` names the machines of ranks by these variables, for messages about missing ranks.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from potluck.errors import ConfigurationError

MAX_WORLD = 1 << 16
"""The header of a frame has 16 bits for a rank."""

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500

_PORTS = range(15_000, 25_000)
"""Ports below the ephemeral ports of operating systems."""

POD_NUMBERS = ("JOB_COMPLETION_INDEX", "POD_INDEX")
"""Variables with a pod's index. The Job controller sets the first in every pod of an Indexed Job,
and so under JobSet; the second is for the label ``apps.kubernetes.io/pod-index``, by the downward
API."""

_POD_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?-(0|[1-9][0-9]{0,4})")
"""The name of a StatefulSet's pod, such as ``ml-workers-3``, which ends in the pod's index."""

Variables = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """This process's rank in a world of fixed size, and the address of rank 0.

    ``uses_agent_store``: torchrun itself serves a store at ``host:port``; ``attempt`` counts its
    restarts.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    uses_agent_store: bool = False
    attempt: int = 0


def detect(variables: Variables) -> LaunchedRank | None:
    """The rank by the first launcher whose variables are set; None without a launcher.

    ConfigurationError names a variable that is invalid, and the remedy.
    """
    for applies, read in _LAUNCHERS:
        if applies(variables):
            return read(variables)
    return None


def read_launched_rank(variables: Variables) -> LaunchedRank:
    """``detect``; ConfigurationError, with the missing variable, if there is no launcher."""
    launched = detect(variables)
    if launched is None:
        missing = "WORLD_SIZE" if rank_variable(variables) else "RANK"
        raise ConfigurationError(
            f"{missing} is not set; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe a group "
            "(`potluck run`, torchrun, mpirun and srun set these or their like; in a pod of "
            f"Kubernetes {' or '.join(POD_NUMBERS)} may stand for RANK)"
        )
    return launched


def is_half_described(variables: Variables) -> bool:
    """Whether variables of a group are set, but not enough of them for a rank.

    Such a process must not silently train alone. ``RANK`` or a pod's index without ``MASTER_ADDR``
    does not count: the pods of an Indexed Job may be independent of each other.
    """
    if detect(variables) is not None:
        return False
    if variables.get("WORLD_SIZE"):
        return variables["WORLD_SIZE"] != "1"
    return bool(variables.get("MASTER_ADDR") and rank_variable(variables))


def rank_variable(variables: Variables) -> str:
    """The first set variable that may hold this process's rank; empty without one."""
    return next((name for name in ("RANK", *POD_NUMBERS) if variables.get(name)), "")


@dataclass(frozen=True, slots=True)
class RankRange:
    """The ranks of the workers that one `potluck run` starts in the world of a launcher, from
    ``first`` on. On its machine their local ranks begin at ``first_local``."""

    launcher: str
    first: int
    num: int
    world_size: int
    first_local: int
    host: str
    port: int

    def variables(self, index: int) -> dict[str, str]:
        """The variables of worker ``index`` of these."""
        return {
            "RANK": str(self.first + index),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.first_local + index),
            # Several commands of mpirun or srun may be on this machine.
            "LOCAL_WORLD_SIZE": str(self.num) if self.launcher == "environment" else "",
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def ranks_of_command(variables: Variables, num_workers: int) -> RankRange | None:
    """The ranks of ``num_workers`` that a command starts under a launcher's variables; None if
    they are a world of their own.

    RANK and WORLD_SIZE count workers: RANK is that of the first one here. mpirun, srun and the
    numbers of pods count commands, each of which starts as many workers. ConfigurationError where
    the numbers do not fit together: the commands would train apart.
    """
    if variables.get("POTLUCK_AGENT"):
        return None  # they are those of the job of which this command is a part
    if is_half_described(variables) and variables.get("WORLD_SIZE") == str(num_workers):
        return None
    launched = read_launched_rank(variables) if is_half_described(variables) else detect(variables)
    if launched is None or launched.world_size == 1:
        return None
    counts_workers = launched.launcher in ("environment", "torchrun")
    each = 1 if counts_workers else num_workers
    first, world_size = launched.rank * each, launched.world_size * each
    if first + num_workers > world_size:
        what = f"RANK={first}, WORLD_SIZE={world_size} and --workers {num_workers}"
        raise ConfigurationError(
            f"{what} do not fit together: WORLD_SIZE counts the workers of all commands, and RANK "
            "is that of the first one here. For two machines of 4 workers set WORLD_SIZE=8, and "
            "RANK=0 on one, RANK=4 on the other; for a world of this command alone unset both"
        )
    if world_size == num_workers:
        return None
    local = launched.local_rank * each
    return RankRange(
        *(launched.launcher, first, num_workers, world_size, local, launched.host, launched.port)
    )


def number(
    variables: Variables, name: str, least: int, most: int, *, default: int | None = None
) -> int:
    """The integer in the variable ``name``; ConfigurationError unless it is one from ``least`` to
    ``most``."""
    text = variables.get(name, "")
    if not text and default is not None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_number or not least <= int(text) <= most:
        what = f"{name}={text[:40]!r} is not" if text else f"{name} is not set; it must be"
        raise ConfigurationError(f"{what} an integer from {least} to {most}")
    return int(text)


# -- the launchers


def _plain(variables: Variables) -> LaunchedRank:
    """The variables RANK and WORLD_SIZE: of torchrun, ``potluck run``, Kubernetes operators, a
    StatefulSet's pods, or a user."""
    is_torchrun = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if _POD_NAME.fullmatch(variables["RANK"]):
        return _pod(variables)
    launched = _launched(
        variables,
        "torchrun" if is_torchrun else "environment",
        *("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        host=variables.get("MASTER_ADDR") or LOOPBACK,
        port=number(variables, "MASTER_PORT", 1, 65535, default=DEFAULT_PORT),
    )
    attempt = number(variables, "TORCHELASTIC_RESTART_COUNT", 0, 1 << 30, default=0)
    return replace(launched, uses_agent_store=is_torchrun, attempt=attempt)


def _open_mpi(variables: Variables) -> LaunchedRank:
    job = variables.get("OMPI_MCA_ess_base_jobid") or variables.get("PMIX_NAMESPACE", "")
    return _under_mpirun(
        variables,
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=job,
        how="mpirun -x MASTER_ADDR=ADDRESS",
    )


def _mvapich(variables: Variables) -> LaunchedRank:
    return _under_mpirun(
        variables,
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        job=variables.get("MPIRUN_ID", ""),
        how="mpirun_rsh ... MASTER_ADDR=ADDRESS",
    )


def _horovod(variables: Variables) -> LaunchedRank:
    return _under_mpirun(
        variables,
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
        local_size="HOROVOD_LOCAL_SIZE",
        job=variables.get("HOROVOD_GLOO_RENDEZVOUS_PORT", ""),
        how="MASTER_ADDR=ADDRESS horovodrun",
    )


def _mpich(variables: Variables) -> LaunchedRank:
    return _under_mpirun(
        variables,
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        local_size="MPI_LOCALNRANKS",
        job=variables.get("PMI_ID", "") + variables.get("HYDI_CONTROL_FD", ""),
        how="mpirun -genv MASTER_ADDR ADDRESS",
    )


def _slurm(variables: Variables) -> LaunchedRank:
    size = "SLURM_STEP_NUM_TASKS" if variables.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST", "")
    job = ".".join(
        variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID")
    )
    return _launched(
        variables,
        "slurm",
        *("SLURM_PROCID", size, "SLURM_LOCALID"),
        host=variables.get("MASTER_ADDR") or _first_node(nodes),
        port=_port(variables, job),
    )


def _pod(variables: Variables) -> LaunchedRank:
    """A pod of a StatefulSet, an Indexed Job or a JobSet. MASTER_ADDR has no default here, because
    pods do not share a loopback."""
    source = rank_variable(variables)
    host = variables.get("MASTER_ADDR", "")
    if not host and variables["WORLD_SIZE"] != "1":
        first = re.sub("[0-9]+$", "0", variables[source]) if source == "RANK" else "POD-0"
        raise ConfigurationError(
            "MASTER_ADDR is not set; each pod has an address of its own, so set it to that of pod "
            f"0 ({source}={variables[source]!r}, with a headless service: {first}.SERVICE)"
        )
    return _launched(
        variables,
        "kubernetes",
        *(source, "WORLD_SIZE", "LOCAL_RANK"),
        host=host or LOOPBACK,
        port=number(variables, "MASTER_PORT", 1, 65535, default=DEFAULT_PORT),
    )


def _under_mpirun(
    variables: Variables,
    rank: str,
    size: str,
    local_rank: str,
    *,
    local_size: str,
    job: str,
    how: str,
) -> LaunchedRank:
    host = variables.get("MASTER_ADDR", "")
    if not host:
        if variables.get(local_size) != variables.get(size):
            raise ConfigurationError(
                f"mpirun started ranks on several machines ({local_size}="
                f"{variables.get(local_size, '')!r}, {size}={variables.get(size)!r}); give all the "
                f"address of rank 0: {how} (or use backend='mpi')"
            )
        host = LOOPBACK
    port = _port(variables, job)
    return _launched(variables, "mpirun", rank, size, local_rank, host=host, port=port)


def _launched(
    variables: Variables,
    launcher: str,
    rank_name: str,
    size_name: str,
    local_name: str,
    *,
    host: str,
    port: int,
) -> LaunchedRank:
    rank = _rank(variables, rank_name)
    world_size = number(variables, size_name, 1, MAX_WORLD)
    if rank >= world_size:
        raise ConfigurationError(
            f"{rank_name}={variables[rank_name]} is not below {size_name}={world_size}; ranks "
            "begin at 0"
        )
    return LaunchedRank(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=number(variables, local_name, 0, MAX_WORLD - 1, default=0),
        host=host,
        port=port,
    )


def _rank(variables: Variables, name: str) -> int:
    """The integer in the variable ``name``, or the index at the end of a StatefulSet pod's name."""
    text = variables.get(name, "")
    pod = _POD_NAME.fullmatch(text)
    if pod is not None:
        return number({name: pod[2]}, name, 0, MAX_WORLD - 1)
    if name == "RANK" and not text.isdigit():
        raise ConfigurationError(
            f"RANK={text[:80]!r} is not an integer from 0 to {MAX_WORLD - 1}, nor the name of a "
            "StatefulSet's pod (ml-workers-3); in the pods of an Indexed Job leave RANK unset: "
            "JOB_COMPLETION_INDEX is read"
        )
    return number(variables, name, 0, MAX_WORLD - 1)


def _port(variables: Variables, job: str) -> int:
    """MASTER_PORT, else a port by the hash of the job's id, equal on all its ranks and different
    for most other jobs."""
    default = _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else DEFAULT_PORT
    return number(variables, "MASTER_PORT", 1, 65535, default=default)


def _first_node(nodes: str) -> str:
    """The first host of a Slurm list: ``gpu-01`` for ``gpu-[01-03,07],login``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise ConfigurationError(
            f"SLURM_NODELIST={nodes[:40]!r} names no host; set MASTER_ADDR to rank 0's"
        )
    return match[1] + (match[2] or "")


def _has(*names: str) -> Callable[[Variables], bool]:
    return lambda variables: all(variables.get(name) for name in names)


def _is_slurm_step(variables: Variables) -> bool:
    """Whether srun started this process. (A batch script has a rank, too, but is a single
    process.)"""
    in_step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID")
    return bool(in_step and variables.get("SLURM_PROCID"))


_LAUNCHERS: tuple[tuple[Callable[[Variables], bool], Callable[[Variables], LaunchedRank]], ...] = (
    (_has("RANK", "WORLD_SIZE"), _plain),
    (_has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), _open_mpi),
    (_has("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), _mvapich),
    (_has("PMI_RANK", "PMI_SIZE"), _mpich),
    (_has("HOROVOD_RANK", "HOROVOD_SIZE"), _horovod),
    (_is_slurm_step, _slurm),
    *((_has(name, "WORLD_SIZE"), _pod) for name in POD_NUMBERS),
)


def listed(ranks: Iterable[int]) -> str:
    """The numbers in ascending order, runs of three and more shortened: ``0, 2, 4 to 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts)


def placed(ranks: Iterable[int], environment: Mapping[str, str] = os.environ) -> str:
    """Ranks with their machines: ``rank 1 on ada, rank 4 to 7 on bob``; without machines if no
    variable names them.

    ``potluck run`` sets POTLUCK_NODES, a name for each rank. Under torchrun (GROUP_RANK is set)
    LOCAL_WORLD_SIZE consecutive ranks share a machine.
    """
    by_place: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_place.setdefault(_place(rank, environment), []).append(rank)
    return ", ".join(f"rank {listed(found)}{place}" for place, found in by_place.items())


def _place(rank: int, environment: Mapping[str, str]) -> str:
    nodes = environment.get("POTLUCK_NODES", "").split(",")
    if rank < len(nodes) and nodes[rank]:
        return f" on {nodes[rank]}"
    per_node = environment.get("LOCAL_WORLD_SIZE", "")
    if "GROUP_RANK" in environment and per_node.isdigit() and int(per_node) > 0:
        return f" on torchrun's node {rank // int(per_node)}"
    return ""
