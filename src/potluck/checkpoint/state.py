"""States as bytes: conversion of nested Python values and tensors to and from safetensors.

A state is any nesting of dict, list and tuple over torch tensors, NumPy arrays, int, float, bool,
str and None, such as the result of ``state_dict()``. The tensors become the entries of one
safetensors buffer, named after their paths; its metadata has the nesting as a JSON tree. Reading is
safe for untrusted bytes: nothing is evaluated (there is no pickle), every length is checked before
use, and invalid data raises CheckpointError.

torch is imported only for a state with torch tensors. Decoded tensors are on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

from potluck._core.optional import require
from potluck._core.wire.tensors import check_plain, host_bytes
from potluck.errors import CheckpointError

State = Any
"""A nesting of dict, list and tuple over tensors, arrays and scalars."""

MAX_DEPTH = 64
_TREE = "potluck.tree"

# The name of each dtype of safetensors in NumPy, ml_dtypes and torch.
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
SUPPORTED = frozenset(_NAMES.values())
"""The names of the dtypes that a state can hold."""


class Spec(NamedTuple):
    """One tensor of a state without its bytes: the name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        # ml_dtypes has registered bfloat16 with NumPy.
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a state: the name of its dtype, its shape, and its bytes as a flat uint8 array
    (little-endian, C order)."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def sha3_256(self) -> str:
        """Hex SHA3-256 of dtype, shape and bytes."""
        hashed = hashlib.sha3_256(f"{self.dtype}{list(self.shape)}".encode())
        hashed.update(self.data.data)
        return hashed.hexdigest()


def digest(data: bytes | bytearray | memoryview) -> str:
    """Hex SHA3-256 of ``data``."""
    return hashlib.sha3_256(data).hexdigest()


def fingerprint(state: State) -> str:
    """Hex SHA-256 of ``state``; equal if and only if all types, shapes and bits are equal.

    TypeError, with the path, for a value that a state can't hold. Cost: reads every byte once (1.3
    GB/s where the processor has instructions for it, as SHA3 has none); copies only tensors that
    are not contiguous or not on the CPU.
    """
    tree, entries = flatten(state)
    hashed = hashlib.sha256(json.dumps(tree).encode())
    for name, entry in entries.items():
        hashed.update(f"\0{name}\0{entry.dtype}{list(entry.shape)}\0".encode())
        hashed.update(entry.data.data)
    return hashed.hexdigest()


def encode(state: State) -> bytes:
    """``state`` as one safetensors buffer; equal states give equal bytes.

    TypeError, with the path, for a value that a state can't hold.
    """
    tree, entries = flatten(state)
    return encode_entries(tree, entries)


def encode_entries(tree: Any, entries: dict[str, Entry]) -> bytes:
    """``encode`` for the results of ``flatten``. ``tree`` may be None for a part of a state."""
    specs = {
        name: safetensors.TensorSpec(
            dtype=entry.dtype,
            shape=list(entry.shape),
            data_ptr=entry.data.ctypes.data,
            data_len=entry.data.nbytes,
        )
        for name, entry in entries.items()
    }
    return bytes(safetensors.serialize(specs, metadata={_TREE: json.dumps(tree)}))


def decode(data: bytes) -> State:
    """The state in ``data``, which may be untrusted; CheckpointError if it is no valid state.

    Cost: one copy of the tensors.
    """
    return unflatten(*decode_entries(data))


def decode_entries(data: bytes) -> tuple[Any, dict[str, Entry]]:
    """The JSON tree and the tensors in ``data``, as ``unflatten`` takes them."""
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        # safetensors has checked the header, with its length and its JSON.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tree = json.loads(header["__metadata__"][_TREE], parse_constant=_no_constant)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"not a potluck state: {error or type(error).__name__}") from error
    entries = {}
    for name, value in found:
        if value["dtype"] not in _NAMES:
            raise CheckpointError(f"the tensor {name!r} has the unknown dtype {value['dtype']}")
        array = np.frombuffer(value["data"], np.uint8)
        entries[name] = Entry(_NAMES[value["dtype"]], tuple(value["shape"]), array)
    return tree, entries


def flatten(state: State) -> tuple[Any, dict[str, Entry]]:
    """Split ``state`` into a JSON tree and its tensors by the names that the tree refers to."""
    tensors: dict[str, Any] = {}
    tree = _flatten(state, "", tensors, 0)
    return tree, {name: _entry(tensor, name) for name, tensor in tensors.items()}


def specs(state: State) -> dict[str, Spec]:
    """The tensors of ``state`` by name, without their bytes. TypeError as ``encode``."""
    tensors: dict[str, Any] = {}
    _flatten(state, "", tensors, 0)
    return {name: Spec(*_dtype_and_shape(each, name)) for name, each in tensors.items()}


def head_bytes(data: bytes | bytearray) -> int:
    """How many bytes of an encoded state its head takes, from the first 8 of them."""
    return 8 + int.from_bytes(data[:8], "little")


