"""Commands that another launcher starts, one on each machine: the world that they form together."""

from __future__ import annotations

from collections.abc import Mapping

from potluck._core.backends.launchers import RankRange, ranks_of_command
from potluck.errors import ConfigurationError

_OF_WORKERS = ("POTLUCK_AGENT", "POTLUCK_WORKER_HOME", "POTLUCK_WORLD_RANK")
_AS_HERE = ("POTLUCK_BIND", "POTLUCK_PSK", "POTLUCK_PASSPHRASE")


class LaunchedWorkers:
    """The workers of this command as processes of a launcher: without an agent of their own, and
    with the secret of this command's environment, by which all machines know each other."""

    def __init__(self, ranks: RankRange, environment: Mapping[str, str]) -> None:
        self._ranks = ranks
        self._fixed = dict.fromkeys(_OF_WORKERS, "")
        self._fixed |= {name: environment.get(name, "") for name in _AS_HERE}

    def variables(self, index: int) -> dict[str, str]:
        """Those of worker ``index`` of this command."""
        return self._fixed | self._ranks.variables(index)

    def __str__(self) -> str:
        ranks, last = self._ranks, self._ranks.first + self._ranks.num - 1
        these = f"rank {ranks.first}" if last == ranks.first else f"ranks {ranks.first} to {last}"
        return (
            f"{these} of {ranks.world_size}, by the variables of "
            f"{'your environment' if ranks.launcher == 'environment' else ranks.launcher}; rank 0 "
            f"is at {ranks.host}:{ranks.port}. Such a world does not survive the loss of a worker"
        )


def launched_workers(
    environment: Mapping[str, str], num_workers: int, *, has_agent: bool, chaos: str = ""
) -> LaunchedWorkers | None:
    """The workers of this command if they are a part of a larger world; None if it is all of its
    own. ConfigurationError where the commands would train apart, or an option needs an agent."""
    ranks = ranks_of_command(environment, num_workers)
    if ranks is None:
        return None
    said = f"this is one of several commands of a world of {ranks.world_size} workers"
    if has_agent:
        raise ConfigurationError(
            f"{said} (RANK, WORLD_SIZE, or an mpirun or srun around it), and this machine's agent "
            "would start the workers of each on all machines of the cluster. Call it once, on one "
            "machine, without these variables"
        )
    if chaos:
        raise ConfigurationError(f"--chaos: {said}; it needs a world of this command alone")
    return LaunchedWorkers(ranks, environment)


def check_alone(environment: Mapping[str, str], command: str) -> None:
    """ConfigurationError if a launcher starts ``command`` several times: each would be a job."""
    if ranks_of_command(environment, 1) is not None:
        raise ConfigurationError(
            f"`{command}` starts all workers itself: call it once, without an mpirun or srun "
            "around it, and without RANK and WORLD_SIZE"
        )
