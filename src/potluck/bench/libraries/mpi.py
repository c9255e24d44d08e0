"""MPI through mpi4py's buffer calls: no pickle, no copies of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from mpi4py import MPI

from potluck.bench.libraries.base import Case, Floats


class Mpi:
    """MPI_COMM_WORLD, under mpirun."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank, self.world_size = self._comm.Get_rank(), self._comm.Get_size()

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        comm = self._comm
        part = np.empty(mine.size // self.world_size, np.float32)
        count = mine.size * self.world_size if operation == "all-gather" else mine.size
        whole = np.empty(count, np.float32)
        is_root = self.rank == 0
        match operation:
            case "all-reduce":
                return Case(partial(comm.Allreduce, MPI.IN_PLACE, mine), lambda: mine, mine.nbytes)
            case "broadcast":
                return Case(partial(comm.Bcast, mine), lambda: mine, mine.nbytes)
            case "reduce":
                send, receive = (MPI.IN_PLACE, mine) if is_root else (mine, None)
                return Case(partial(comm.Reduce, send, receive), lambda: mine, mine.nbytes)
            case "reduce-scatter":
                return Case(
                    partial(comm.Reduce_scatter_block, mine, part),
                    lambda: part,
                    mine.nbytes + part.nbytes,
                )
            case "all-gather":
                return Case(
                    partial(comm.Allgather, mine, whole), lambda: whole, mine.nbytes + whole.nbytes
                )
            case "all-to-all":
                return Case(
                    partial(comm.Alltoall, mine, whole), lambda: whole, mine.nbytes + whole.nbytes
                )
        return None

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
