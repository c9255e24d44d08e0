"""Parameter server and work queue in processes of ``potluck run``: the example, and real kills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")
pytest.importorskip("torch")

from support.commands import run_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"


@pytest.mark.parametrize(
    "options",
    [("--servers", "2"), ("--synchronous",)],
    ids=["asynchronous on two servers", "synchronous"],
)
def test_the_example_classifies_digits_on_two_workers(options: tuple[str, ...]) -> None:
    with run_command("--workers", "2", str(EXAMPLE), *options) as run:
        assert run.finish() == 0
        assert any(line.startswith("[0] test accuracy") for line in run.lines)


KILLED = """
import os, pathlib, signal, sys
import numpy as np
import potluck
from potluck.parameter_server import SGD

folder, victim, servers, early = pathlib.Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
ctx = potluck.init()
potluck.parameter_server.server._LEAVE_S = 0.01 if early else 5.0
last = 6 if early and ctx.group.me.worker == "1" else 12
ps = potluck.ParameterServer(
    ctx, optimizer=SGD(0.5), servers=servers, checkpoint=folder / "kept", save_every=1
)
ps.set_parameters("m", {name: np.zeros(4) for name in "abcdef"})
while True:
    parameters, version = ps.get_parameters("m")
    assert len(np.unique(list(parameters.values()))) == 1, parameters
    if version >= last:
        break
    is_first = not (folder / "killed").exists()
    if ctx.group.me.worker == victim and version >= (8 if early else 5) and is_first:
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    ps.accumulate_gradient("m", {name: each - 8 for name, each in parameters.items()})
ps.close()
error = abs(parameters["a"][0] - 8 * (1 - 0.5 ** version))
print("version", version, "right" if error < 1e-12 else f"wrong by {error}")
"""


@pytest.mark.parametrize(
    ("victim", "servers", "early"),
    [("0", 1, 0), ("1", 1, 0), ("0", 2, 0), ("1", 2, 0), ("0", 2, 1)],
    ids=[
        "the server",
        "a worker",
        "the first of two servers",
        "the second of two servers",
        "the first of two servers when the other one's worker is done",
    ],
)
def test_after_a_kill_the_training_goes_on_from_where_the_servers_were(
    tmp_path: Path, victim: str, servers: int, early: int
) -> None:
    """Each update halves the distance to 8: a lost or doubled one would show in the last digits."""
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    given = (str(tmp_path), victim, str(servers), str(early))
    with run_command("--workers", "3", str(script), *given) as run:
        assert run.finish() == 0
        assert sum("version 12 right" in line for line in run.lines) >= 2
    assert (tmp_path / "killed").exists()


BOTH = """
import os, pathlib, signal, sys, time
import numpy as np
import potluck
from potluck.parameter_server import SGD

folder, me = pathlib.Path(sys.argv[1]), os.environ["POTLUCK_WORKER"]

