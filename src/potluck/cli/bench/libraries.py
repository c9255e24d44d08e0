"""The libraries under test, as a worker process uses them: each joins this process to its group.

Each class imports its library where it is made, as a worker has one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from potluck._core.context import init
from potluck._core.engine.loop import native as native_loop
from potluck._core.version import VERSION

Floats = npt.NDArray[np.float32]


class Case(NamedTuple):
    """One collective on fixed buffers. ``call`` runs it once and returns when it has ended;
    ``result`` returns this rank's result of the last call as a NumPy array. ``nbytes`` is the
    memory that a user allocates: the input, and the output if that is another buffer.

    ``call`` should add little time: a ``partial``, or a lambda for calls with keywords, where a
    lambda is faster.
    """

    call: Callable[[], object]
    result: Callable[[], Floats]
    nbytes: int


class BenchLibrary(Protocol):
    """One rank of a group."""

    rank: int
    world_size: int

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        """``operation`` with root 0 on this rank's input; None if the library does not have it.

        Calls may overwrite ``mine``. Everything that all calls share is prepared here.
        """

    def barrier(self) -> object:
        """Return once all ranks have called it."""

    def describe(self) -> str:
        """The version, the engine and the algorithms that were chosen, in one short line."""

    def close(self) -> None:
        """Leave the group."""


class Ours:
    """potluck itself, through the public calls of a context, on NumPy arrays. ``arguments`` are
    added to each all_reduce."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self._arguments: dict[str, Any] = dict(arguments)
        self.ctx = ctx = init("env")
        self.rank, self.world_size = ctx.rank, ctx.world_size

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        ctx = self.ctx
        parts = mine.reshape(self.world_size, -1) if mine.size % self.world_size == 0 else mine
        in_place: dict[str, Callable[[], object]] = {
            "all-reduce": partial(ctx.all_reduce, mine, **self._arguments),
            "broadcast": partial(ctx.broadcast, mine),
            "reduce": partial(ctx.reduce, mine),
        }
        if operation in in_place:
            return Case(in_place[operation], lambda: mine, mine.nbytes)
        count = mine.size * self.world_size if operation == "all-gather" else mine.size
        out = np.empty(
            count // self.world_size if operation == "reduce-scatter" else count, np.float32
        )
        nbytes = mine.nbytes + out.nbytes
        if operation == "reduce-scatter":
            return Case(lambda: ctx.reduce_scatter(parts, out=out), lambda: out, nbytes)
        if operation == "all-gather":
            return Case(lambda: ctx.all_gather(mine, out=out), lambda: out, nbytes)
        return Case(lambda: ctx.all_to_all(parts, out=out), lambda: out, nbytes)

    def barrier(self) -> None:
        self.ctx.barrier()

    def describe(self) -> str:
        operations = self.ctx.stats()["operations"].items()
        used = {
            algorithm
            for name, each in operations
            if name != "barrier"
            for algorithm in each.get("algorithms", {})
        }
        engine = "native" if native_loop.is_available() else "Python"
        return ", ".join([VERSION, f"links: {engine}", *sorted(used)])

    def close(self) -> None:
        self.ctx.close()


class TorchGloo:
    """Gloo, through torch.distributed: tensors over NumPy memory, one compute thread. The group is
    formed through the store in ``BENCH_STORE``."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=os.environ["BENCH_STORE"],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        torch, dist = self._torch, self._dist
        tensor = torch.from_numpy(mine)
        part = torch.empty(mine.size // self.world_size)
        whole = torch.empty(mine.size * self.world_size if operation == "all-gather" else mine.size)
        call, result = {
            "all-reduce": (partial(dist.all_reduce, tensor), tensor),
            "broadcast": (partial(dist.broadcast, tensor, 0), tensor),
            "reduce": (partial(dist.reduce, tensor, 0), tensor),
            "reduce-scatter": (partial(dist.reduce_scatter_tensor, part, tensor), part),
            "all-gather": (partial(dist.all_gather_into_tensor, whole, tensor), whole),
            "all-to-all": (partial(dist.all_to_all_single, whole, tensor), whole),
        }[operation]
        return Case(
            call, result.numpy, mine.nbytes + (result.nbytes if result is not tensor else 0)
        )

    def barrier(self) -> None:
        self._dist.barrier()

    def describe(self) -> str:
        return f"torch {self._torch.__version__}"

    def close(self) -> None:
        self._dist.destroy_process_group()


class Mpi:
    """MPI_COMM_WORLD of a worker that mpirun started, through mpi4py's buffer calls, which neither
    pickle nor copy."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        self.rank, self.world_size = self._comm.Get_rank(), self._comm.Get_size()

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        comm, MPI = self._comm, self._mpi
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
        name = self._mpi.Get_library_version().split(",")[0].strip()
        return name.removesuffix("\x00")

    def close(self) -> None:
        self._mpi.Finalize()


class Mlx:
    """MLX's ring backend, of the group that MLX_HOSTFILE and MLX_RANK describe. MLX is lazy: each
    call is evaluated at once, into a new array."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        import mlx.core as mx

        self._mx = mx
        mx.set_default_device(mx.cpu)
        self._group = mx.distributed.init(strict=True, backend="ring")
        self.rank, self.world_size = self._group.rank(), self._group.size()

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        mx = self._mx
        array = mx.array(mine)
        match operation:
            case "all-reduce":
                return self._evaluated(mx.distributed.all_sum, array, 2 * mine.nbytes)
            case "all-gather":
                nbytes = mine.nbytes * (self.world_size + 1)
                return self._evaluated(mx.distributed.all_gather, array, nbytes)
        return None  # its ring has neither broadcast nor reduce_scatter

    def barrier(self) -> None:
        mx = self._mx
        mx.eval(mx.distributed.all_sum(mx.zeros(1), group=self._group))

    def describe(self) -> str:
        return f"MLX {version('mlx')}, ring"

    def close(self) -> None:
        return None

    def _evaluated(self, function: Callable[..., Any], array: Any, nbytes: int) -> Case:
        group, evaluate = self._group, self._mx.eval
        last: list[Any] = [None]

        def run() -> None:
            last[0] = None
            last[0] = function(array, group=group)
            evaluate(last[0])

        return Case(run, lambda: np.array(last[0]).reshape(-1), nbytes)


LIBRARIES: dict[str, Callable[[Mapping[str, str]], BenchLibrary]] = {
    "ours": Ours,
    "gloo": TorchGloo,
    "mpi": Mpi,
    "mlx": Mlx,
}
