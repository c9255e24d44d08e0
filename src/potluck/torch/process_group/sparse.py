"""all_reduce of sparse COO tensors: the sum, with the entries of all ranks.

As in Gloo, ranks may have different entries, so the ranks first gather the numbers of entries, then
indices and values, padded to the largest number. Cost: three all_gathers, in which each rank sends
``w - 1`` times the bytes of the largest rank.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from potluck._core.collectives.plan import Operation
from potluck._core.engine.request import Request
from potluck._core.types import ReduceOp
from potluck.torch.process_group import buffers
from potluck.torch.process_group.comms import Comms
from potluck.torch.process_group.options import reduction, seconds
from potluck.torch.process_group.work import GroupWork


def all_reduce(comms: Comms, tensor: Tensor, opts: Any) -> GroupWork:
    """Sum ``tensor`` over all ranks, in place. Blocks until the end. ValueError for other
    reductions."""
    op, factor = reduction(opts)
    if op is not ReduceOp.SUM or factor is not None:
        raise ValueError(f"all_reduce: sparse tensors can only be summed, not op={op.value}")
    timeout_s = seconds(opts, comms.timeout_s)
    mine = tensor.detach().cpu().coalesce()
    counts = np.zeros(comms.world_size, dtype=np.int64)
    count = np.array([mine._nnz()], dtype=np.int64)
    comms.communicator.run(Request(Operation.ALL_GATHER, count, counts, timeout_s=timeout_s)).wait()
    most, num_indices = int(counts.max()), math.prod(mine.shape[: mine.sparse_dim()])
    for rank, announced in enumerate(counts.tolist()):
        if not 0 <= announced <= num_indices:  # coalesced: one entry for each index at most
            raise RuntimeError(
                f"all_reduce: rank {rank} announces {announced} entries of a sparse tensor that "
                f"has {num_indices} indices; do all ranks pass tensors of the same shape?"
            )
    indices = _gather(comms, mine.indices().t().contiguous(), most, timeout_s)
    values = _gather(comms, mine.values(), most, timeout_s)
    kept = [slice(rank * most, rank * most + int(n)) for rank, n in enumerate(counts)]
    _have_warned()
    total = _checked(
        torch.cat([indices[part] for part in kept]).t(),
        torch.cat([values[part] for part in kept]),
        mine.shape,
    )
    with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
        tensor.copy_(total)  # not into tensor.data, which has indices of its own
    return GroupWork((), [tensor], comms.completions)


def _checked(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()


@functools.cache
def _have_warned() -> None:
    """torch 2.11 warns, once in a process, that nobody said whether sparse tensors are to be
    checked, although the call says it. Not in front of all calls: a change of filters makes Python
    forget which warnings it has shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
        _checked(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), (1,))


def _gather(comms: Comms, rows: Tensor, most: int, timeout_s: float) -> Tensor:
    """Gather all ranks' rows, each rank's padded to ``most`` rows."""
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty((comms.world_size * most, *rows.shape[1:]))
    given, room = buffers.as_array(padded), buffers.as_array(gathered)
    comms.communicator.run(Request(Operation.ALL_GATHER, given, room, timeout_s=timeout_s)).wait()
    return gathered
