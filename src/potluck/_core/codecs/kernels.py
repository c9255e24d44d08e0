"""Encoding and decoding by the native kernels where they are, else by their twins.

Both give the same bits, so ranks with and without the native core work in one group.
"""

from __future__ import annotations

from potluck._core import native
from potluck._core.codecs.codec import Bytes, Codec, Floats


def encode(codec: Codec, encoded: Bytes, source: Floats) -> int:
    """Encode ``source`` into ``encoded``. Returns how many elements are beyond the range, with
    those that are inf or NaN."""
    if native.available and codec.code:
        return native.core.encode(codec.code, encoded, source)
    codec.encode(encoded, source)
    return codec.num_beyond(source)


def encode_with_residual(codec: Codec, encoded: Bytes, residual: Floats, source: Floats) -> int:
    """Encode ``source + residual``; ``residual`` becomes what that loses. Returns the same."""
    if native.available and codec.code:
        return native.core.encode_with_residual(codec.code, encoded, residual, source)
    return codec.encode_with_residual(encoded, residual, source)


def decode(codec: Codec, target: Floats, encoded: Bytes) -> None:
    """Decode ``encoded`` into ``target``."""
    if native.available and codec.code:
        native.core.decode(codec.code, target, encoded)
    else:
        codec.decode(target, encoded)


def decode_accumulate(codec: Codec, target: Floats, encoded: Bytes) -> None:
    """Decode ``encoded`` and add it to ``target``."""
    if native.available and codec.code:
        native.core.decode_accumulate(codec.code, target, encoded)
    else:
        codec.decode_accumulate(target, encoded)
