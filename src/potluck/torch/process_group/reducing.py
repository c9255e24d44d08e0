"""Operations with a reduction: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import ReduceOp as TorchOp

from potluck._core.codecs import codec_of
from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.coding import Encoding
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.work import Work
from potluck._core.types import ReduceOp
from potluck.torch.process_group import staging
from potluck.torch.process_group.staging import fast_path, in_columns, in_place
from potluck.torch.process_group.work import GroupWork
from potluck.torch.process_group.world import Comms

_KINDS = {
    TorchOp.SUM: ReduceOp.SUM,
    TorchOp.AVG: ReduceOp.MEAN,
    TorchOp.MIN: ReduceOp.MIN,
    TorchOp.MAX: ReduceOp.MAX,
    TorchOp.PRODUCT: ReduceOp.PRODUCT,
    TorchOp.BAND: ReduceOp.BAND,
    TorchOp.BOR: ReduceOp.BOR,
    TorchOp.BXOR: ReduceOp.BXOR,
    TorchOp.PREMUL_SUM: ReduceOp.SUM,
}


def all_reduce(comms: Comms, tensor: Tensor, opts: Any) -> GroupWork:
    """Reduce ``tensor`` over all ranks, in place on every rank."""
    staging.check(tensor, "all_reduce")
    op, factor = reduction(opts, tensor.dtype)
    done = _fast(comms, opts, Operation.ALL_REDUCE, op, factor, tensor, tensor)
    if done is not None:
        return done

    def post(array: Array) -> Work:
        if factor is not None:
            array *= _scalar(factor, array)
        return _run(comms, opts, Operation.ALL_REDUCE, op, array, array)

    return in_place(comms, tensor, post)


def all_reduce_encoded(
    comms: Comms, tensor: Tensor, codec: str, residual: Tensor | None
) -> GroupWork:
    """The mean of ``tensor`` over all ranks, in place on every rank, sent encoded by ``codec``."""
    staging.check(tensor, "all_reduce_encoded")
    encoding = Encoding(codec_of(codec), None if residual is None else staging.as_array(residual))

    def post(array: Array) -> Work:
        return comms.run(
            Operation.ALL_REDUCE, None, array, array, op=ReduceOp.MEAN, encoding=encoding
        )

    return in_place(comms, tensor, post, is_cut=False)


def reduce(comms: Comms, tensor: Tensor, opts: Any) -> GroupWork:
    """Reduce ``tensor`` over all ranks, in place on rank ``opts.rootRank``; other ranks' tensors
    are unchanged."""
    staging.check(tensor, "reduce")
    op, factor = reduction(opts, tensor.dtype)
    root, is_root = opts.rootRank, opts.rootRank == comms.rank

    def post(array: Array) -> Work:
        if factor is not None:
            scaled = array if is_root else np.empty_like(array)  # the array may be the user's
            array = np.multiply(array, _scalar(factor, array), out=scaled)
        return _run(comms, opts, Operation.REDUCE, op, array, array if is_root else None, root)

    return in_place(comms, tensor, post, writes=is_root)


def reduce_scatter_single(comms: Comms, output: Tensor, source: Tensor, opts: Any) -> GroupWork:
    """Reduce ``source``, world size times as long as ``output``; rank r gets part r of the
    result."""
    staging.check_pair(source, output, "reduce_scatter")
    whole, part = ("input", source), ("output", output)
    staging.check_whole(whole, part, comms.world_size, "reduce_scatter")
    op, factor = reduction(opts, output.dtype)
    done = _fast(comms, opts, Operation.REDUCE_SCATTER, op, factor, source, output)
    return done if done is not None else _scattered(comms, output, source, opts)


def reduce_scatter(comms: Comms, output: Tensor, parts: Sequence[Tensor], opts: Any) -> GroupWork:
    """Reduce ``parts`` of all ranks; rank r gets the result of ``parts[r]`` in ``output``."""
    staging.check_parts(parts, output, comms.world_size, "reduce_scatter", "input")
    return _scattered(comms, output, parts, opts)


def _scattered(
    comms: Comms, output: Tensor, sources: Sequence[Tensor] | Tensor, opts: Any
) -> GroupWork:
    op, factor = reduction(opts, output.dtype)

    def post(source: Array, array: Array) -> Work:
        if factor is not None:
            source = source * _scalar(factor, source)
        return _run(comms, opts, Operation.REDUCE_SCATTER, op, source, array)

    return in_columns(comms, sources, [output], post)


def _fast(
    comms: Comms,
    opts: Any,
    operation: Operation,
    op: ReduceOp,
    factor: float | Tensor | None,
    source: Tensor,
    result: Tensor,
) -> GroupWork | None:
    """``fast_path``, where the engine's call alone gives the result."""
    if factor is not None or (op is ReduceOp.MEAN and not result.is_floating_point()):
        return None
    return fast_path(comms, operation, opts, source, result, op)


def _run(
    comms: Comms,
    opts: Any,
    operation: Operation,
    op: ReduceOp,
    source: Array,
    result: Array | None,
    root: int = 0,
) -> Work:
    """Start a reduction. The engine has no mean of integers: they are summed, and divided here, as
    NCCL does, without the fraction."""
    if op is not ReduceOp.MEAN or source.dtype.kind not in "iu":
        return comms.run(operation, opts, source, result, op=op, root=root)
    work = comms.run(operation, opts, source, result, op=ReduceOp.SUM, root=root)
    if result is None:
        return work

    def divide(value: Any) -> Any:
        total = result if result.itemsize == 8 else result.astype(np.int64)
        size = total.dtype.type(comms.world_size)
        result[...] = (total - np.fmod(total, size)) // size
        return value

    return work.then(divide)


