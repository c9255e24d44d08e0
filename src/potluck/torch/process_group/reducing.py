"""Operations that combine: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from potluck.engine.layout import Array
from potluck.engine.work import Work
from potluck.torch.process_group import buffers
from potluck.torch.process_group.options import check_reduction, reduction, seconds
from potluck.torch.process_group.seat import Seat
from potluck.torch.process_group.staging import in_pieces, is_staged
from potluck.torch.process_group.work import GroupWork


def all_reduce(seat: Seat, tensor: Tensor, opts: Any) -> GroupWork:
    """In place on every rank."""
    buffers.check(tensor, "all_reduce")
    op, factor = reduction(opts)
    check_reduction(op, tensor.dtype)
    timeout_s = seconds(opts, seat.timeout_s)

    def post(array: Array) -> Work:
        if factor is not None:
            array *= _scalar(factor, array)
        return seat.communicator.all_reduce(array, op, timeout_s=timeout_s)

    if is_staged(seat, tensor):
        return in_pieces(seat, tensor, post)
    array, is_shared = buffers.on_host(tensor)
    work = post(array)
    settle = None if is_shared else lambda: buffers.store(array, tensor)
    return GroupWork((work,), [tensor], seat.completions, settle)


def reduce(seat: Seat, tensor: Tensor, opts: Any) -> GroupWork:
    """In place on rank ``opts.rootRank``; the others' tensors stay as they are."""
    buffers.check(tensor, "reduce")
    op, factor = reduction(opts)
    check_reduction(op, tensor.dtype)
    root = opts.rootRank
    array, is_shared = buffers.on_host(tensor)
    if factor is not None:
        array = array * _scalar(factor, array)
        is_shared = False
    work = seat.communicator.reduce(array, op, root, timeout_s=seconds(opts, seat.timeout_s))
    is_done = is_shared or root != seat.rank
    settle = None if is_done else lambda: buffers.store(array, tensor)
    return GroupWork((work,), [tensor], seat.completions, settle)


def reduce_scatter_single(seat: Seat, output: Tensor, source: Tensor, opts: Any) -> GroupWork:
    """``output`` becomes part ``rank`` of the combined ``source`` (world size times as long)."""
    buffers.check(source, "reduce_scatter")
    buffers.check(output, "reduce_scatter")
    if source.dtype != output.dtype:
        raise TypeError(
            f"reduce_scatter: the input is {source.dtype}, the output {output.dtype}; "
            "both must have one dtype"
        )
    if source.numel() != output.numel() * seat.world_size:
        raise ValueError(
            f"reduce_scatter: the input must have {seat.world_size} times the output's "
            f"{output.numel()} elements, one part per rank; it has {source.numel()}"
        )
    return _scatter_parts(seat, output, buffers.on_host(source)[0], opts)


def reduce_scatter(seat: Seat, output: Tensor, parts: Sequence[Tensor], opts: Any) -> GroupWork:
    """``output`` becomes the combination of all ranks' ``parts[rank]``."""
    if len(parts) != seat.world_size:
        raise ValueError(
            f"reduce_scatter: the input list has {len(parts)} tensors; it needs one for each of "
            f"the {seat.world_size} ranks"
        )
    buffers.equal_parts(parts, output, "reduce_scatter")
    return _scatter_parts(seat, output, buffers.pack(parts, "reduce_scatter"), opts)


def _scatter_parts(seat: Seat, output: Tensor, source: Array, opts: Any) -> GroupWork:
    buffers.check(output, "reduce_scatter")
    op, factor = reduction(opts)
    check_reduction(op, output.dtype)
    if factor is not None:
        source = source * _scalar(factor, source)
    array, is_shared = buffers.on_host(output)
    work = seat.communicator.reduce_scatter(
        array, source, op, timeout_s=seconds(opts, seat.timeout_s)
    )
    settle = None if is_shared else lambda: buffers.store(array, output)
    return GroupWork((work,), [output], seat.completions, settle)


def _scalar(factor: float | Tensor, array: Array) -> Any:
    """The factor in the array's dtype, so that the product keeps it."""
    value = factor.item() if isinstance(factor, Tensor) else factor
    return np.asarray(value).astype(array.dtype)[()]
