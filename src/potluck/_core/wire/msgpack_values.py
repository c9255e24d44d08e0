"""The check of a msgpack text before it is decoded: how many values, how deep, which keys.

A bound on the bytes of a text is none on what its decoding costs:

- a value of one byte, such as an empty map, becomes an object of 64 bytes;
- keys that are arrays become tuples, and tuples with equal hashes are easily made (``hash(-1) ==
  hash(-2)``), so a map of n of them takes n * n comparisons, during which no thread runs. Keys of
  payloads are texts (whose hashes are random in each process), integers, booleans and None. Python
  spreads integers so that a few at most share their whole search;
- containers within containers take the decoder's stack.

Format: https://github.com/msgpack/msgpack/blob/master/spec.md. The native core has a twin
(``native/core/wire/msgpack_values.cpp``).
"""

from __future__ import annotations

from typing import NamedTuple

from potluck._core import native
from potluck.errors import ProtocolError

TUPLE = 2
"""The extension whose content is a msgpack array (``payload.py``)."""

_TORN, _TOO_DEEP, _BAD_KEY = -1, -2, -3
_WHY = {
    _TORN: "it is no msgpack text of a payload",
    _TOO_DEEP: "it nests lists and dicts too deep",
    _BAD_KEY: "a dict has a key that is no str, int, bool or None",
}


def count_values(text: bytes | bytearray | memoryview, most: int, max_depth: int) -> int:
    """The number of values in ``text``: numbers, texts, keys, maps, arrays and so on, also inside
    others. Ends with ``most + 1`` when there are more.

    ProtocolError for a text that is no single msgpack value or ends early, that has a key of
    another type than those of payloads, or containers nested deeper than ``max_depth``; found
    only as far as the count goes. Cost for each value: 4 ns in the native core, 0.2 us in Python;
    the bytes of texts are passed over.
    """
    count = (native.core.count_values if native.available else count_in_python)(
        text, most, max_depth
    )
    if count < 0:
        raise ProtocolError(f"not the header of a payload: {_WHY[count]}")
    return count


def count_in_python(text: bytes | bytearray | memoryview, most: int, max_depth: int) -> int:
    """The twin of the native core's ``count_values``: the count, or the code of what is wrong."""
    data = memoryview(text)
    size = len(data)
    at = count = depth = 0
    left = 1
    """Keys and values of the innermost container that are still to come."""
    is_map = False
    end = 0
    """Where the innermost container must end: that of a tuple, otherwise 0."""
    outer: list[tuple[int, bool, int]] = []
    while True:
        while left == 0:
            if not outer:
                return count if at == size else _TORN
            if end == 0:
                depth -= 1
            elif end != at:
                return _TORN
            left, is_map, end = outer.pop()
        if count > most:
            return count
        if at == size:
            return _TORN
        kind, length_bytes, fixed_bytes, length = _TOKENS[data[at]]
        if kind == _INVALID or (end and kind != _LIST):
            return _TORN
        if is_map and left % 2 == 0 and kind != _KEY:
            return _BAD_KEY
        left -= 1
        count += 1
        at += 1
        if length_bytes:
            if length_bytes > size - at:
                return _TORN
            length = int.from_bytes(data[at : at + length_bytes], "big")
            at += length_bytes
        if kind in (_LIST, _MAP):
            depth += 1
            if depth > max_depth:
                return _TOO_DEEP
            outer.append((left, is_map, end))
            is_map = kind == _MAP
            left, end = (2 * length if is_map else length), 0
        elif kind == _EXTENSION:
            if length + 1 > size - at:
                return _TORN
            extension = data[at]
            at += 1
            if extension == TUPLE:
                outer.append((left, is_map, end))
                left, is_map, end = 1, False, at + length
            else:
                at += length
        elif fixed_bytes + length > size - at:
            return _TORN
        else:
            at += fixed_bytes + length


_PLAIN, _KEY, _LIST, _MAP, _EXTENSION, _INVALID = range(6)


class _Token(NamedTuple):
    """What the first byte of a value says."""

    kind: int
    length_bytes: int = 0
    """The bytes behind it that hold the value's length, in bytes or items."""
    fixed_bytes: int = 0
    """The bytes of the value itself, where they don't depend on a length."""
    length: int = 0
    """The length, where the first byte holds it."""


def _token(first: int) -> _Token:
    if first <= 0x7F or first >= 0xE0:
        return _Token(_KEY)  # a small integer
    if first <= 0x8F:
        return _Token(_MAP, length=first & 0x0F)
    if first <= 0x9F:
        return _Token(_LIST, length=first & 0x0F)
    if first <= 0xBF:
        return _Token(_KEY, fixed_bytes=first & 0x1F)  # a short text
    if 0xC4 <= first <= 0xC6:
        return _Token(_PLAIN, length_bytes=1 << (first - 0xC4))  # bytes
    if 0xC7 <= first <= 0xC9:
        return _Token(_EXTENSION, length_bytes=1 << (first - 0xC7))
    if 0xCC <= first <= 0xCF:
        return _Token(_KEY, fixed_bytes=1 << (first - 0xCC))  # an unsigned integer
    if 0xD0 <= first <= 0xD3:
        return _Token(_KEY, fixed_bytes=1 << (first - 0xD0))
    if 0xD4 <= first <= 0xD8:
        return _Token(_EXTENSION, length=1 << (first - 0xD4))
    if 0xD9 <= first <= 0xDB:
        return _Token(_KEY, length_bytes=1 << (first - 0xD9))  # a text
    return _OTHERS[first]


_OTHERS = {
    0xC0: _Token(_KEY),  # None
    0xC1: _Token(_INVALID),  # never used
    0xC2: _Token(_KEY),  # False
    0xC3: _Token(_KEY),  # True
    0xCA: _Token(_PLAIN, fixed_bytes=4),  # floats
    0xCB: _Token(_PLAIN, fixed_bytes=8),
    0xDC: _Token(_LIST, length_bytes=2),
    0xDD: _Token(_LIST, length_bytes=4),
    0xDE: _Token(_MAP, length_bytes=2),
    0xDF: _Token(_MAP, length_bytes=4),
}

_TOKENS = tuple(_token(first) for first in range(256))
