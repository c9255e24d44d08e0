"""What was asked of the speed: one table a question, one row a figure, each with its verdict."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("claims", ROOT / "benchmarks/common/claims.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "claims", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_claim_has_a_row_for_each_figure_and_each_says_if_it_is_met(claims: ModuleType) -> None:
    found = [("4 KiB", 2.5), ("1 MiB", 1.5)]
    claim = claims.at_least("all-reduce, 2 processes: time over", ">= 2x", 2.0, found)
    assert claim.met is False
    assert claims.markdown([claim]).splitlines() == [
        "## How fast is it inside one machine?",
        "",
        "| call | figure | of | measured | asked | met |",
        "|---|---|---|---|---|---|",
        "| all-reduce, 2 processes | time over | 4 KiB | 2.5x | >= 2x | yes |",
        "| | | 1 MiB | 1.5x | >= 2x | **no** |",
    ]


def test_other_words_stay_one_row_below_the_question_that_they_answer(claims: ModuleType) -> None:
    what = "2 hosts at 10 Gbit/s, 100 MiB: TLS over Gloo's clear text, bandwidth"
    claim = claims.Claim(what, ">= 0.85x", "5.1 of 6.9 Gbit/s: 0.739x", False)
    *_, row = claims.markdown([claim]).splitlines()
    assert claims.question(claim) == "How fast is it between machines at 10 Gbit/s?"
    assert row == (
        "| 2 hosts at 10 Gbit/s, 100 MiB | TLS over Gloo's clear text, bandwidth | "
        "| 5.1 of 6.9 Gbit/s: 0.739x | >= 0.85x | **no** |"
    )
