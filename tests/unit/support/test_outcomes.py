"""The outcome of a run as a file, and what ``.ci/run`` does with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "support.outcomes", "-p", "no:cacheprovider"]

TESTS = """
import pytest

def test_good(): pass

@pytest.mark.beside_torch
def test_good_beside_torch(): pass

@pytest.mark.parametrize("case", ["a", "b/c d"])
def test_cases(case): pass

def test_skipped(): pytest.skip("not here")

@pytest.fixture
def breaks_at_its_end():
    yield
    assert False

def test_bad_end(breaks_at_its_end): pass
def test_bad(): assert False
"""
GOOD = ["test_it.py::test_cases[a]", "test_it.py::test_cases[b/c d]", "test_it.py::test_good"]
BAD = ["test_broken.py", "test_it.py::test_bad", "test_it.py::test_bad_end"]


def run(folder: Path, *arguments: str) -> str:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  beside_torch: in both\n")
    done = subprocess.run(
        [*PYTEST, "--outcomes", "out/run", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer than all else here
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout + done.stderr


def outcome(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "run").read_text())
    return found


@pytest.mark.parametrize(
    "processes", [[], ["-p", "xdist", "-n", "2"]], ids=["one process", "two processes"]
)
def test_an_outcome_says_what_passed_and_what_failed(tmp_path: Path, processes: list[str]) -> None:
    (tmp_path / "test_broken.py").write_text("import surely_not_installed\n")
    if processes:
        pytest.importorskip("xdist")
    run(tmp_path, "--continue-on-collection-errors", *processes)
    found = outcome(tmp_path)
    assert found["is_whole"]
    assert sorted(found["passed"]) == GOOD
    assert sorted(found["failed"]) == BAD


def test_what_passed_is_left_out_and_all_else_is_run(tmp_path: Path) -> None:
    (tmp_path / "before").write_text(json.dumps({"passed": GOOD[:2]}))
    text = run(tmp_path, "--except-passed", "before", "-x")
    assert "2 deselected" in text
    assert "1 skipped" in text
    found = outcome(tmp_path)
    assert found["passed"] == GOOD[2:]
    assert found["failed"] == ["test_it.py::test_bad_end"]
    assert not found["is_whole"], "with -x the last test was not run"
    (tmp_path / "before").unlink()
    assert "no file before" in run(tmp_path, "--except-passed", "before")


# ---------------------------------------------------------------- .ci/once-more


class Steps:
    """Steps of ``.ci/run`` that have failed. Tests whose names begin with "bad" fail again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "one-test").write_text('echo "$1" >>ran\ncase $1 in bad*) exit 1 ;; esac\n')

    def step(self, *failed: str, is_whole: bool = True) -> tuple[int, str]:
        """What once-more makes of a step in which these tests failed: its code and words."""
        (self.folder / "step").write_text(json.dumps({"is_whole": is_whole, "failed": failed}))
        return self.once_more()

    def once_more(self) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, ROOT / ".ci" / "once-more", "step", "sh", "one-test"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=200,
        )
        return done.returncode, done.stdout + done.stderr

    def ran(self) -> Sequence[str]:
        path = self.folder / "ran"
        return path.read_text().splitlines() if path.exists() else []

    def named(self) -> Sequence[str]:
        """The tests that .ci/run names at its end."""
        path = self.folder / "failed-once"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix("potluck: failed once, and passed alone: ") for line in lines]


@pytest.fixture
def ci(tmp_path: Path) -> Steps:
    return Steps(tmp_path)


def test_two_that_failed_are_run_once_more_and_named(ci: Steps) -> None:
    assert ci.step("a.py::test_x[b/c d]", "b.py::test_y") == (0, "")
    assert ci.ran() == ci.named() == ["a.py::test_x[b/c d]", "b.py::test_y"]


def test_three_fail_the_run(ci: Steps) -> None:
    code, text = ci.step("one", "two", "three")
    assert code == 1
    assert "3 tests failed" in text
    assert ci.ran() == ci.named() == []


def test_three_fail_the_run_in_different_steps_too(ci: Steps) -> None:
    assert ci.step("one")[0] == ci.step("two")[0] == 0
    code, text = ci.step("three")
    assert code == 1
    assert "3 tests failed" in text
    assert ci.named() == ["one", "two"]


def test_one_that_fails_again_fails_the_run(ci: Steps) -> None:
    code, text = ci.step("one", "bad")
    assert code == 1
    assert "failed twice: bad" in text


def test_nothing_is_run_once_more_for_what_is_no_test(ci: Steps) -> None:
    code, text = ci.step(is_whole=True)
    assert code == 1
    assert "no test has failed" in text
    code, text = ci.step("one", is_whole=False)
    assert code == 1
    assert "before all tests were run" in text
    (ci.folder / "step").unlink()  # `make test` ended with what ruff found
    assert ci.once_more() == (code, text)
    assert ci.ran() == []
