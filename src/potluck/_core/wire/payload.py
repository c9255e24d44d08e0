"""Payloads: nested Python values with arrays, as a header and raw buffers. No pickle.

A payload is any nesting of dict, list and tuple over NumPy arrays, torch tensors, NumPy scalars,
int (64 bits), float, bool, str, bytes and None. ``pack`` makes a msgpack header of it, in which
each array is an extension with its dtype and shape; the elements follow the header as raw bytes
(little-endian, C order) in the order of the extensions, and are not copied on the way. ``unpack``
reads a header that may be hostile: nothing is evaluated; the number of its values, their depth, the
types of keys (``msgpack_values.py`` says why) and the sum of the arrays are checked before any
memory is taken.

    header     msgpack: maps, arrays and scalars as they are; tuples as extension 2
    array      extension 1: kind u8, dtype code u8, then each dimension as a u64
    scalar     extension 3: dtype code u8, then the element

A tensor arrives as a tensor on the CPU where torch has been imported, else as a NumPy array.
Checkpoints use a format of their own (``checkpoint/state.py``), which other programs can read.
"""

from __future__ import annotations

import functools
import gc
import math
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from msgspec import MsgspecError
from msgspec.msgpack import Decoder, Encoder, Ext
from numpy.typing import NDArray

from potluck._core.wire.dtypes import code_of, dtype_named, dtype_of
from potluck._core.wire.immutable import library_of
from potluck._core.wire.msgpack_values import count_values
from potluck._core.wire.tensors import check_plain, host_bytes, is_tensor
from potluck.errors import ProtocolError

MAX_HEADER_BYTES = 16 << 20
MAX_VALUES = 1 << 20
"""Numbers, texts, keys, dicts, lists and so on, all together."""
MAX_DEPTH = 64
MAX_ARRAYS = 65_536

_MAX_DIMS = 32
_NUM_SPECS = 1024
"""Of descriptions of arrays, so many are kept: calls in a loop pass the same shapes."""
_PER_VALUE = 100
"""The most bytes of memory for a value beside its text: 72 for an empty dict in a list, 77 for each
of the three of a dict of one (measured with CPython 3.11)."""
_PER_CHARACTER = 4
"""A text with one emoji takes as many bytes for each of its characters."""
_ARRAY, _TUPLE, _SCALAR = 1, 2, 3
_NUMPY, _TORCH = 0, 1
_KEYS = frozenset({str, int, bool, type(None)})
_PLAIN = frozenset({str, bytes, bool, float, type(None)})
_HOLDS = (
    "a payload holds arrays, tensors, numbers, str, bytes, bool, None, and dicts, lists and tuples "
    "of them"
)

_encode = Encoder().encode


class _MisfitError(Exception):
    """A value that a payload can't hold."""

    def __init__(self, text: str) -> None:
        """``text`` follows the path of the value, which is known when the walk has unwound."""
        self.text = text
        self.steps: list[str] = []


class Packed(NamedTuple):
    """A payload on its way out. ``buffers`` are flat views of the caller's arrays, or of copies of
    those that are not contiguous host memory."""

    header: bytes
    buffers: list[memoryview]
    nbytes: int
    """The bytes of all buffers together."""


class Unpacked(NamedTuple):
    """A payload on its way in: ``value`` is complete when every buffer, in order, is filled."""

    value: Any
    buffers: list[memoryview]
    nbytes: int


def pack(value: Any, path: str = "payload") -> Packed:
    """``value`` as a header and buffers.

    TypeError, with the path of the value inside the payload (``payload["a"][3]``), for a type,
    dtype or number that a payload can't hold; ValueError if header, depth, number of values or of
    arrays exceeds its bound. Cost: no copy of contiguous arrays.
    """
    buffers: list[memoryview] = []
    try:
        header = _encode(_packed(value, buffers, 0))
    except _MisfitError as error:
        raise TypeError(f"{path}{''.join(reversed(error.steps))}{error.text}") from None
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"the texts, bytes and small values of {path} take {len(header)} bytes, more than "
            f"{MAX_HEADER_BYTES}: send long ones as arrays of uint8"
        )
    # A header of fewer bytes has fewer values.
    if len(header) > MAX_VALUES and count_values(header, MAX_VALUES, MAX_DEPTH) > MAX_VALUES:
        raise ValueError(
            f"{path} has more than {MAX_VALUES} values: send numbers as an array, not as a list"
        )
    if len(buffers) > MAX_ARRAYS:
        raise ValueError(f"{path} has {len(buffers)} arrays, more than {MAX_ARRAYS}")
    return Packed(header, buffers, sum(len(each) for each in buffers))