def specs_in(head: bytes | bytearray) -> dict[str, Spec]:
    """The tensors of an encoded state by its head, which may be untrusted; CheckpointError if it is
    none."""
    try:
        header = dict(json.loads(head[8:]))
        header.pop("__metadata__", None)
        return {
            name: Spec(_NAMES[each["dtype"]], tuple(map(_size, each["shape"])))
            for name, each in header.items()
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"not the head of a potluck state: {error!r:.200}") from error


def unflatten(tree: Any, entries: dict[str, Entry]) -> State:
    """The inverse of ``flatten``; CheckpointError if tree and tensors do not match."""
    left = dict(entries)
    state = _unflatten(tree, left, 0)
    if left:
        raise CheckpointError(f"the tree of a state lacks {len(left)} tensors: {min(left)!r}, ...")
    return state


def _flatten(value: Any, path: str, tensors: dict[str, Any], depth: int) -> Any:
    where = path or "the state"
    if depth > MAX_DEPTH:
        raise TypeError(f"{where} is nested more than {MAX_DEPTH} deep")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, dict):
        return {"dict": [_flatten_item(k, v, path, tensors, depth) for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        parts = enumerate(value)
        return {kind: [_flatten(v, _join(path, i), tensors, depth + 1) for i, v in parts]}
    if isinstance(value, np.ndarray):
        return {"array": _add(value, path, tensors)}
    if isinstance(value, np.generic):
        return {"scalar": _add(np.asarray(value), path, tensors)}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return {"tensor": _add(value, path, tensors)}
    raise TypeError(
        f"{where} is a {type(value).__name__}; a state holds tensors, arrays, numbers, strings, "
        "None, and dicts, lists and tuples of them"
    )


def _flatten_item(
    key: Any, value: Any, path: str, tensors: dict[str, Any], depth: int
) -> list[Any]:
    if key is not None and type(key) not in (bool, int, str):
        raise TypeError(f"{path or 'the state'} has a {type(key).__name__} as a key: {key!r}")
    return [key, _flatten(value, _join(path, key), tensors, depth + 1)]


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _add(tensor: Any, path: str, tensors: dict[str, Any]) -> str:
    name = path or "value"
    while name in tensors or name == "__metadata__":
        name += "~"
    tensors[name] = tensor
    return name


def _dtype_and_shape(tensor: Any, where: str) -> tuple[str, tuple[int, ...]]:
    if isinstance(tensor, np.ndarray):
        name, what = tensor.dtype.name, f"an array of dtype {tensor.dtype}"
    else:
        try:
            check_plain(tensor)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where}: {error}") from None
        strided = tensor.layout == sys.modules["torch"].strided
        name = str(tensor.dtype).removeprefix("torch.") if strided else ""
        what = f"a {tensor.layout} tensor of dtype {tensor.dtype}"
    if name not in SUPPORTED:
        raise TypeError(f"{where} is {what}, which a state can't hold")
    return name, tuple(tensor.shape)


def _entry(tensor: Any, where: str) -> Entry:
    dtype, shape = _dtype_and_shape(tensor, where)
    if isinstance(tensor, np.ndarray):
        order = tensor.dtype.newbyteorder("<") if tensor.dtype.byteorder == ">" else tensor.dtype
        return Entry(dtype, shape, np.ascontiguousarray(tensor, order).reshape(-1).view(np.uint8))
    return Entry(dtype, shape, host_bytes(tensor))


def _unflatten(node: Any, left: dict[str, Entry], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CheckpointError(f"a state is nested more than {MAX_DEPTH} deep")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if not isinstance(node, dict) or len(node) != 1:
        raise CheckpointError("the tree of a state has a node that potluck never writes")
    kind, body = next(iter(node.items()))
    if kind == "float" and body in ("nan", "inf", "-inf"):
        return float(body)
    if kind in ("list", "tuple") and isinstance(body, list):
        parts = [_unflatten(part, left, depth + 1) for part in body]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict" and isinstance(body, list):
        return dict(_unflatten_item(item, left, depth) for item in body)
    if kind in ("array", "scalar", "tensor") and isinstance(body, str):
        entry = left.pop(body, None)
        if entry is None:
            raise CheckpointError(f"the tensor {body!r} is missing, or is used twice")
        return _restore(kind, entry)
    raise CheckpointError(f"the tree of a state has the unknown node {kind!r:.40}")


def _unflatten_item(item: Any, left: dict[str, Entry], depth: int) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise CheckpointError("the tree of a state has a dict item that is no pair")
    key, value = item
    if key is not None and not isinstance(key, bool | int | str):
        raise CheckpointError("the tree of a state has a dict key that potluck never writes")
    return key, _unflatten(value, left, depth + 1)


def _restore(kind: str, entry: Entry) -> Any:
    if kind == "tensor":
        torch = require("torch", "torch")
        dtype = getattr(torch, entry.dtype)
        if not entry.data.size:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(entry.data, dtype=dtype).reshape(entry.shape)
    dtype = ml_dtypes.bfloat16 if entry.dtype == "bfloat16" else entry.dtype
    array = entry.data.view(dtype).reshape(entry.shape)
    return array[()] if kind == "scalar" else array


def _size(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is no size")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
