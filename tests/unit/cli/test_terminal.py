"""What other machines tell, as commands show it."""

from __future__ import annotations

import math

import pytest

from potluck._core.cluster.fetch import Found, Holding
from potluck.cli.fetch import _show
from potluck.cli.terminal import date

NODE = "b2" * 32


def test_dates_that_no_calendar_has_are_shown_as_such() -> None:
    assert date(0.0) == "-"
    assert date(1e9).startswith("2001-09-0")
    for at in (1e12, -1e18, math.inf, math.nan):
        assert date(at) == "?"


def test_a_machine_that_tells_an_impossible_date_does_not_hide_the_files_of_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def found(job: str, began: float) -> Found:
        return Found(job, "", began, [Holding(NODE, "bob", 1, 10)])

    _show([found("hostile", 1e12), found("honest", 1e9)], json=False)
    shown = capsys.readouterr().out
    assert "?" in shown
    assert "2001-09-0" in shown
    assert "honest" in shown