def die_once():
    if not (folder / f"killed {me}").exists():
        (folder / f"killed {me}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

if (folder / f"killed {me}").exists():  # of both the worker is back first
    wait_for("killed 0" if me == "2" else "back 2")
ctx = potluck.init()
if (folder / f"killed {me}").exists():
    (folder / f"back {me}").touch()
    print("back in a group of worker", ", ".join(each.worker for each in ctx.members))
ps = potluck.ParameterServer(ctx, optimizer=SGD(1.0), checkpoint=folder / "kept", save_every=1)
ps.set_parameters("m", {"w": np.zeros(3)})
version = 0
while version < 20:
    parameters, version = ps.get_parameters("m")
    assert set(parameters["w"].tolist()) == {float(version)}
    if version >= 8 and me == "2":
        die_once()
    if version >= 8 and me == "0":
        wait_for("killed 2")
        die_once()
    ps.accumulate_gradient("m", {"w": -np.ones(3)})
ps.close()
print("version", version)
"""


def test_a_server_and_a_worker_that_are_killed_at_once_come_back(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BOTH)
    with run_command("--workers", "3", str(script), str(tmp_path)) as run:
        assert run.finish() == 0
        assert "[1] back in a group of worker 1, 2" in run.lines
        assert sum("version 20" in line for line in run.lines) == 3


QUEUE = """
import os, pathlib, signal, sys, threading
import potluck

killed = pathlib.Path(sys.argv[1]) / "killed"
ctx = potluck.init()
with potluck.WorkQueue(ctx, list(range(40)), backups=0, silence_s=5.0) as queue:
    for task in queue:
        if ctx.group.me.worker == "1" and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while not killed.exists():  # else nothing may be left for worker 1
            threading.Event().wait(0.01)
        sum(range(200_000))
        queue.finish(task, task.payload ** 2)
    assert queue.results() == [number ** 2 for number in range(40)]
    if ctx.group.me.worker == "0":
        print("queue", queue.stats())
"""


def test_a_killed_workers_task_is_done_by_another(tmp_path: Path) -> None:
    script = tmp_path / "queue.py"
    script.write_text(QUEUE)
    with run_command("--workers", "3", str(script), str(tmp_path)) as run:
        assert run.finish() == 0
        [line] = [line for line in run.lines if "queue {" in line]
    assert "'done': 40" in line
    # A worker that a busy machine holds up is taken for lost, too: its task is handed out again.
    assert re.search("'again': [1-9]", line), line


LOST = """
import os, pathlib, signal, sys
import numpy as np
import potluck
from potluck.parameter_server import SGD, Asynchronous, Synchronous

folder, victims, servers, mode = pathlib.Path(sys.argv[1]), sys.argv[2], *map(eval, sys.argv[3:])
ctx = potluck.init()
me, told = ctx.group.me.worker, 0
ps = potluck.ParameterServer(ctx, mode, optimizer=SGD(1.0), servers=servers, replicas=1)
ps.set_parameters("m", {name: np.zeros(4) for name in "abcdef"})
while True:
    parameters, version = ps.get_parameters("m")
    assert {float(each) for one in parameters.values() for each in one} == {float(version)}
    assert version >= told, f"version {version} after {told}"
    told = version
    (folder / f"version {version}").touch()
    turn = sum((folder / f"killed {victim}").exists() for victim in victims)
    if version >= 30 and turn == len(victims):
        break
    if turn < len(victims) and victims[turn] == me and version >= 8 * (turn + 1):
        (folder / f"killed {me}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if (folder / f"killed {me}").exists():
        (folder / f"back {me}").touch()
    if 0 < turn < len(victims) and not (folder / f"back {victims[turn - 1]}").exists():
        continue
    ps.accumulate_gradient("m", {name: -np.ones(4) for name in parameters})
ps.close()
print("trained to version", version)
"""


@pytest.mark.parametrize(
    ("victims", "servers", "mode"),
    [
        ("0", "2", "Synchronous()"),
        ("1", "2", "Synchronous()"),
        ("0", "3", "Asynchronous(4, scale_by_staleness=False)"),
        ("01", "2", "Synchronous()"),
    ],
    ids=[
        "the first of two",
        "the second of two",
        "the first of three, asynchronous",
        "both, one after the other",
    ],
)
def test_with_replicas_a_killed_server_costs_no_version(
    tmp_path: Path, victims: str, servers: str, mode: str
) -> None:
    """Without any checkpoint: each update adds 1, and a version never goes back."""
    script = tmp_path / "train.py"
    script.write_text(LOST)
    with run_command("--workers", "3", str(script), str(tmp_path), victims, servers, mode) as run:
        assert run.finish() == 0, run.lines
        versions = re.findall(r"trained to version (\d+)", run.text)
        assert len(versions) >= 2, run.lines
        assert all(int(version) >= 30 for version in versions)
    for victim in victims:
        assert (tmp_path / f"killed {victim}").exists()


BACK = """
import os, pathlib, signal, sys, time
import numpy as np
import potluck
from potluck.parameter_server import SGD, Asynchronous

folder, me = pathlib.Path(sys.argv[1]), os.environ["POTLUCK_WORKER"]
is_back = (folder / "closed 1").exists()
ctx = potluck.init()

def wait_for(name):
    while not (folder / name).exists():
        if ctx.reform_due:
            ctx.reform(ctx.communicator.error)
        time.sleep(0.01)

if is_back and me == "1":
    (folder / "back").touch()
    wait_for("closed 2")
    time.sleep(1.0)  # a server that does not wait ends now
with potluck.ParameterServer(ctx, Asynchronous(), optimizer=SGD(1.0)) as ps:
    ps.set_parameters("m", {"w": np.zeros(3)})
    ps.get_parameters("m")
    counted = ps.accumulate_gradient("m", {"w": np.ones(3)})
    if me == "2":
        wait_for("back")
(folder / f"closed {me}").touch()
if me == "1" and not is_back:
    os.kill(os.getpid(), signal.SIGKILL)
print("counted", counted)
"""


def test_a_worker_that_had_left_and_is_killed_is_waited_for_when_it_comes_back(
    tmp_path: Path,
) -> None:
    script = tmp_path / "back.py"
    script.write_text(BACK)
    with run_command("--workers", "3", str(script), str(tmp_path)) as run:
        assert run.finish() == 0, run.text
        assert "[1] counted True" in run.text
