"""examples/rollouts.py: the reward rises, a player is killed and comes back; its parts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import numpy as np

from support.commands import run_command
from support.examples import example


def test_the_reward_rises_while_a_player_is_killed_and_comes_back(tmp_path: Path) -> None:
    """It ends once worker 1 has played again and the mean episode has 100 steps, however long
    that takes."""
    pytest.importorskip("matplotlib", reason="pip install 'potluck[bench]'")
    script = str(Path(__file__).parent / "scripts/rollouts_killed.py")
    given = ["--reward", "100", "--updates", "100000", "--plot", str(tmp_path / "curve.png")]
    with run_command("--workers", "3", script, str(tmp_path), *given, OMP_NUM_THREADS="1") as run:
        assert run.finish(300) == 0, run.text
    assert "worker 1 killed by SIGKILL" in run.text
    sizes = re.findall(r"^\[0\] update \d+: (\d) workers", run.text, re.MULTILINE)
    assert sizes[-1] == "3", run.text
    [(first, last)] = re.findall(r"\[0\] reward ([\d.]+) -> ([\d.]+) after", run.text)
    assert float(first) < 80 < 100 <= float(last)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_poles_fall_by_the_equations_of_motion() -> None:
    """A step of the first pole by hand: 9.71874 m/s² and -13.8252 rad/s², for 0.02 s."""
    poles = example("rollouts").CartPoles(0)
    poles.state[0] = [0.1, -0.2, 0.05, 0.3]
    poles.state[1] = [0.0, 0.0, 0.2094, 1.0]
    poles.state[2] = [2.39, 1.0, 0.0, 0.0]
    over, lengths = poles.step(np.ones(len(poles.state), np.int64))
    assert over.nonzero()[0].tolist() == [1, 2]
    assert lengths.tolist() == [1, 1]
    expected = [0.096, -0.005625, 0.056, 0.023496]
    np.testing.assert_allclose(poles.state[0], expected, atol=1e-6)
    assert np.abs(poles.state[1:3]).max() <= 0.05, "they begin anew"


def test_rollouts_of_old_weights_are_dropped() -> None:
    rollouts = example("rollouts")
    learner = rollouts.Learner(rollouts.new_policy(), max_age=1)
    call = SimpleNamespace(worker="4")
    first = learner.exchange(call, 0, None)["version"]
    for name in ("a", "b"):
        learner.exchange(call, first, name)
    learner._publish()
    assert learner._take() == "a"
    learner._publish()
    learner.exchange(call, first + 1, "c")
    assert learner._take() == "c"
    assert learner._take() is None
    assert (learner.given, learner.num_old) == ({"4": 2}, 1)
    learner.is_over = True
    assert learner.exchange(call, first, "d") == {"over": True}
    assert learner.told == {"4"}
