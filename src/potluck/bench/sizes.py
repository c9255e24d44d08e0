"""Byte counts as people write them."""

from __future__ import annotations

import argparse

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse(text: str) -> int:
    """``"64KiB"`` -> 65536; a bare number is bytes. A multiple of 4: buffers are float32."""
    for unit, factor in sorted(UNITS.items(), key=lambda item: -len(item[0])):
        if text.endswith(unit):
            nbytes = int(float(text.removesuffix(unit)) * factor)
            break
    else:
        nbytes = int(text)
    if nbytes <= 0 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text}: a positive multiple of 4 bytes is needed")
    return nbytes


def show(nbytes: int) -> str:
    """65536 -> ``"64 KiB"``."""
    for unit, factor in sorted(UNITS.items(), key=lambda item: -item[1]):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return "0 B"
