"""Scripts that are not elastic, on machines that come and go: their worlds start again."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from support.counting import SCRIPT, Run, kill_a_worker, run_on
from support.machines import cluster_of, form, leader_of

pytestmark = pytest.mark.needs_root_netns


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("agent killed", "gloo"),
        ("cut off", "potluck"),
        pytest.param("agent killed", "potluck", marks=pytest.mark.long),
        pytest.param("cut off", "gloo", marks=pytest.mark.long),
    ],
)
def test_a_world_goes_on_without_a_machine_and_with_it_at_the_next_start(
    tmp_path: Path, how: str, backend: str
) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        with run_on(starter, tmp_path, backend) as command:
            run = Run(command, tmp_path)
            assert run.begun(3) == {each.name for each in machines}
            lost = time.monotonic()
            other.kill() if how == "agent killed" else other.cut()
            assert run.begun(2) == {leader.name, starter.name}
            print(f"trains again after {time.monotonic() - lost:.1f} s")
            other.start() if how == "agent killed" else other.heal()
            command.wait_for("can run, and waits until the world starts again")
            kill_a_worker(starter)
            assert run.begun(3) == {each.name for each in machines}
            run.finish()
        for machine in machines:
            assert machine.left_over() == [], "no worker of an older world is left"


WIDTHS = """
import numpy as np, potluck
from potluck.estimators import StandardScaler

ctx = potluck.init()
X = np.random.default_rng(0).normal(size=(100, 64))
for wrong in (X[:, :60], X.astype(complex)):
    try:
        StandardScaler(ctx=ctx).fit(X if ctx.rank == 0 else wrong)
        print("it fits")
    except ValueError as error:
        print("it says:", str(error).replace(chr(10), " "))
ctx.close()
"""


def test_a_refusal_of_an_estimator_is_the_same_error_on_all_hosts(tmp_path: Path) -> None:
    script = tmp_path / "code" / "widths.py"
    script.parent.mkdir()
    script.write_text(WIDTHS)
    with cluster_of(2, tmp_path / "homes") as pair:
        form(*pair)
        with pair[0].run(script) as run:
            assert run.finish() == 0, run.text
            said = [re.sub(r"^\[.*?\] ", "", line) for line in run.lines if "it says: " in line]
    assert len(said) == 4
    assert {said.count(each) for each in said} == {2}, said
    other = next(each for each in said if "has 64 features, that of" in each)
    assert re.search(
        r"rank 0 \(worker \d at (ada|bob):\d+\) has 64 features, that of rank 1", other
    )
    assert any("omplex data not supported" in each for each in said)


@pytest.mark.parametrize("what", ["a worker", "a machine"])
def test_a_script_with_a_context_that_does_not_re_form_starts_again(
    tmp_path: Path, what: str
) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        with starter.run(SCRIPT.with_name("context_counting.py"), tmp_path) as command:
            run = Run(command, tmp_path)
            run.begun(3)
            if what == "a worker":
                kill_a_worker(other)
                assert len(run.begun(3)) == 3
                assert "(restart 1 of 3)" in command.text
            else:
                other.kill()
                assert run.begun(2) == {leader.name, starter.name}
                assert "(restart" not in command.text
            run.finish()
