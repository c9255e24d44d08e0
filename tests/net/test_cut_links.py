"""The network between two of three machines is cut, each of which still reaches the third."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path

import pytest

from support.commands import Command
from support.figures import Figures
from support.machines import Machine, cluster_of, form

pytestmark = [pytest.mark.needs_root_netns, pytest.mark.timeout(300)]

TRAINING = Path(__file__).parent / "scripts" / "training" / "gossip.py"
PEER_TIMEOUT_S = "4"
"""After which an operation, and the making of a link, is given up."""
AGAIN_S = 60.0
NOTE = r"potluck: workers \d and \d can't reach each other: the group goes on without"


def round_of_three(line: str, cut: str) -> float | None:
    """The loss that a line tells of a round of three ranks with these links cut."""
    told = re.search(rf"of 3, cut: {cut}, loss ([\d.]+)", line)
    return None if told is None else float(told[1])


def losses(run: Command, cut: str, *, since: int) -> list[float]:
    """Of the rounds of three ranks with these links cut, in lines after ``since``."""
    told = (round_of_three(line, cut) for line in run.lines[since:])
    return [loss for loss in told if loss is not None]


def goes_on(run: Command, cut: str, num_rounds: int, *, since: int, within_s: float) -> float:
    """Wait for so many rounds of three ranks with these links cut; when the first of them ended."""

    def is_it(line: str) -> bool:
        return round_of_three(line, cut) is not None

    first = run.when(is_it, within_s, since=since)
    deadline = time.monotonic() + within_s
    while len(losses(run, cut, since=since)) < 3 * num_rounds:
        run.when(is_it, deadline - time.monotonic(), since=run.mark)
    return first


def falls(found: list[float]) -> bool:
    """Whether the last losses are below the first."""
    return sum(found[-6:]) < sum(found[:6])


def ends(run: Command, stop: Path) -> None:
    stop.touch()
    assert run.finish() == 0, run.text
    hashes = re.findall(r"ended, (\w+)", run.text)
    assert len(hashes) == 3, run.text
    assert len(set(hashes)) == 1, "all ended with the mean of all"


@pytest.mark.parametrize("pair", [(1, 2), (0, 2)], ids=["two others", "with the starter"])
def test_gossip_goes_on_when_a_firewall_keeps_the_workers_of_two_machines_apart(
    pair: tuple[int, int], tmp_path: Path, figures: Figures
) -> None:
    stop = tmp_path / "stop"
    with cluster_of(3, tmp_path / "homes", POTLUCK_PEER_TIMEOUT_S=PEER_TIMEOUT_S) as trio:
        form(*trio)
        a, b = (trio[index] for index in pair)
        with trio[0].run(TRAINING, stop) as run:
            goes_on(run, "none", 5, since=0, within_s=AGAIN_S)
            since, began = run.mark, time.monotonic()
            keep_apart(a, b)
            first = goes_on(run, r"\d-\d", 15, since=since, within_s=AGAIN_S)
            fault = "a firewall between the workers of two of three hosts"
            figures.take(fault, "the first round without the link after", first - began)
            assert falls(losses(run, r"\d-\d", since=since))
            told = [line for line in run.lines if re.match(NOTE, line)]
            assert len(told) == 1, run.text
            since, began = run.mark, time.monotonic()
            keep_apart(a, b, on=False)
            first = goes_on(run, "none", 5, since=since, within_s=AGAIN_S)
            figures.take(fault, "the first round with it after the heal", first - began)
            ends(run, stop)


def keep_apart(a: Machine, b: Machine, *, on: bool = True) -> None:
    """Let a firewall drop what the workers of one send to those of the other."""
    for here, there in itertools.permutations((a, b)):
        here.host.drop_workers(there.host, on=on)
