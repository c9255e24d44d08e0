"""What tests measure: kept, held against what was asked, told in a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.figures import Figures, markdown, read_figures


def test_figures_become_rows_and_what_was_missed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "figures"
    first, second = Figures("tests/a.py -k one", file), Figures("tests/a.py -k two", file)
    first.take("a cut", "noticed after", 1.234, asked=3.0)
    second.take("a cut", "views changed:", 0, asked=0, unit="")
    second.take("a kill", "noticed after", 0.7, asked=0.5)  # a busy machine: told, not failed
    second.take("a kill", "in again after", 9.0)
    figures = read_figures(file)
    assert [each.is_reached for each in figures] == [True, True, False, True]
    lines = markdown(figures).splitlines()
    assert lines[2:] == [
        "| a cut | noticed after 1.23 s; views changed: 0 | <= 3 s; <= 0 "
        "| `tests/a.py -k one`, `tests/a.py -k two` |",
        "| a kill | noticed after 0.70 s; in again after 9.00 s **(missed)** | <= 0.5 s "
        "| `tests/a.py -k two` |",
    ]


def test_what_is_far_too_slow_or_not_a_time_and_too_much_fails() -> None:
    figures = Figures("a", None)
    with pytest.raises(AssertionError, match=r"a kill: noticed after 20\.60 s, asked 0\.5"):
        figures.take("a kill", "noticed after", 20.6, asked=0.5)
    with pytest.raises(AssertionError, match="a cut: views changed: 1, asked 0"):
        figures.take("a cut", "views changed:", 1, asked=0, unit="")
