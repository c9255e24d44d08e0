"""MPI, through mpi4py's buffer calls, which neither pickle nor copy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from mpi4py import MPI

from potluck.cli.bench.libraries.base import Case, Floats


class Mpi:
    """MPI_COMM_WORLD of a worker that mpirun started."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank, self.world_size = self._comm.Get_rank(), self._comm.Get_size()

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        comm = self._comm
        part = np.empty(mine.size // self.world_size, np.float32)
        count = mine.size * self.world_size if operation == "all-gather" else mine.size
        whole = np.empty(count, np.float32)
        send, receive = (MPI.IN_PLACE, mine) if self.rank == 0 else (mine, None)
        call, result = {
            "all-reduce": (partial(comm.Allreduce, MPI.IN_PLACE, mine), mine),
            "broadcast": (partial(comm.Bcast, mine), mine),
            "reduce": (partial(comm.Reduce, send, receive), mine),
            "reduce-scatter": (partial(comm.Reduce_scatter_block, mine, part), part),
            "all-gather": (partial(comm.Allgather, mine, whole), whole),
            "all-to-all": (partial(comm.Alltoall, mine, whole), whole),
        }[operation]
        return Case(
            call, lambda: result, mine.nbytes + (result.nbytes if result is not mine else 0)
        )

    def barrier(self) -> None:
        self._comm.Barrier()

    def describe(self) -> str:
        name = MPI.Get_library_version().split(",")[0].strip()
        return name.removesuffix("\x00")

    def close(self) -> None:
        MPI.Finalize()


def open_library(arguments: Mapping[str, str]) -> Mpi:
    """Join mpirun's world."""
    return Mpi()
