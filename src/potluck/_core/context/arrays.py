"""Conversion of users' arrays (of NumPy, torch, JAX and MLX) to the engine's, without copies if
possible.

NumPy's arrays and torch's tensors are changed in place; those of JAX and MLX can't be changed, so
results are new ones. None of the libraries is imported here: a script that passes a tensor has
imported torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from potluck._core.wire.dtypes import code_of, dtype_named
from potluck._core.wire.immutable import Library, library_of
from potluck._core.wire.tensors import check_plain, is_tensor, memory_of

Array = NDArray[Any]


class Adapted:
    """A user's array as a C-contiguous NumPy array of the same shape.

    ``array`` shares the user's memory if that is contiguous host memory; otherwise it is a copy,
    and ``write_back`` copies results into the user's array by ``store()``, which returns a new
    array in its place if it can't be changed, else None.
    """

    __slots__ = ("_store", "array", "user")

    def __init__(self, user: Any, array: Array, store: Callable[[], Any] | None) -> None:
        self.user = user
        self.array = array
        self._store = store

    @property
    def is_shared(self) -> bool:
        """Whether ``array`` is the user's memory."""
        return self._store is None

    def write_back(self, _result: Any = None) -> Any:
        """Copy the result into the user's array, and return that array, or the new one in its
        place; for ``Work.then``."""
        if self._store is not None:
            made = self._store()
            self.user = self.user if made is None else made
        return self.user


def adapt(user: Any, *, writable: bool = True, device: str | None = None) -> Adapted:
    """An array or tensor as the communicator uses it: a NumPy array, or a tensor on ``device``.

    TypeError for other objects and for unsupported dtypes; ValueError if a result would have to be
    written into read-only memory.
    """
    if not _is_plain(user) and (library := library_of(user)) is not None:
        data = library.read(user)
        code_of(data.dtype)
        if not writable:
            return Adapted(user, _adapt_plain(data, False, device).array, None)
        return _made(library, user, np.array(data, order="C"), device)
    return _adapt_plain(user, writable, device)


def room_like(user: Any, shape: tuple[int, ...], *, device: str | None = None) -> Adapted:
    """``adapt`` of a new array of ``shape``, of the kind, dtype and device of ``user``."""
    if not _is_plain(user) and (library := library_of(user)) is not None:
        return _made(library, user, np.empty(shape, library.read(user).dtype), device)
    return adapt(empty_like(user, shape), device=device)


def _is_plain(user: Any) -> bool:
    """Whether ``user`` can be changed: the usual case, which asks no other library."""
    return isinstance(user, np.ndarray) or is_tensor(user)


def _made(library: Library, user: Any, data: Array, device: str | None) -> Adapted:
    """``data``, new memory, of which ``write_back`` makes an array like ``user``."""
    inner = _adapt_plain(data, True, device)

    def make() -> Any:
        inner.write_back()
        return library.make(data, user)

    return Adapted(user, inner.array, make)


def _adapt_plain(user: Any, writable: bool, device: str | None) -> Adapted:
    if device is not None:
        return _adapt_to_device(user, writable, device)
    if isinstance(user, np.ndarray):
        return _adapt_numpy(user, writable)
    if is_tensor(user):
        return _adapt_tensor(user)
    told = "wrap it with numpy.asarray(...)"
    if isinstance(user, dict):
        told = "pass each of its arrays; other values go by ctx.send_message"
    kinds = "an array of NumPy, torch, JAX or MLX"
    raise TypeError(f"expected {kinds}, got {type(user).__name__}; {told}")


def is_array(user: Any) -> bool:
    """Whether ``user`` is a plain NumPy array (no subclass) or a torch tensor with a shape."""
    return type(user) is np.ndarray or (is_tensor(user) and not user.is_nested)


def empty_like(user: Any, shape: tuple[int, ...]) -> Any:
    """A new array or tensor of ``shape``, with the kind, dtype and device of ``user``."""
    if is_tensor(user):
        return user.new_empty(shape)
    return np.empty(shape, dtype=user.dtype)


def _adapt_numpy(user: Array, writable: bool) -> Adapted:
    dtype, flags = user.dtype, user.flags
    code_of(dtype)
    if not dtype.isnative:
        raise TypeError(f"arrays in foreign byte order can't be communicated: {dtype.str}")
    if writable and not flags.writeable:
        raise ValueError("the array is read-only, and the result would go into it; pass a copy")
    is_plain = type(user) is np.ndarray
    if not is_plain and isinstance(user, np.ma.MaskedArray):
        raise TypeError("masked arrays can't be communicated: their mask would be lost; use .data")
    if flags.c_contiguous:
        return Adapted(user, user if is_plain else user.view(np.ndarray), None)
    array = np.ascontiguousarray(user)
    return Adapted(user, array, lambda: np.copyto(user, array))


def _adapt_tensor(user: Any) -> Adapted:
    torch = sys.modules["torch"]
    check_plain(user)
    detached = user.detach()
    if detached.layout != torch.strided:
        raise TypeError(f"tensors of layout {user.layout} can't be communicated; use .to_dense()")
    host = detached.cpu().resolve_conj().resolve_neg().contiguous()
    shares_memory = host.data_ptr() == detached.data_ptr() and host.device == detached.device
    store = None if shares_memory else lambda: user.data.copy_(host)
    dtype = dtype_named(str(host.dtype).removeprefix("torch."))
    return Adapted(user, memory_of(host, dtype).reshape(user.shape), store)


def _adapt_to_device(user: Any, writable: bool, device: str) -> Adapted:
    """A torch tensor on ``device``, for libraries that move memory of an accelerator."""
    torch = sys.modules["torch"]
    if is_tensor(user):
        check_plain(user)
        source = user.detach()
    else:
        host = adapt(user, writable=writable)
        bits = host.array.view(np.int16) if host.array.dtype == ml_dtypes.bfloat16 else host.array
        source = torch.from_numpy(bits if bits.flags.writeable else bits.copy())
        if bits is not host.array:
            source = source.view(torch.bfloat16)
    moved = source.to(device).contiguous()
    if is_tensor(user):
        is_shared = moved.data_ptr() == source.data_ptr() and moved.device == source.device
        store = None if is_shared else lambda: user.data.copy_(moved)
    else:

        def store() -> None:
            source.copy_(moved)
            host.write_back()

    return Adapted(user, moved, store)


def collide(given: Any, result: Any, rank: int, world_size: int) -> bool:
    """Whether two arrays overlap, other than as a whole and its part ``rank``."""
    if not np.may_share_memory(given, result):
        return False
    part, whole = sorted((given, result), key=lambda array: int(array.nbytes))
    begin: int = whole.ctypes.data + rank * part.nbytes
    is_part: bool = world_size * part.nbytes == whole.nbytes and part.ctypes.data == begin
    return not is_part
