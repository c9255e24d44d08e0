"""How many values a msgpack text has, counted without making them.

A value of one byte, such as an empty map, becomes an object of 64: so a bound on bytes alone is
none on memory. Format: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

TUPLE = 2
"""The extension whose content is msgpack, too (``payload.py``)."""


def count_values(text: bytes | bytearray | memoryview, most: int) -> int:
    """The number of values in ``text``: numbers, texts, keys, maps, arrays and so on, also inside
    others. Ends with ``most + 1`` when there are more.

    For text that is no msgpack: those before the place where a decoder stops, or more. Cost: about
    0.2 us for each value; the bytes of texts are passed over.
    """
    data = memoryview(text)
    at = count = 0
    size = len(data)
    while at < size and count <= most:
        count += 1
        own, length_bytes, is_extension = _TOKENS[data[at]]
        if length_bytes:
            start = at + 1
            own += int.from_bytes(data[start : start + length_bytes], "big")
        if is_extension:
            kind = at + 1 + length_bytes
            if kind < size and data[kind] == TUPLE:
                own = 2 + length_bytes  # its content comes next
        at += own
    return count


def _token(first: int) -> tuple[int, int, bool]:
    """For the first byte of a value: how many bytes it takes without what its length says and
    without the values inside it, the bytes of that length, and whether it is an extension."""
    if 0xA0 <= first <= 0xBF:
        return 1 + (first & 0x1F), 0, False  # a short text
    if 0xC4 <= first <= 0xC6 or 0xD9 <= first <= 0xDB:
        length_bytes = 1 << (first - (0xC4 if first < 0xD9 else 0xD9))
        return 1 + length_bytes, length_bytes, False  # bytes; a text
    if 0xC7 <= first <= 0xC9:
        length_bytes = 1 << (first - 0xC7)
        return 2 + length_bytes, length_bytes, True
    if 0xD4 <= first <= 0xD8:
        return 2 + (1 << (first - 0xD4)), 0, True
    return 1 + _FIXED.get(first, 0), 0, False


_FIXED = {
    **{0xCA: 4, 0xCB: 8},  # floats
    **{0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8},  # integers
    **{0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4},  # long arrays and maps
}
"""The bytes behind the first one, of those that have any."""

_TOKENS = tuple(_token(first) for first in range(256))
