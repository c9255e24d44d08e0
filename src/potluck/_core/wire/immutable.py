"""Arrays of libraries whose arrays can't be changed, JAX and MLX, as NumPy arrays and back.

Neither library is imported here: a script that passes such an array has imported it.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_TRACED = (
    "a traced array has no values to communicate: call the operation outside of the function that "
    "{} transforms, on its results"
)


class Library(Protocol):
    """A library whose arrays can't be changed."""

    def read(self, array: Any) -> NDArray[Any]:
        """The elements of ``array``, read-only, of the same shape, on the host; without a copy
        where they are there. TypeError for a traced array, ValueError for a deleted one."""
        ...

    def make(self, data: NDArray[Any], like: Any) -> Any:
        """An array of ``data``, C-contiguous memory that is not written to any more, on the device
        of ``like``."""
        ...


class _Jax:
    def __init__(self, jax: Any) -> None:
        self._jax = jax

    def read(self, array: Any) -> NDArray[Any]:
        if isinstance(array, self._jax.core.Tracer):  # which is a jax.Array, too
            raise TypeError(_TRACED.format("jit, grad, vmap or pmap"))
        if not array.is_fully_addressable:
            raise TypeError("a part of the array is on other processes' devices: give the own part")
        if array.is_deleted():
            raise ValueError("the array was deleted, or donated to a jitted function")
        return np.asarray(array)

    def make(self, data: NDArray[Any], like: Any) -> Any:
        # With another shape it may not be possible to cut it as ``like`` is.
        where = like.sharding if data.shape == like.shape else min(like.devices(), key=_number)
        return self._jax.device_put(data, where)


class _Mlx:
    def __init__(self, core: Any) -> None:
        self._core = core

    def read(self, array: Any) -> NDArray[Any]:
        is_half = array.dtype == self._core.bfloat16  # which the buffer protocol does not know
        # Of an array of its own: `x[0] = 1` would else write into memory that is being sent.
        held = array.view(self._core.uint16) if is_half else copy.copy(array)
        try:
            data = np.array(held, copy=False)
        except ValueError:
            raise TypeError(_TRACED.format("compile or vmap")) from None
        data.flags.writeable = False  # it is the memory of an array that others share
        return data.view(ml_dtypes.bfloat16) if is_half else data

    def make(self, data: NDArray[Any], like: Any) -> Any:
        if data.dtype == ml_dtypes.bfloat16:
            return self._core.array(data.view(np.uint16)).view(self._core.bfloat16)
        return self._core.array(data, dtype=like.dtype)  # float64 would become float32


def library_of(value: Any) -> Library | None:
    """The library of ``value``; None if that is no array of such a library."""
    jax, mlx = sys.modules.get("jax"), sys.modules.get("mlx.core")
    # While another thread imports a library, it has no such name yet.
    if isinstance(value, getattr(jax, "Array", ())):
        return _Jax(jax)
    if isinstance(value, getattr(mlx, "array", ())):
        return _Mlx(mlx)
    return None


def _number(device: Any) -> int:
    return int(device.id)
