"""Sizes and times as text, both ways."""

from __future__ import annotations

import pytest

from potluck.cli.bench.table import parse, show, show_seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("4KiB", 4096), ("4 kib", 4096), ("1.5MiB", 3 << 19), ("1GiB", 1 << 30)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "4KB", "3", "0", "-4", "0.1KiB", "nan", "inf"])
def test_what_is_no_size_of_floats_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|multiple of 4"):
        parse(text)


def test_sizes_are_shown_in_the_largest_unit() -> None:
    assert [show(n) for n in (100, 4096, 1536 << 10, 1 << 30)] == [
        *("100 B", "4 KiB", "1.5 MiB", "1 GiB")
    ]


def test_times_have_three_digits() -> None:
    shown = [show_seconds(s) for s in (1.234e-6, 3.4e-4, 0.99996e-3, 0.0123, 0.434, 12.345)]
    assert shown == ["1.23 us", "340 us", "1 ms", "12.3 ms", "434 ms", "12.3 s"]
