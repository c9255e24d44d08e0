"""Conversion of tensors to the engine's arrays: flat, contiguous, in host memory, without a copy
where that is possible.

Dtypes that NumPy lacks are converted to another one of the same size: bfloat16 to that of ml_dtypes
(which can be reduced), float8 and others to bytes (which can only be moved).

An operation changes only the values of a user's tensor, not its storage (which stays resizable),
strides, flags, ``requires_grad`` or version counter. So, as with Gloo and NCCL, autograd does not
notice that an operation wrote into a tensor that it has saved. Therefore results are copied through
``tensor.data``, which has a version counter of its own; ``detach()`` shares the tensor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from potluck._core.engine.arrays.layout import Array
from potluck._core.wire.tensors import check_plain, memory_of

_PLAIN: dict[torch.dtype, np.dtype[Any]] = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int16,
        torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16,
        torch.uint32, torch.uint64,
    )
}  # fmt: skip
_ARRAYS = _PLAIN | {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.complex32: np.dtype(np.float16),
}
"""The dtypes that the engine can reduce; tensors of other dtypes are bytes for it."""
_BYTES = np.dtype(np.uint8)


def check(tensor: Tensor, operation: str) -> None:
    """TypeError or ValueError, with the remedy, if ``tensor`` can't be communicated."""
    try:
        check_plain(tensor)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{operation}: {error}") from None
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{operation}: tensors of layout {tensor.layout} can't be communicated; "
            "use tensor.to_dense() (all_reduce takes sparse COO tensors as they are)"
        )


def on_host(tensor: Tensor) -> tuple[Array, bool]:
    """``tensor`` as a flat array, and whether the array shares its memory (else it is a copy)."""
    detached = tensor.detach() if tensor.requires_grad else tensor
    if detached.is_conj() or detached.is_neg():
        detached = detached.resolve_conj().resolve_neg()
    host = detached.cpu() if detached.device.type != "cpu" else detached
    is_shared = host is tensor or detached is host
    if not host.is_contiguous():
        host, is_shared = host.contiguous(), False
    if is_shared and (tensor.is_conj() or tensor.is_neg()):
        is_shared = False
    return as_array(host), is_shared


def as_array(host: Tensor) -> Array:
    """The memory of a contiguous host tensor as a flat array."""
    return memory_of(host, _ARRAYS.get(host.dtype, _BYTES))


def store(array: Array, tensor: Tensor) -> None:
    """Copy ``array``, a result of ``on_host``, back into ``tensor``."""
    tensor.data.copy_(as_tensor(array, tensor.dtype).view(tensor.shape))


def as_tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """The array's memory as a flat host tensor of ``dtype``."""
    if dtype in _PLAIN:
        return torch.from_numpy(array)
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array.view(np.uint8)).view(dtype)


def can_reduce(dtype: torch.dtype) -> bool:
    """Whether the engine can reduce tensors of ``dtype``; others it can only move."""
    return dtype in _ARRAYS


def pack(tensors: Sequence[Tensor], operation: str) -> Array:
    """Concatenate tensors of one dtype in a new array."""
    first = tensors[0]
    for tensor in tensors:
        check(tensor, operation)
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{operation}: all tensors of a list must have one dtype, got {first.dtype} "
                f"and {tensor.dtype}"
            )
    flat = [tensor.detach().reshape(-1).cpu() for tensor in tensors]
    return as_array(flat[0].clone() if len(flat) == 1 else torch.cat(flat))


def room_for(tensors: Sequence[Tensor], operation: str) -> Array:
    """An uninitialized array for ``unpack`` into ``tensors``."""
    for tensor in tensors:
        check(tensor, operation)
    length = sum(tensor.numel() for tensor in tensors)
    return as_array(torch.empty(length, dtype=tensors[0].dtype))


def unpack(array: Array, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of ``array`` into ``tensors``, the inverse of ``pack``."""
    if not tensors:
        return
    flat = as_tensor(array, tensors[0].dtype)
    offset = 0
    for tensor in tensors:
        part = flat[offset : offset + tensor.numel()]
        tensor.data.copy_(part.view(tensor.shape))
        offset += tensor.numel()


def equal_parts(tensors: Sequence[Tensor], like: Tensor, what: str) -> None:
    """ValueError or TypeError unless every tensor has the size and dtype of ``like``."""
    for index, tensor in enumerate(tensors):
        if tensor.numel() != like.numel():
            raise ValueError(
                f"{what}: tensor {index} of the list has {tensor.numel()} elements, but this "
                f"rank's own has {like.numel()}; all must have the same size (invalid tensor size)"
            )
        if tensor.dtype != like.dtype:
            raise TypeError(
                f"{what}: tensor {index} of the list is {tensor.dtype}, but this rank's own is "
                f"{like.dtype}; all must have the same dtype (invalid tensor type)"
            )
