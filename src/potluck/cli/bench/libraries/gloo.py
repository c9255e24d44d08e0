"""Gloo, through torch.distributed: tensors over NumPy memory, one compute thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist

from potluck.cli.bench.libraries.base import Case, Floats


class TorchGloo:
    """torch's default process group, formed through the store in ``BENCH_STORE``."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=os.environ["BENCH_STORE"],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def prepare(self, operation: str, mine: Floats) -> Case | None:
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
        dist.barrier()

    def describe(self) -> str:
        return f"torch {torch.__version__}"

    def close(self) -> None:
        dist.destroy_process_group()


def open_library(arguments: Mapping[str, str]) -> TorchGloo:
    """Join the group that the environment describes."""
    return TorchGloo()
