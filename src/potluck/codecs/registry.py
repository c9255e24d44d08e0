"""The codecs by name."""

from __future__ import annotations

from potluck.codecs.codec import Codec
from potluck.codecs.halves import Bf16, Fp16
from potluck.codecs.integers import Int

_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Fp16(), Bf16(), Int(8, 3), Int(4, 4), Int(2, 5))
}

NAMES = tuple(_CODECS)


def codec_of(name: str) -> Codec:
    """The codec called ``name``; ValueError, with all names, if there is none."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ValueError(f"there is no codec {name!r}; the codecs are {', '.join(NAMES)}") from None