def unpack(header: bytes | bytearray | memoryview, limit: int) -> Unpacked:
    """The payload of ``header``, with new memory for its arrays.

    ProtocolError if it is no header that ``pack`` makes, if its arrays take more than ``limit``
    bytes together, or if it has more than ``MAX_VALUES`` values. What is decoded takes
    ``decoded_bytes`` at most.
    """
    return Unpacker(limit).unpack(header)


def decoded_bytes(header_bytes: int) -> int:
    """The most memory that the values of a header of ``header_bytes`` take, without its arrays."""
    return _PER_VALUE * min(header_bytes, MAX_VALUES) + _PER_CHARACTER * header_bytes


def _packed(value: Any, buffers: list[memoryview], depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is np.ndarray:
        return _array(value, buffers)
    if kind is int:
        if not -(2**63) <= value < 2**64:
            raise _MisfitError(" is an integer of more than 64 bits: send it as str")
        return value
    if depth == MAX_DEPTH:
        raise _MisfitError(f" is nested more than {MAX_DEPTH} deep")
    if kind is dict:
        parts = {}
        for key, item in value.items():
            if type(key) not in _KEYS:
                raise _MisfitError(
                    f" has the key {key!r:.60} of type {type(key).__qualname__}; keys of a payload "
                    "are str, int, bool or None"
                )
            try:
                parts[key] = _packed(item, buffers, depth + 1)
            except _MisfitError as error:
                error.steps.append(f'["{key}"]' if type(key) is str else f"[{key!r}]")
                raise
        return parts
    if kind is list or kind is tuple:
        row = []
        for item in value:
            try:
                row.append(_packed(item, buffers, depth + 1))
            except _MisfitError as error:
                error.steps.append(f"[{len(row)}]")
                raise
        return row if kind is list else Ext(_TUPLE, _encode(row))
    if isinstance(value, np.ndarray):
        return _array(value, buffers)
    if isinstance(value, np.generic):
        array = np.asarray(value)
        return Ext(_SCALAR, bytes([_code(array.dtype)]) + array.tobytes())
    if is_tensor(value):
        return _tensor(value, buffers)
    if (library := library_of(value)) is not None:
        try:
            return _array(library.read(value), buffers)
        except (TypeError, ValueError) as error:
            raise _MisfitError(f": {error}") from None
    raise _MisfitError(f" is of type {kind.__qualname__}; {_HOLDS}")


def _array(array: Any, buffers: list[memoryview]) -> Ext:
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise _MisfitError(" is a masked array, whose mask would be lost; send .data")
        array = np.asarray(array)  # a matrix would stay of two dimensions below
    dtype, shape = array.dtype, array.shape
    spec = _spec(_NUMPY, dtype, shape)
    if not (array.flags.c_contiguous and dtype.isnative):
        array = np.ascontiguousarray(array, dtype.newbyteorder("="))
    buffers.append(array.reshape(-1).view(np.uint8).data)
    return spec


def _tensor(tensor: Any, buffers: list[memoryview]) -> Ext:
    try:
        check_plain(tensor)
    except (TypeError, ValueError) as error:
        raise _MisfitError(f": {error}") from None
    if tensor.layout != sys.modules["torch"].strided:
        raise _MisfitError(f" is a tensor of layout {tensor.layout}; send .to_dense()")
    try:
        dtype = dtype_named(str(tensor.dtype).removeprefix("torch."))
    except TypeError as error:
        raise _MisfitError(f": {error}") from None
    buffers.append(host_bytes(tensor).data)
    return _spec(_TORCH, dtype, tuple(tensor.shape))


def _code(dtype: np.dtype[Any]) -> int:
    try:
        return code_of(dtype)
    except TypeError as error:
        raise _MisfitError(f": {error}") from None


@functools.lru_cache(_NUM_SPECS)
def _spec(kind: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Ext:
    return Ext(_ARRAY, struct.pack(f"<BB{len(shape)}Q", kind, _code(dtype), *shape))


class _Spec(NamedTuple):
    kind: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


@functools.lru_cache(_NUM_SPECS)
def _spec_in(data: bytes) -> _Spec:
    num_dims, rest = divmod(len(data) - 2, 8)
    if rest or not 0 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"an array's description of {len(data)} bytes")
    kind, code, *shape = struct.unpack(f"<BB{num_dims}Q", data)
    dtype = _dtype(code)
    # NumPy and torch multiply the dimensions of an empty array, too, in 64 bits with a sign.
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"an array of shape {tuple(shape)}")
    return _Spec(kind, dtype, tuple(shape), math.prod(shape) * dtype.itemsize)


