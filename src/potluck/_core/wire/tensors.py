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


def check_plain(tensor: Any) -> None:
    """TypeError or ValueError, with the remedy, for a tensor that is more, or less, than its
    elements in memory: ranks would exchange only these, and the rest would be lost or mixed."""
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        remedy = _REMEDIES.get(kind.__name__, "give its plain tensor")
        raise TypeError(f"a {kind.__name__} can't be communicated as it stands: {remedy}")
    if tensor.is_meta:
        raise ValueError(
            "the tensor is on the meta device and has no data to communicate; "
            "give it memory first, for example with torch.empty_like(tensor, device='cpu')"
        )
    if tensor.is_nested:
        raise TypeError(
            "nested tensors can't be communicated: ranks may have other lengths in them; "
            "give tensor.unbind() one by one, or torch.nested.to_padded_tensor(tensor, 0)"
        )
    if tensor.is_quantized:
        raise TypeError(
            "quantized tensors can't be communicated: their scale would be lost; "
            "give tensor.dequantize(), or tensor.int_repr() with the scale apart"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise TypeError(
            "tensors inside of vmap, grad and their kin can't be communicated: "
            "call the operation outside of the function that torch.func transforms"
        )


_REMEDIES = {
    "FakeTensor": "it has no data; call outside of FakeTensorMode",
    "MaskedTensor": "its mask would be lost; give tensor.get_data() and tensor.get_mask()",
    "DTensor": "give its shard, tensor.to_local(), or the whole, tensor.full_tensor()",
    "AsyncCollectiveTensor": "wait for it, and give tensor.wait()",
    "NestedTensor": "ranks may have other lengths in it; give tensor.unbind() one by one",
}


def memory_of(tensor: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The memory of a contiguous host tensor as a flat array of ``dtype``, which references the
    tensor.

    ``tensor.numpy()`` would also mark the storage as not resizable: later ``resize_`` and ``out=``
    calls on the user's tensor would fail.
    """
    return np.asarray(_Memory(tensor)).view(dtype)


def host_bytes(tensor: Any) -> NDArray[np.uint8]:
    """The elements of a strided tensor in C order as a flat array of bytes; a copy if the tensor is
    on a GPU or not contiguous. TypeError or ValueError as ``check_plain``."""
    check_plain(tensor)
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
