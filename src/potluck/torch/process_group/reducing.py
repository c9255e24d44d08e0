"""Operations with a reduction: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from potluck._core.codecs import codec_of
from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.coding import Encoding
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.request import Request
from potluck._core.engine.work import Work
from potluck._core.types import ReduceOp
from potluck.torch.process_group import buffers
from potluck.torch.process_group.comms import Comms
from potluck.torch.process_group.options import check_reduction, reduction, seconds
from potluck.torch.process_group.staging import in_columns, in_pieces, is_staged
from potluck.torch.process_group.work import GroupWork


def all_reduce(comms: Comms, tensor: Tensor, opts: Any) -> GroupWork:
    """Reduce ``tensor`` over all ranks, in place on every rank."""
    buffers.check(tensor, "all_reduce")
    op, factor = reduction(opts)
    check_reduction(op, factor, tensor.dtype)
    timeout_s = seconds(opts, comms.timeout_s)

    def post(array: Array) -> Work:
        if factor is not None:
            array *= _scalar(factor, array)
        work = comms.communicator.run(
            Request(Operation.ALL_REDUCE, array, array, _posted(op, array), timeout_s=timeout_s)
        )
        return _averaged(work, op, array, comms.world_size)

    if is_staged(comms, tensor):
        return in_pieces(comms, tensor, post)
    if _can_be_fast(op, factor, tensor) and comms.fast_path(
        Operation.ALL_REDUCE, opts, tensor, tensor, op
    ):
        return GroupWork((), [tensor], comms.completions)
    array, is_shared = buffers.on_host(tensor)
    work = post(array)
    settle = _settle(work, op, array, tensor, is_shared)
    return GroupWork((work,), [tensor], comms.completions, settle)


def all_reduce_encoded(
    comms: Comms, tensor: Tensor, codec: str, residual: Tensor | None
) -> GroupWork:
    """The mean of ``tensor`` over all ranks, in place on every rank, sent encoded by ``codec``."""
    buffers.check(tensor, "all_reduce_encoded")
    array, is_shared = buffers.on_host(tensor)
    kept = None if residual is None else buffers.as_array(residual)
    work = comms.communicator.run(
        Request(
            Operation.ALL_REDUCE,
            array,
            array,
            ReduceOp.MEAN,
            encoding=Encoding(codec_of(codec), kept),
            timeout_s=comms.timeout_s,
        )
    )
    settle = _settle(work, ReduceOp.MEAN, array, tensor, is_shared)
    return GroupWork((work,), [tensor], comms.completions, settle)


def reduce(comms: Comms, tensor: Tensor, opts: Any) -> GroupWork:
    """Reduce ``tensor`` over all ranks, in place on rank ``opts.rootRank``; other ranks' tensors
    are unchanged."""
    buffers.check(tensor, "reduce")
    op, factor = reduction(opts)
    check_reduction(op, factor, tensor.dtype)
    root = opts.rootRank
    timeout_s = seconds(opts, comms.timeout_s)

    def post(array: Array) -> Work:
        result = array if root == comms.rank else None
        work = comms.communicator.run(
            Request(
                Operation.REDUCE, array, result, _posted(op, array), root=root, timeout_s=timeout_s
            )
        )
        return work if result is None else _averaged(work, op, array, comms.world_size)

    if is_staged(comms, tensor):
        return _reduce_staged(comms, tensor, post, factor, root)
    array, is_shared = buffers.on_host(tensor)
    if factor is not None:
        array = array * _scalar(factor, array)
        is_shared = False
    work = post(array)
    settle = _settle(work, op, array, tensor, is_shared) if root == comms.rank else None
    return GroupWork((work,), [tensor], comms.completions, settle)


def _reduce_staged(
    comms: Comms, tensor: Tensor, post: Callable[[Array], Work], factor: float | Tensor | None,
    root: int,
) -> GroupWork:  # fmt: skip
    is_root = root == comms.rank

    def scaled(array: Array) -> Work:
        if factor is None:
            return post(array)
        if not is_root:  # the array may be the user's memory, which must not change
            return post(array * _scalar(factor, array))
        array *= _scalar(factor, array)
        return post(array)

    return in_pieces(comms, tensor, scaled, writes=is_root)


def reduce_scatter_single(comms: Comms, output: Tensor, source: Tensor, opts: Any) -> GroupWork:
    """Reduce ``source``, world size times as long as ``output``; rank r gets part r of the
    result."""
    buffers.check(source, "reduce_scatter")
    buffers.check(output, "reduce_scatter")
    if source.dtype != output.dtype:
        raise TypeError(
            f"reduce_scatter: the input is {source.dtype}, the output {output.dtype}; "
            "both must have one dtype"
        )
    if source.numel() != output.numel() * comms.world_size:
        raise ValueError(
            f"reduce_scatter: the input must have {comms.world_size} times the output's "
            f"{output.numel()} elements, one part per rank; it has {source.numel()}"
        )
    if is_staged(comms, output, comms.world_size):
        parts = source.detach().reshape(comms.world_size, -1)
        return _scatter_staged(comms, output, list(parts), opts)
    op, factor = reduction(opts)
    check_reduction(op, factor, output.dtype)
    if _can_be_fast(op, factor, output) and comms.fast_path(
        Operation.REDUCE_SCATTER, opts, source, output, op
    ):
        return GroupWork((), [output], comms.completions)
    return _scatter_parts(comms, output, buffers.on_host(source)[0], opts)


def reduce_scatter(comms: Comms, output: Tensor, parts: Sequence[Tensor], opts: Any) -> GroupWork:
    """Reduce ``parts`` of all ranks; rank r gets the result of ``parts[r]`` in ``output``."""
    if len(parts) != comms.world_size:
        raise ValueError(
            f"reduce_scatter: the input list has {len(parts)} tensors; it needs one for each of "
            f"the {comms.world_size} ranks"
        )
    buffers.equal_parts(parts, output, "reduce_scatter")
    if is_staged(comms, output, comms.world_size):
        for part in (*parts, output):
            buffers.check(part, "reduce_scatter")
        return _scatter_staged(comms, output, parts, opts)
    return _scatter_parts(comms, output, buffers.pack(parts, "reduce_scatter"), opts)


def _scatter_parts(comms: Comms, output: Tensor, source: Array, opts: Any) -> GroupWork:
    buffers.check(output, "reduce_scatter")
    post, op = _scattering(comms, output, opts)
    array, is_shared = buffers.on_host(output)
    work = post(source, array)
    settle = _settle(work, op, array, output, is_shared)
    return GroupWork((work,), [output], comms.completions, settle)


def _scatter_staged(comms: Comms, output: Tensor, parts: Sequence[Tensor], opts: Any) -> GroupWork:
    post, _ = _scattering(comms, output, opts)
    return in_columns(comms, parts, [output], post, world_parts=comms.world_size)


def _scattering(
    comms: Comms, output: Tensor, opts: Any
) -> tuple[Callable[[Array, Array], Work], ReduceOp]:
    """A function that posts a reduce_scatter of (all parts, result), and its reduction."""
    op, factor = reduction(opts)
    check_reduction(op, factor, output.dtype)
    timeout_s = seconds(opts, comms.timeout_s)

    def post(source: Array, array: Array) -> Work:
        if factor is not None:
            source = source * _scalar(factor, source)
        kind = _posted(op, array)
        work = comms.communicator.run(
            Request(Operation.REDUCE_SCATTER, source, array, kind, timeout_s=timeout_s)
        )
        return _averaged(work, op, array, comms.world_size)

    return post, op


def _can_be_fast(op: ReduceOp, factor: float | Tensor | None, tensor: Tensor) -> bool:
    """Whether the engine's call alone gives the result."""
    return factor is None and (op is not ReduceOp.MEAN or tensor.is_floating_point())


