"""The dtypes of arrays that can be sent, and their one-byte codes in frames."""

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
"""Keyed by dtype, because NumPy takes microseconds to compute a dtype's name."""

NAMES = tuple(_CODES)

_TEXT = (
    "; text goes by ctx.send_message, or as numbers, such as "
    'np.frombuffer("text".encode(), np.uint8)'
)
_TIMES = "; send array.view(np.int64)"
_REMEDIES = {
    **{"U": _TEXT, "S": _TEXT, "T": _TEXT, "m": _TIMES, "M": _TIMES},
    "O": "; Python objects are not sent, nothing is pickled. A list of lists of unequal lengths "
    "makes such an array: see ctx.all_gather_uneven",
}
"""By the kind of a dtype that has no code."""


def code_of(dtype: np.dtype[Any]) -> int:
    """The code of ``dtype``; TypeError, with the supported dtypes, if there is none."""
    code = _CODES_OF.get(dtype)
    if code is not None:
        return code
    return code_of_name(dtype.name, _REMEDIES.get(dtype.kind, ""))


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype with this name in NumPy or torch; TypeError as of ``code_of``."""
    return _DTYPES[code_of_name(name)]


def dtype_of(code: int) -> np.dtype[Any] | None:
    """The dtype of a code; None if the code is unknown."""
    return _DTYPES.get(code)


def code_of_name(name: str, remedy: str = "") -> int:
    """The code of the dtype with this name; TypeError as of ``code_of``, with ``remedy``."""
    try:
        return _CODES[name]
    except KeyError:
        raise TypeError(
            f"arrays of dtype {name} can't be communicated; supported: {', '.join(NAMES)}{remedy}"
        ) from None
