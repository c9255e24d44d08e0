"""Runs of ``tests/net/scripts/training/gossip.py``, some of whose links are cut meanwhile."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path

from support.commands import Command
from support.figures import Figures
from support.machines import Machine

TRAINING = Path(__file__).parents[1] / "net" / "scripts" / "training" / "gossip.py"
AGAIN_S = 60.0
NOTE = r"potluck: workers \d and \d can't reach each other: the group goes on without"


def round_of(count: int, line: str, cut: str) -> float | None:
    """The loss that a line tells of a round of so many ranks with these links cut."""
    told = re.search(rf"of {count}, cut: {cut}, loss ([\d.]+)", line)
    return None if told is None else float(told[1])


def losses(run: Command, cut: str, *, since: int, count: int = 3) -> list[float]:
    """Of the rounds of ``count`` ranks with these links cut, in lines after ``since``."""
    told = (round_of(count, line, cut) for line in run.lines[since:])
    return [loss for loss in told if loss is not None]


def goes_on(
    run: Command, cut: str, num_rounds: int, *, since: int, within_s: float, count: int = 3
) -> float:
    """Wait for so many rounds of ``count`` ranks with these links cut; when the first of them
    ended."""

    def is_it(line: str) -> bool:
        return round_of(count, line, cut) is not None

    first = run.when(is_it, within_s, since=since)
    deadline = time.monotonic() + within_s
    while len(losses(run, cut, since=since, count=count)) < count * num_rounds:
        run.when(is_it, deadline - time.monotonic(), since=run.mark)
    return first


def falls(found: list[float]) -> bool:
    """Whether the last losses are below the first."""
    return sum(found[-6:]) < sum(found[:6])


def ends(run: Command, stop: Path, count: int = 3) -> None:
    stop.touch()
    assert run.finish() == 0, run.text
    hashes = re.findall(r"ended, (\w+)", run.text)
    assert len(hashes) == count, run.text
    assert len(set(hashes)) == 1, "all ended with the mean of all"


def goes_on_without_the_link(
    trio: list[Machine], cut: Callable[..., None], fault: str, folder: Path, figures: Figures
) -> None:
    """A training on all of ``trio`` goes on, with all and a falling loss, after ``cut()``, says so
    once, and uses the link again after ``cut(on=False)``."""
    stop = folder / "stop"
    with trio[0].run(TRAINING, stop) as run:
        goes_on(run, "none", 5, since=0, within_s=AGAIN_S)
        since, began = run.mark, time.monotonic()
        cut()
        first = goes_on(run, r"\d-\d", 15, since=since, within_s=AGAIN_S)
        figures.take(fault, "the first round without the link after", first - began)
        assert falls(losses(run, r"\d-\d", since=since))
        told = [line for line in run.lines if re.match(NOTE, line)]
        assert len(told) == 1, run.text
        since, began = run.mark, time.monotonic()
        cut(on=False)
        first = goes_on(run, "none", 5, since=since, within_s=AGAIN_S)
        figures.take(fault, "the first round with it after the heal", first - began)
        ends(run, stop)


def cut(a: Machine, b: Machine, *, on: bool = True) -> None:
    """Lose all that one of the two sends to the other."""
    for here, there in itertools.permutations((a, b)):
        here.host.blackhole(there.host, on=on)
