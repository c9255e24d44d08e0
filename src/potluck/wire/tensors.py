"""Torch tensors as memory. torch is never imported here: whoever has a tensor has imported it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def memory_of(tensor: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The memory of a contiguous host tensor as a flat array of ``dtype``, which references the
    tensor.

    ``tensor.numpy()`` would also mark the storage as not resizable: later ``resize_`` and ``out=``
    calls on the user's tensor would fail.
    """
    return np.asarray(_Memory(tensor)).view(dtype)


def host_bytes(tensor: Any) -> NDArray[np.uint8]:
    """The elements of a strided tensor in C order as a flat array of bytes; a copy if the tensor is
    on a GPU or not contiguous."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memory_of(plain, np.dtype(np.uint8))


class _Memory:
    """The bytes of a tensor as an object with NumPy's array interface."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
        }