def _scalar(factor: float | Tensor, array: Array) -> Any:
    """The factor in the array's dtype, so that the product keeps it."""
    value = factor.item() if isinstance(factor, Tensor) else factor
    return np.asarray(value).astype(array.dtype)[()]


def all_reduce_sparse(comms: Comms, tensor: Tensor, opts: Any) -> GroupWork:
    """Sum a sparse COO ``tensor`` over all ranks, in place, with the entries of all ranks. Blocks
    until the end. ValueError for other reductions.

    As in Gloo, ranks may have different entries, so the ranks first gather the numbers of entries,
    then indices and values, padded to the largest number. Cost: three all_gathers, in which each
    rank sends ``w - 1`` times the bytes of the largest rank.
    """
    op, factor = reduction(opts, tensor.dtype)
    if op is not ReduceOp.SUM or factor is not None:
        raise ValueError(f"all_reduce: sparse tensors can only be summed, not op={op.value}")
    mine = tensor.detach().cpu().coalesce()
    counts = np.zeros(comms.world_size, dtype=np.int64)
    count = np.array([mine._nnz()], dtype=np.int64)
    comms.run(Operation.ALL_GATHER, opts, count, counts).wait()
    most, num_indices = int(counts.max()), math.prod(mine.shape[: mine.sparse_dim()])
    for rank, announced in enumerate(counts.tolist()):
        if not 0 <= announced <= num_indices:  # coalesced: one entry for each index at most
            raise RuntimeError(
                f"all_reduce: rank {rank} announces {announced} entries of a sparse tensor that "
                f"has {num_indices} indices; do all ranks pass tensors of the same shape?"
            )
    indices = _gather_rows(comms, mine.indices().t().contiguous(), most, opts)
    values = _gather_rows(comms, mine.values(), most, opts)
    kept = [slice(rank * most, rank * most + int(n)) for rank, n in enumerate(counts)]
    _warn_once()
    total = _checked_sparse(
        torch.cat([indices[part] for part in kept]).t(),
        torch.cat([values[part] for part in kept]),
        mine.shape,
    )
    with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
        tensor.copy_(total)  # not into tensor.data, which has indices of its own
    return GroupWork((), [tensor], comms.completions)


def _checked_sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()


@functools.cache
def _warn_once() -> None:
    """torch 2.11 warns, once in a process, that it has no setting whether sparse tensors are to
    be checked, although the call has the argument. Not in front of all calls: a change of filters
    makes Python forget which warnings it has shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
        _checked_sparse(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), (1,))


def _gather_rows(comms: Comms, rows: Tensor, most: int, opts: Any) -> Tensor:
    """Gather all ranks' rows, each rank's padded to ``most`` rows."""
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty((comms.world_size * most, *rows.shape[1:]))
    given, room = staging.as_array(padded), staging.as_array(gathered)
    comms.run(Operation.ALL_GATHER, opts, given, room).wait()
    return gathered


def reduction(opts: Any, dtype: torch.dtype) -> tuple[ReduceOp, float | Tensor | None]:
    """The reduction in ``opts`` (options, a torch ReduceOp, or None for SUM) of tensors of a
    ``dtype``, and its factor.

    The factor is that of PREMUL_SUM, by which every contribution is multiplied; None for others.
    TypeError, with torch's text, if the reduction is impossible or meaningless for the dtype.
    """
    op: Any = TorchOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op)
    try:
        chosen = _KINDS[kind]
    except (KeyError, TypeError):
        raise ValueError(
            f"the reduction {op!r} is unknown to potluck; use SUM, AVG, PREMUL_SUM, PRODUCT, MIN, "
            "MAX, BAND, BOR or BXOR of torch.distributed.ReduceOp"
        ) from None
    factor = op.__getstate__()[1] if kind == TorchOp.PREMUL_SUM else None
    _check(chosen, factor, dtype)
    return chosen, factor


def _check(op: ReduceOp, factor: float | Tensor | None, dtype: torch.dtype) -> None:
    if not staging.can_reduce(dtype) or (dtype is torch.complex32 and op is ReduceOp.PRODUCT):
        raise TypeError(
            f"Invalid scalar type: {dtype} can be moved but not combined by {op.name}; convert the "
            "tensor to a wider dtype first, for example tensor.float()"
        )
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) and (
        dtype.is_floating_point or dtype.is_complex
    ):
        raise TypeError(
            f"Cannot use ReduceOp.{op.name} with non-integral dtype {dtype}; it combines bits"
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        raise TypeError(
            f"ReduceOp.{op.name} of {dtype} has no meaning, complex numbers have no order; "
            "use it on tensor.abs() or on torch.view_as_real(tensor)"
        )
    if op is ReduceOp.MEAN and dtype is torch.bool:
        raise TypeError("ReduceOp.AVG of torch.bool has no meaning; convert it to a float tensor")
    if factor is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"ReduceOp.PREMUL_SUM of {dtype} would cut its factor to an integer; convert the "
            "tensor to floats, or sum it and multiply afterwards"
        )
