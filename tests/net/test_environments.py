"""Scripts with packages on machines that have none of them: from an index on a host of its own,
each wheel once; and on a machine that reaches no index."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from potluck._core.cluster.environments.making import Environments
from potluck._core.cluster.environments.plan import decode_plan
from potluck._core.settings import Settings
from support.commands import Command
from support.figures import Figures
from support.hosts import Host, Network
from support.machines import Machine, cluster_of, form

pytestmark = pytest.mark.needs_root_netns

PORT = 3141
URL = f"http://10.88.0.{{}}:{PORT}/simple"
"""Of the index on the host of this number."""
SCRIPT = """
# /// script
# requires-python = ">=3.11"
# dependencies = ["foo", "large==1.0"]
# ///
import os, sys, time
import numpy as np
import foo, large, potluck
with potluck.init() as ctx:
    total = ctx.all_reduce(np.ones(1))
    print("has", foo.VERSION, large.VERSION, sys.prefix.count("environments"), "of", int(total[0]))
    if ctx.rank == 1:  # in the sandbox
        try:
            os.chmod(foo.__file__, 0o644)
        except OSError as error:
            print("can't change it:", error.strerror)
"""


@contextmanager
def index_at(host: Host, *faults: str) -> Iterator[Command]:
    """A package index on ``host``."""
    words = [sys.executable, "-m", "support.package_index", host.address, str(PORT), *faults]
    tests = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with Command(host.command(words), env=tests, orders=True) as index:
        index.wait_for("index: ")
        yield index


def written(folder: Path) -> Path:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    go = str(folder.parent / "go")
    waits = (
        f"    print('it waits')\n    while not os.path.exists({go!r}):\n        time.sleep(0.1)\n"
    )
    script.with_name("waits.py").write_text(SCRIPT + waits)
    return script


def sent_by(index: Command) -> dict[str, Any]:
    since = index.mark
    index.order("count")
    found: dict[str, Any] = json.loads(index.wait_for("sent: ", since=since).partition(" ")[2])
    return found


def ready_after(run: Command, machine: str = "") -> float:
    """The seconds that a machine's environment took."""
    line = next(each for each in run.lines if f"{machine}environment: ready after" in each)
    return float(line.partition("ready after ")[2].split()[0])


async def warm_s(home: Path, index: str) -> float:
    """The seconds that the environment in ``home``, which is there, costs a job."""
    (plan,) = (home / "environments" / "plans").glob("*.json")
    environments = Environments(Settings(home=home, package_index=index))
    began = time.monotonic()
    found = await environments.make(decode_plan(plan.read_bytes()), lambda text: None)
    took = time.monotonic() - began
    found.release()
    return took


@pytest.mark.parametrize("megabytes", [4, pytest.param(800, marks=pytest.mark.long)])
def test_three_machines_have_a_gigabyte_of_wheels_in_hardly_more_than_the_time_of_one(
    tmp_path: Path, figures: Figures, megabytes: int
) -> None:
    """One large wheel and ten small ones, a quarter of its bytes, at 200 Mbit/s. The long one needs
    9 GB on the disk."""
    small = {f"part{number}": max(1, megabytes // 40) for number in range(10)}
    sizes = {"large": megabytes, **small}
    script = tmp_path / "script" / "train.py"
    script.parent.mkdir()
    script.write_text(
        f"# /// script\n# dependencies = {[*sizes]}\n# ///\n"
        "import large, potluck\nwith potluck.init() as ctx:\n    print('has', large.VERSION)\n"
    )
    words = [f"{name}:{size}" for name, size in sizes.items()]
    given = {"POTLUCK_PACKAGE_INDEX": URL.format(5)}
    with (
        Network(5, rate="200mbit") as network,
        ExitStack() as stack,
        index_at(network[4], *words) as index,
    ):
        ada, bob, carl, dora = (
            stack.enter_context(Machine(network[number], tmp_path / "homes", **given))
            for number in range(4)
        )
        with dora.run(script) as run:  # alone, without an agent
            assert run.finish() == 0, run.text
        one, before = ready_after(run), sent_by(index)["sent"]
        form(ada, bob, carl)
        with ada.run(script) as run:
            assert run.finish() == 0, run.text
        assert run.text.count("has 1.0") == 3
        counted = sent_by(index)
        sent = sum(counted["sent"].values()) - sum(before.values())
        wheels = sum(counted["sizes"][name] for name in before)
        took = max(ready_after(run, f"{each.name}: ") for each in (ada, bob, carl))
        what = f"3 machines, {sum(sizes.values())} MB of wheels at 200 Mbit/s"
        is_long = megabytes > 100
        asked = 1.1 if is_long else None
        figures.take(what, "copies that leave the index:", sent / wheels, asked=asked, unit="")
        asked = 1.3 if is_long else None
        figures.take(what, "times of one machine alone:", took / one, asked=asked, unit="")
        warm = asyncio.run(warm_s(ada.home, URL.format(5)))
        figures.take(what, "a warm environment:", warm, asked=0.3 if is_long else None, unit="s")


def test_each_wheel_leaves_the_index_once_and_a_machine_without_it_takes_part(
    tmp_path: Path,
) -> None:
    script = written(tmp_path / "script")
    given = {"POTLUCK_PACKAGE_INDEX": URL.format(4), "POTLUCK_SANDBOX": "1"}
    with (
        cluster_of(4, tmp_path / "homes", **given) as (ada, bob, carl, dora),
        index_at(dora.host) as index,
    ):
        form(ada, bob)
        with ada.run(script) as run:
            assert run.finish() == 0, run.text
        assert run.text.count("has 1.0 1.0 1 of 2") == 2
        assert "bob: environment: ready after" in run.text
        assert "can't change it: Read-only file system" in run.text
        counted = sent_by(index)
        for name, num_bytes in counted["sent"].items():
            assert num_bytes <= 1.3 * counted["sizes"][name], (name, counted)
        carl.host.blackhole(dora.host)
        carl.start()
        ada.sees(ada, bob, carl)
        with ada.run(script) as run:
            assert run.finish() == 0, run.text
        assert run.text.count("has 1.0 1.0 1 of 3") == 3
        ready = next(line for line in run.lines if "carl: environment: ready after" in line)
        assert "MB from ada" in ready or "MB from bob" in ready
        assert dora.host.address not in ready
        assert sent_by(index) == counted


def test_who_takes_no_part_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    script, homes = written(tmp_path / "script"), tmp_path / "homes"
    with (
        Network(3) as network,
        Machine(network[0], homes, POTLUCK_PACKAGE_INDEX=URL.format(3)) as ada,
        Machine(network[1], homes, POTLUCK_ENVIRONMENTS="off") as bob,
        index_at(network[2], "large-1.0-py3-none-any.whl=stall") as index,
    ):
        form(ada, bob)
        with ada.run(script) as run:
            run.wait_for("ada: environment: 0 of")
            assert "potluck: starting" not in run.text, "it is shown while they travel"
            index.order("release")
            run.wait_for("potluck: starting")
            assert run.finish() == 0, run.text
        assert "has 1.0 1.0 1 of 1" in run.text
        assert run.text.count("a node can't take part: bob") == 1, run.text
        assert "makes no environments for scripts" in run.text
        bob.kill()
        with ada.run(script.with_name("waits.py")) as run:
            run.wait_for("it waits")
            bob.start()
            run.wait_for(f"bob ({bob.id}): makes no environments for scripts")
            (tmp_path / "go").touch()
            assert run.finish() == 0, run.text
