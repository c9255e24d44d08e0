"""The scripts on the home page and on the page of potluck.testing run as they stand there."""

from __future__ import annotations

from typing import Any

import pytest

from support.pages import snippets


def run(page: str) -> dict[str, Any]:
    """The page's Python snippets, one after the other; their names."""
    scripts = snippets(page)
    assert scripts
    names: dict[str, Any] = {"__name__": "page"}
    for script in scripts:
        exec(compile(script, page, "exec"), names)
    return names


def test_the_home_pages_script_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run("index.md")
    assert capsys.readouterr().out == "rank 0 of 1: 1.0\n"


def test_the_compressor_on_the_page_of_compression(capsys: pytest.CaptureFixture[str]) -> None:
    run("compression.md")
    assert capsys.readouterr().out == "53971 bytes, 74 times fewer\n"


def test_the_model_on_the_page_of_slow_networks(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run("slow-networks.md")["plan"]
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1].startswith(f"{plan.choice.code} because ")
    assert [row.split()[0] for row in rows[:-1]] == [p.candidate.name for p in plan.predictions]


def test_the_script_on_the_page_of_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    names = run("strategies.md")
    names["model"].ctx.close()
    assert names["job"].step_number == 80
    assert "after 4 rounds of 20 steps" in capsys.readouterr().out


def test_the_world_on_the_page_of_testing_is_one_to_copy() -> None:
    run("reference/testing.md")["test_the_sum_is_that_of_all_ranks"]()