def _is_rounded(op: ReduceOp, array: Array) -> bool:
    return op is ReduceOp.MEAN and array.dtype.kind in "iu"


def _posted(op: ReduceOp, array: Array) -> ReduceOp:
    """The engine has no mean of integers; they are summed, and divided here."""
    return ReduceOp.SUM if _is_rounded(op, array) else op


def _averaged(work: Work, op: ReduceOp, array: Array, world_size: int) -> Work:
    """Integers are divided as NCCL does: the fraction is dropped."""

    def divide(result: Any) -> Any:
        total = array if array.itemsize == 8 else array.astype(np.int64)
        size = total.dtype.type(world_size)
        array[...] = (total - np.fmod(total, size)) // size
        return result

    return work.then(divide) if _is_rounded(op, array) else work


def _settle(
    work: Work, op: ReduceOp, array: Array, tensor: Tensor, is_shared: bool
) -> Callable[[], None] | None:
    """What is left to do once ``work`` has ended."""
    if is_shared and not _is_rounded(op, array):
        return None

    def settle() -> None:
        work.wait()
        if not is_shared:
            buffers.store(array, tensor)

    return settle


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
    indices = _gather_rows(comms, mine.indices().t().contiguous(), most, timeout_s)
    values = _gather_rows(comms, mine.values(), most, timeout_s)
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
    """torch 2.11 warns, once in a process, that nobody said whether sparse tensors are to be
    checked, although the call says it. Not in front of all calls: a change of filters makes Python
    forget which warnings it has shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
        _checked_sparse(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), (1,))


def _gather_rows(comms: Comms, rows: Tensor, most: int, timeout_s: float) -> Tensor:
    """Gather all ranks' rows, each rank's padded to ``most`` rows."""
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty((comms.world_size * most, *rows.shape[1:]))
    given, room = buffers.as_array(padded), buffers.as_array(gathered)
    comms.communicator.run(Request(Operation.ALL_GATHER, given, room, timeout_s=timeout_s)).wait()
    return gathered
