"""examples/sweep.py: a worker that is killed in a trial costs that trial, which is run again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="pip install 'potluck[ecosystem]'")
pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from support.commands import run_command

SCRIPT = str(Path(__file__).parent / "scripts/sweep_killed.py")
TRIAL = re.compile(r"^\[\d\] trial (\d+) (\w+): (rate .*): accuracy", re.MULTILINE)


def search(folder: Path, victim: str, epochs: int, *options: str) -> tuple[str, list[list[str]]]:
    """What the search printed, and of each of its trials the number, state and parameters."""
    given = ("--workers", "3", "--max-restarts", "1", SCRIPT, str(folder), victim, str(epochs))
    with run_command(*given, *options, OMP_NUM_THREADS="1") as run:
        assert run.finish(300) == 0, run.text
    assert f"worker {victim} killed by SIGKILL" in run.text
    return run.text, [list(found) for found in TRIAL.findall(run.text)]


def test_a_trial_a_worker_is_run_again_with_its_parameters(tmp_path: Path) -> None:
    """The victim dies in its first trial: none is pruned before its second epoch ends."""
    _, trials = search(tmp_path, "2", 2, "--trials", "8")
    lost = [parameters for _, state, parameters in trials if state == "FAIL"]
    whole = [parameters for _, state, parameters in trials if state != "FAIL"]
    assert len(whole) == len(set(whole)) == 8
    assert lost
    assert set(lost) <= set(whole)


@pytest.mark.parametrize("victim", ["0", "2"])
def test_a_trial_on_all_workers_is_run_again_by_those_left(victim: str, tmp_path: Path) -> None:
    """Also without rank 0, whose study another rank makes anew of the history."""
    text, trials = search(tmp_path, victim, 8, "--trials", "4", "--spans-workers")
    assert [number for number, *_ in trials] == ["0", "1", "2", "3"]
    assert {state for _, state, _ in trials} <= {"COMPLETE", "PRUNED"}
    assert re.search(r"^\[\d\] trial 1 again: ", text, re.MULTILINE), text
