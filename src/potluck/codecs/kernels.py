"""Encoding and decoding by the native kernels where they are, else by their twins.

Both give the same bits, so ranks with and without the native core work in one group.
"""

from __future__ import annotations

from potluck import native
from potluck.codecs.codec import Bytes, Codec, Floats


def encode(codec: Codec, encoded: Bytes, source: Floats) -> None:
    """Encode ``source`` into ``encoded``."""
    if native.available:
        native.core.encode(codec.code, encoded, source)
    else:
        codec.encode(encoded, source)


def encode_with_residual(codec: Codec, encoded: Bytes, residual: Floats, source: Floats) -> None:
    """Encode ``source + residual``; ``residual`` becomes what that loses."""
    if native.available:
        native.core.encode_with_residual(codec.code, encoded, residual, source)
    else:
        codec.encode_with_residual(encoded, residual, source)


def decode(codec: Codec, target: Floats, encoded: Bytes) -> None:
    """Decode ``encoded`` into ``target``."""
    if native.available:
        native.core.decode(codec.code, target, encoded)
    else:
        codec.decode(target, encoded)


def decode_accumulate(codec: Codec, target: Floats, encoded: Bytes) -> None:
    """Decode ``encoded`` and add it to ``target``."""
    if native.available:
        native.core.decode_accumulate(codec.code, target, encoded)
    else:
        codec.decode_accumulate(target, encoded)
