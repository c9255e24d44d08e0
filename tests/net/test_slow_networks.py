"""Networks that are slow or lose packets, and clocks that are wrong: slower only, nobody is
evicted. Agents only, no job."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.delay import Delay
from support.figures import Figures
from support.hosts import Network
from support.machines import WAIT_S, Machine, form, machines, marks

pytestmark = pytest.mark.needs_root_netns

DAY_S = 86_400
CLOCK = """
import os, time
shift, real, real_ns = int(os.environ["CLOCK_SHIFT_S"]), time.time, time.time_ns
time.time, time.time_ns = lambda: real() + shift, lambda: real_ns() + shift * 10**9
"""


def straggler(seer: Machine, slow: Machine, figure: str) -> str:
    """What ``potluck status`` says of a node that holds the others up, once it has that figure."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for sentence in seer.cluster()["stragglers"]:
            name, _, why = str(sentence).partition(": ")
            if name.endswith(slow.name) and figure in why:
                return why
    raise AssertionError(f"{slow} is not named: {seer.cluster()['links']}")


def test_loss_delay_and_a_narrow_link_evict_nobody(
    figures: Figures, tmp_path: Path, request: pytest.FixtureRequest, seed: int
) -> None:
    """20 s of each with --long, else 3."""
    seconds = 20.0 if request.config.getoption("--long") else 3.0
    with Network(3) as network, machines(network, tmp_path) as (ada, bob, carl):
        trio = (ada, bob, carl)

        def nothing_changes(fault: str) -> None:
            since = marks(trio)
            ada.changes_nothing(seconds, since=since[ada])
            changes = sum(len(each.views_since(since[each])) for each in trio)
            what = f"views changed in {seconds:g} s:"
            figures.take(fault, what, changes, asked=0, unit="")

        carl.host.shape("10mbit")
        form(*trio)
        print(straggler(ada, carl, " Mbit/s "))
        nothing_changes("one link at 10 Mbit/s")
        carl.host.shape(None)
        for each in trio:
            each.host.lose(0.01)
        nothing_changes("1% of all packets lost")
        for each in trio:
            each.host.lose(0)
        with Delay(carl.host, 0.050, jitter_s=0.020, seed=seed):
            nothing_changes("one host 50 +- 20 ms away")

            def latencies(status: dict[str, Any]) -> tuple[float, float]:
                found = {each["node"]: each["latency_ms"] for each in status["cluster"]["nodes"]}
                return found[bob.node] / 1000, found[carl.node] / 1000

            def are_right(status: dict[str, Any]) -> bool:
                """In the end: while an agent stalls, the latency of its node is larger."""
                near, far = latencies(status)
                return near < far and 0.030 <= far <= 2.0

            _, took = latencies(ada.shows(are_right))
            fault = "one host 50 +- 20 ms away"
            figures.take(fault, "one-way latency that `potluck status` shows:", took)
            print(straggler(ada, carl, " ms "))


def last_seen(machine: Machine) -> list[float]:
    """When the two others were seen, by the clock of ``machine``'s agent, once that is on disk."""
    deadline = time.monotonic() + 60
    while True:
        nodes = json.loads(machine.runs("nodes", "--json").stdout)["nodes"]
        seen = [each["last_seen"] for each in nodes if each["last_seen"]]
        if len(seen) == 2:
            return seen
        assert time.monotonic() < deadline, nodes


def test_wall_clocks_that_are_days_apart_have_no_effect(figures: Figures, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(CLOCK)
    with ExitStack() as stack:
        network = stack.enter_context(Network(3))
        trio = []
        for host, shift in zip(network, (-DAY_S, 0, DAY_S), strict=True):
            clock = {"PYTHONPATH": str(site), "CLOCK_SHIFT_S": str(shift)}
            trio.append(stack.enter_context(Machine(host, tmp_path, **clock)))
        took = form(*trio)
        fault = "wall clocks one day behind, right, and one day ahead"
        figures.take(fault, "in one view after", took, asked=5.0)
        # That the clocks are wrong shows in what they write down for people.
        early, right, late = (min(last_seen(each)) for each in trio)
        assert late - right == pytest.approx(DAY_S, abs=600)
        assert right - early == pytest.approx(DAY_S, abs=600)
        since = marks(trio)
        trio[0].changes_nothing(3.5, since=since[trio[0]])
        changes = sum(len(each.views_since(since[each])) for each in trio)
        figures.take(fault, "views changed:", changes, asked=0, unit="")
