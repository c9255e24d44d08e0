"""Conversion of sizes and times from and to text."""

from __future__ import annotations

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse(text: str) -> int:
    """The bytes that ``text`` means: 65536 for ``"64KiB"``; a number without a unit is bytes.
    ValueError unless it is a positive multiple of 4, the size of a float32."""
    number, factor = text.strip(), 1
    for unit, bytes_of_one in sorted(UNITS.items(), key=lambda item: -len(item[0])):
        if number.lower().endswith(unit.lower()):
            number, factor = number[: -len(unit)], bytes_of_one
            break
    try:
        nbytes = float(number) * factor
    except ValueError:
        raise ValueError(f"{text!r} is not a size; write 4KiB, 1MiB or 4096") from None
    if nbytes <= 0 or nbytes % 4:
        raise ValueError(f"{text}: a positive multiple of 4 bytes (one float32) is needed")
    return int(nbytes)


def show(nbytes: int) -> str:
    """The text of a size: ``"64 KiB"`` for 65536."""
    for unit, factor in sorted(UNITS.items(), key=lambda item: -item[1]):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return "0 B"


def show_seconds(seconds: float) -> str:
    """The text of a time with three digits: ``"340 us"`` for 0.00034."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * factor:
            figure = seconds / factor
            return f"{figure:.3g} {unit}" if figure < 1000 else f"{figure:.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"