class Unpacker:
    """Reads the headers of payloads, one at a time. It is part of a cycle, so make one for many."""

    def __init__(
        self,
        limit: int,
        allocate: Callable[[int], NDArray[np.uint8]] = lambda nbytes: np.empty(nbytes, np.uint8),
    ) -> None:
        """Memory for arrays, at most ``limit`` bytes per payload, comes from
        ``allocate(nbytes)``."""
        self._limit = limit
        self._allocate = allocate
        self._decode = Decoder(ext_hook=self._extension).decode
        self._buffers: list[memoryview] = []
        self._nbytes = 0

    def unpack(self, header: bytes | bytearray | memoryview) -> Unpacked:
        """See the function of this name."""
        self._nbytes = 0
        if count_values(header, MAX_VALUES, MAX_DEPTH) > MAX_VALUES:
            raise ProtocolError(f"the header of a payload has more than {MAX_VALUES} values")
        # The collector of cycles would look through all lists again and again while they are made:
        # a million of them took 17 times as long. A payload has no cycles.
        was_on = gc.isenabled()
        gc.disable()
        try:
            value = self._decode(header)
            return Unpacked(value, self._buffers, self._nbytes)
        except (MsgspecError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise ProtocolError(f"not the header of a payload: {error!r:.200}") from error
        finally:
            if was_on:
                gc.enable()
            self._buffers = []  # it must not keep the arrays alive

    def _extension(self, code: int, data: memoryview) -> Any:
        if code == _ARRAY:
            return self._array(data)
        if code == _TUPLE:
            return tuple(self._decode(data))
        if code == _SCALAR and len(data):
            dtype = _dtype(data[0])
            if len(data) == 1 + dtype.itemsize:
                return np.ndarray((), dtype, data, 1)[()]  # half the time of np.frombuffer
        raise ValueError(f"an unknown extension, {code} of {len(data)} bytes")

    def _array(self, data: memoryview) -> Any:
        kind, dtype, shape, nbytes = _spec_in(bytes(data))
        self._nbytes += nbytes
        if self._nbytes > self._limit:
            raise ProtocolError(
                f"a payload's arrays take {self._nbytes} bytes; at most {self._limit} are taken "
                "here"
            )
        if len(self._buffers) == MAX_ARRAYS:
            raise ValueError(f"more than {MAX_ARRAYS} arrays")
        flat = self._allocate(nbytes)
        self._buffers.append(flat.data)
        if kind == _TORCH and (torch := sys.modules.get("torch")) is not None:
            return _as_tensor(torch, flat, dtype, shape)
        return flat.view(dtype).reshape(shape)


def _dtype(code: int) -> np.dtype[Any]:
    dtype = dtype_of(code)
    if dtype is None:
        raise ValueError(f"the unknown dtype {code}")
    return dtype


def _as_tensor(torch: Any, flat: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    name = "bfloat16" if dtype == ml_dtypes.bfloat16 else dtype.name
    kind = getattr(torch, name)
    if not flat.size:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(flat, dtype=kind).reshape(shape)
