"""The element types that travel, and their one-byte codes on the wire."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_CODES: dict[str, int] = {
    "float16": 1,
    "bfloat16": 2,
    "float32": 3,
    "float64": 4,
    "int8": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 8,
    "bool": 9,
    "int16": 10,
    "uint16": 11,
    "uint32": 12,
    "uint64": 13,
    "complex64": 14,
    "complex128": 15,
}
_DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name, code in _CODES.items()
}

_CODES_OF = {dtype: code for code, dtype in _DTYPES.items()}
"""By dtype: a dtype's name takes NumPy some microseconds to spell."""

NAMES = tuple(_CODES)


def code_of(dtype: np.dtype[Any]) -> int:
    """The wire code of ``dtype``; TypeError naming the supported ones if it has none."""
    code = _CODES_OF.get(dtype)
    if code is not None:
        return code
    return code_of_name(dtype.name)


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of this name, as NumPy and torch call it; TypeError as from ``code_of``."""
    return _DTYPES[code_of_name(name)]


def dtype_of(code: int) -> np.dtype[Any] | None:
    """The dtype behind a wire code, None if there is no such code."""
    return _DTYPES.get(code)


def code_of_name(name: str) -> int:
    """The wire code of the dtype of this name; TypeError as from ``code_of``."""
    try:
        return _CODES[name]
    except KeyError:
        raise TypeError(
            f"arrays of dtype {name} can't be communicated; supported: {', '.join(NAMES)}"
        ) from None
