"""The codecs by name: potluck's, and those that a script registers.

The codecs ``fp16`` and ``bf16`` round each value to the nearest 16-bit float, ties to even.
``fp16`` keeps 11 significant bits of values up to 65504, which stands for larger ones, and below
2^-14 the resolution is 2^-24. ``bf16`` keeps 8 significant bits over the whole range of float32.
An element has two little-endian bytes, half of float32's. Integer codecs: ``integers.py``.
"""

from __future__ import annotations

from hashlib import blake2b

import ml_dtypes
import numpy as np

from potluck._core.codecs.codec import LARGEST, Bytes, Codec, Floats
from potluck._core.codecs.integers import Int


class Fp16(Codec):
    """IEEE 754 binary16."""

    name = "fp16"
    code = 1
    keeps_range = False
    limit = 65520.0
    largest = 65504.0

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, encoded: Bytes, source: Floats) -> None:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            encoded.view("<f2")[:] = self.saturated(source)

    def decode(self, target: Floats, encoded: Bytes) -> None:
        with np.errstate(invalid="ignore"):
            target[:] = encoded.view("<f2")

    def error_bound(self, largest: float) -> float:
        return max(largest * 2.0**-11, 2.0**-25)


class Bf16(Codec):
    """bfloat16: the upper half of float32."""

    name = "bf16"
    code = 2
    limit = float.fromhex("0x1.FFp127")
    largest = float.fromhex("0x1.FEp127")

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, encoded: Bytes, source: Floats) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            encoded.view(ml_dtypes.bfloat16)[:] = self.saturated(source)

    def decode(self, target: Floats, encoded: Bytes) -> None:
        target[:] = encoded.view(ml_dtypes.bfloat16)

    def error_bound(self, largest: float) -> float:
        return max(largest * 2.0**-8, 2.0**-134)


_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Fp16(), Bf16(), Int(8, 3), Int(4, 4), Int(2, 5))
}

NAMES = tuple(_CODECS)
"""Potluck's own."""

_OWN: dict[str, Codec] = {}
_DIGESTS: dict[str, bytes] = {}
_COUNTS = (0, 1, 5, 255, 256, 1000)


def codec_of(name: str) -> Codec:
    """The codec called ``name``; ValueError, with all names, if there is none."""
    found = _CODECS.get(name) or _OWN.get(name)
    if found is None and isinstance(name, str):
        found = _CODECS.get(name.lower())
    if found is None:
        names = ", ".join((*NAMES, *_OWN))
        hint = "" if isinstance(name, str) else "; compressors are for gradients, as DDP sums them"
        raise ValueError(f"there is no codec {name!r}; the codecs are {names}{hint}")
    return found


def register(codec: Codec) -> None:
    """Register a codec of one's own, to be called by ``codec=codec.name`` in an all_reduce.

    It is tried on arrays of several lengths first: ValueError if it changes what it encodes, if two
    encodings of one array differ, if what it decodes is further away than its ``error_bound``
    allows, or if it decodes inf or NaN where it encoded the largest float32. Ranks whose codecs of
    one name encode these arrays to other bytes get Desync. TypeError for what is no Codec,
    ValueError for a name that there is.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f"{codec!r} is no codec: make a subclass of potluck._core.codecs.Codec")
    if codec.code:
        raise ValueError(f"codec {codec.name!r}: code must stay 0; others are potluck's own")
    if not codec.name.isidentifier() or codec.name in _CODECS:
        raise ValueError(f"{codec.name!r} can't be the name of a codec: take another identifier")
    digest = _tried(codec)
    if _DIGESTS.setdefault(codec.name, digest) != digest:
        raise ValueError(f"there is another codec {codec.name!r} already")
    _OWN[codec.name] = codec


def digest_of(codec: Codec) -> bytes:
    """8 bytes that tell a registered codec from another of the same name."""
    return _DIGESTS[codec.name]


def _tried(codec: Codec) -> bytes:
    hashed = blake2b(codec.name.encode(), digest_size=8)
    for count in _COUNTS:
        # Exact in float32, and the same on all machines.
        source = ((np.arange(count) * 7919 % 2001 - 1000) / np.float32(64)).astype(np.float32)
        before = source.copy()
        pair = [np.full(codec.encoded_bytes(count), fill, np.uint8) for fill in (0, 255)]
        for encoded in pair:
            codec.encode(encoded, source)
        decoded = np.full(count, np.nan, np.float32)
        codec.decode(decoded, pair[0])
        if not np.array_equal(source, before):
            raise ValueError(f"codec {codec.name!r} changes the array that it encodes")
        if not np.array_equal(pair[0], pair[1]):
            raise ValueError(
                f"codec {codec.name!r}: two encodings of the same {count} elements differ; "
                "does it fill all encoded_bytes?"
            )
        bound = codec.error_bound(float(np.abs(source).max(initial=0)))
        errors = np.abs(decoded.astype(np.float64) - source)
        if not (errors <= bound).all():
            raise ValueError(
                f"codec {codec.name!r}: of {count} elements one is decoded with the error "
                f"{errors.max():.3g}; error_bound promises {bound:.3g}"
            )
        hashed.update(pair[0].tobytes())
    extremes = np.resize(np.array([LARGEST, -LARGEST, 1], np.float32), 257)
    encoded, decoded = np.empty(codec.encoded_bytes(257), np.uint8), np.empty(257, np.float32)
    with np.errstate(all="ignore"):
        codec.encode(encoded, extremes)
        codec.decode(decoded, encoded)
    if not np.isfinite(decoded).all():
        raise ValueError(
            f"codec {codec.name!r} decodes {decoded[~np.isfinite(decoded)][0]} where it encoded "
            f"{LARGEST:.6g}: encode the largest number that it can stand for instead"
        )
    return hashed.digest()
