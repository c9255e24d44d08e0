"""``potluck run`` with scripts that are not elastic: their worlds are stopped and started again."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands import Command, potluck_command, process_ends, run_command
from support.figures import Figures

# A counter instead of a model: what it reaches shows that every start resumed from the file.
TRAINING = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist

backend, method, folder, num_steps = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), 100
checkpoint = folder / "checkpoint"
dist.init_process_group(backend, init_method=method)
rank, size = dist.get_rank(), dist.get_world_size()
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {rank} of {size} begins at {step}, restart {count}, pid {os.getpid()}", flush=True)
while step < num_steps or not (folder / "stop").exists():
    ones = torch.ones(10)
    dist.all_reduce(ones)
    assert ones[0] == size, ones
    step += 1
    if rank == 0:
        new = folder / "new"
        new.write_text(str(step))
        new.replace(checkpoint)
    if (folder / f"raise-{rank}").exists():
        raise ValueError("a mistake of the script")
    if step % 10 == 0 and rank == 0:
        print("step", step, flush=True)
    stop = torch.tensor([(folder / "stop").exists()], dtype=torch.int32)
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    if stop[0]:
        break
    time.sleep(0.005)
dist.destroy_process_group()
print("ended well", flush=True)
"""

# The same without init_process_group: the context makes Gloo's group by itself.
CONTEXT = TRAINING.replace(
    "dist.init_process_group(backend, init_method=method)",
    """
import potluck

context = potluck.init("gloo")
dist.get_rank, dist.get_world_size = lambda: context.rank, lambda: context.world_size
dist.all_reduce = lambda tensor, op=None: context.all_reduce(tensor, "max" if op else "sum")
dist.destroy_process_group = context.close
""",
)

WAYS = [
    ("potluck", "env://"),
    ("gloo", "context"),
    pytest.param("gloo", "env://", marks=pytest.mark.long),
    pytest.param("potluck", "potluck://", marks=pytest.mark.long),
]


@pytest.fixture
def training(tmp_path: Path) -> str:
    path = tmp_path / "training.py"
    path.write_text(TRAINING)
    return str(path)


class Run:
    """A run of the training, and the pids of its ranks as of their last start."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._since = 0

    def begun(self, size: int) -> dict[int, tuple[int, int]]:
        """Wait until ``size`` ranks have begun (again); for each rank its first step and pid."""
        found = {}
        for rank in range(size):
            line = self.command.wait_for(f"rank {rank} of {size} begins", since=self._since)
            step, _, pid = re.search(r"at (\d+), restart (\d+), pid (\d+)", line).groups()
            found[rank] = (int(step), int(pid))
        self._since = self.command.mark
        return found

    def trains(self) -> None:
        self.command.wait_for("step ", since=self._since)


@pytest.mark.parametrize(("backend", "method"), WAYS)
def test_a_killed_worker_has_the_world_started_again_from_its_checkpoint(
    training: str, tmp_path: Path, backend: str, method: str
) -> None:
    summary = tmp_path / "summary.json"
    if method == "context":
        Path(training).write_text(CONTEXT)
    with run_command(
        *("-n", "3", "--json", str(summary), training, backend, method, str(tmp_path))
    ) as command:
        run = Run(command)
        before = run.begun(3)
        assert {step for step, _ in before.values()} == {0}
        run.trains()
        os.kill(before[1][1], signal.SIGKILL)
        after = run.begun(3)
        assert min(step for step, _ in after.values()) >= 10
        assert not {pid for _, pid in before.values()} & {pid for _, pid in after.values()}
        assert all(process_ends(pid) for _, pid in before.values())
        command.wait_for(
            "potluck: worker 1 killed by SIGKILL (9): the script can't go on without it, so all "
            "workers start again (restart 1 of 3)"
        )
        command.wait_for(
            lambda line: re.fullmatch(
                r"potluck: worker 1 lost \(killed by SIGKILL \(9\)\), 3 workers started again in "
                r"\d+\.\d\d s",
                line,
            )
        )
        (tmp_path / "stop").touch()
        assert command.finish() == 0, command.text
        assert sum("ended well" in line for line in command.lines) == 3
        assert "starting worker 1 again" not in command.text
    told = json.loads(summary.read_text())
    assert told["world_restarts"] == 1
    assert [recovery["workers"] for recovery in told["recoveries"]] == [["1"]]


def test_all_killed_at_once_start_again(training: str, tmp_path: Path) -> None:
    with run_command("-n", "3", training, "gloo", "env://", str(tmp_path)) as command:
        run = Run(command)
        before = run.begun(3)
        run.trains()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none is told that another one has died
            for _, pid in before.values():
                os.kill(pid, number)
        assert min(step for step, _ in run.begun(3).values()) >= 10
        assert "(restart 1 of 3)" in command.text
        (tmp_path / "stop").touch()
        assert command.finish() == 0, command.text


@pytest.mark.parametrize("backend", ["gloo", "potluck"])
def test_a_script_that_raises_by_itself_is_not_started_again(
    training: str, tmp_path: Path, backend: str
) -> None:
    with run_command("-n", "3", training, backend, "env://", str(tmp_path)) as command:
        Run(command).begun(3)
        (tmp_path / "raise-2").touch()
        assert command.finish() == 1, command.text
        assert "ValueError: a mistake of the script" in command.lines[-1]
        assert "start again" not in command.text


def test_a_loss_fails_the_job_if_that_is_what_the_user_wants(training: str, tmp_path: Path) -> None:
    arguments = (training, "gloo", "env://", str(tmp_path))
    with run_command("-n", "2", "--on-loss", "fail", *arguments) as command:
        before = Run(command).begun(2)
        os.kill(before[0][1], signal.SIGKILL)
        assert command.finish() == 128 + signal.SIGKILL, command.text
        assert (
            "worker 0 killed by SIGKILL (9); not started again, by --on-loss fail" in command.text
        )


def test_a_world_is_not_started_more_often_than_allowed(training: str, tmp_path: Path) -> None:
    arguments = (training, "gloo", "env://", str(tmp_path))
    with run_command("-n", "2", "--max-restarts", "1", *arguments) as command:
        run = Run(command)
        os.kill(run.begun(2)[0][1], signal.SIGKILL)
        os.kill(run.begun(2)[0][1], signal.SIGKILL)
        assert command.finish() == 128 + signal.SIGKILL, command.text
        assert "worker 0 killed by SIGKILL (9); not started again after 1 restarts" in command.text


WITH_A_CONTEXT = """
import os, pathlib, signal, sys
import numpy as np
import potluck

checkpoint = pathlib.Path(sys.argv[1]) / "checkpoint"
with potluck.init() as ctx:
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print(f"rank {ctx.rank} of {ctx.world_size} begins at {step}", flush=True)
    while step < 40:
        assert ctx.all_reduce(np.ones(10))[0] == 3
        step += 1
        if ctx.rank == 0:
            new = checkpoint.with_name("new")
            new.write_text(str(step))
            new.replace(checkpoint)
        if step == 20 and ctx.rank == 1 and os.environ["POTLUCK_RESTARTS"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_with_a_context_that_does_not_re_form_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "with_a_context.py"
    path.write_text(WITH_A_CONTEXT)
    with run_command("-n", "3", str(path), str(tmp_path)) as command:
        assert command.finish() == 0, command.text
        assert "so all workers start again (restart 1 of 3)" in command.text
        command.wait_for("3 workers started again in")
        begun = [line for line in command.lines if "begins at" in line]
        assert len(begun) == 6
        assert all(int(line.rsplit(" ", 1)[1]) >= 19 for line in begun[3:])


ONE_IS_LATE = """
import os, pathlib, signal, sys
mark = pathlib.Path(sys.argv[1]) / "mark"
import torch.distributed as dist
if os.environ["RANK"] == "1" and not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print("pid", os.getpid(), flush=True)
dist.init_process_group("gloo")
dist.barrier()
print("met", flush=True)
"""


def test_a_worker_killed_before_the_ranks_met_starts_again_alone(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(ONE_IS_LATE)
    with run_command("-n", "3", str(path), str(tmp_path)) as command:
        assert command.finish() == 0, command.text
        assert "starting worker 1 again (restart 1 of 3)" in command.text
        assert sum("met" in line for line in command.lines) == 3
        assert sum("pid" in line for line in command.lines) == 3, "the others waited"


SPAWNING = """
import os
import torch.distributed as dist
import torch.multiprocessing as mp

def child(rank):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "2"
    dist.init_process_group("gloo")
    dist.barrier()
    os.write(1, f"met {rank}\\n".encode())  # whole lines: the processes share the pipe

if __name__ == "__main__":
    mp.spawn(child, nprocs=2)
"""


def test_worlds_of_processes_that_a_worker_spawns_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "spawning.py"
    path.write_text(SPAWNING)
    with run_command(str(path)) as command:
        assert command.finish() == 0, command.text
        assert sorted(line for line in command.lines if "met" in line) == ["[0] met 0", "[0] met 1"]


def test_the_recipe_of_the_page_resumes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
    section = page.partition("### Resuming under potluck run")[2]
    recipe = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    path = tmp_path / "recipe.py"
    saved = 'os.replace("checkpoint.new", path)'
    assert saved in recipe
    # The first process that saves waits to be killed: the training can't end before that.
    announced = recipe.replace(
        saved,
        f'{saved}; print("saved", os.getpid(), flush=True)\n'
        '        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":\n'
        "            signal.pause()\n",
    )
    path.write_text("import signal\n" + announced)
    with Command([*potluck_command(), "run", "-n", "2", str(path)], cwd=tmp_path) as command:
        saver = int(command.wait_for("saved ").rsplit(" ", 1)[1])
        os.kill(saver, signal.SIGKILL)
        line = command.wait_for(lambda line: "begins at step" in line and not line.endswith(" 0"))
        assert int(line.rsplit(" ", 1)[1]) % 20 == 0
        assert command.finish() == 0, command.text


@pytest.mark.long
@pytest.mark.timeout(900)
def test_twenty_kills_in_a_row(training: str, tmp_path: Path, figures: Figures) -> None:
    """Any rank, one after the other; what a start costs is imports, and what else is the rest."""
    importing = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torch.distributed"], check=True)
    importing = time.monotonic() - importing
    chance, worst = random.Random(7), 0.0
    arguments = (training, "gloo", "env://", str(tmp_path))
    with run_command("-n", "3", "--max-restarts", "20", *arguments) as command:
        run = Run(command)
        ranks = run.begun(3)
        for _ in range(20):
            run.trains()
            killed = time.monotonic()
            os.kill(chance.choice(list(ranks.values()))[1], signal.SIGKILL)
            ranks = run.begun(3)
            run.trains()
            worst = max(worst, time.monotonic() - killed)
        (tmp_path / "stop").touch()
        assert command.finish() == 0, command.text
    fault = "a worker of a script that is not elastic killed, 20 times"
    figures.take(
        fault, "trains again after, imports not counted, at worst", worst - importing, asked=5.0
    )


TWICE = """
import sys, time
import torch
import torch.distributed as dist

for way in sys.argv[1:]:
    backend, method = way.split("=")
    dist.init_process_group(backend, init_method=method)
    ones = torch.ones(4)
    dist.all_reduce(ones)
    print(way, ones[0].item(), flush=True)
    if dist.get_rank() == 0:
        time.sleep(0.5)  # the others are in the next init_process_group before it
    dist.destroy_process_group()
print("ended well", flush=True)
"""


def test_a_script_may_destroy_its_process_group_and_make_another(tmp_path: Path) -> None:
    """Each way after itself and after each other: importing torch takes longer than all of it."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    gloo, env, own = "gloo=env://", "potluck=env://", "potluck=potluck://"
    ways = (own, own, gloo, gloo, env, env, own, env, gloo, own)
    with run_command("-n", "3", str(script), *ways) as command:
        assert command.finish() == 0, command.text
        assert sum(line.endswith(" 3.0") for line in command.lines) == 3 * len(ways)
        assert sum("ended well" in line for line in command.lines) == 3


ONCE = """
import sys
import potluck

for word in sys.argv[1:]:
    if word == "close":
        context.close()
    elif word == "init":
        context = potluck.init()
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=word)
        dist.barrier()
print("ended well", flush=True)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("init", "close", "init"), "this worker has left its group"),
        (("init", "init"), "this worker has a group already"),
        (("env://", "init"), "this worker has a group already"),
        (("init", "close", "env://"), "ended well"),
        (("init", "env://", "close"), "ended well"),
    ],
)
def test_a_second_group_of_another_kind_works_or_is_refused_at_once(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    script = tmp_path / "once.py"
    script.write_text(ONCE)
    with run_command("-n", "2", str(script), *words) as command:
        assert command.finish() == (0 if said == "ended well" else 1), command.text
        assert said in command.text
        assert "start again" not in command.text


def test_a_missing_backend_is_the_scripts_own_error(tmp_path: Path) -> None:
    script = tmp_path / "nccl.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        'raise RuntimeError("Distributed package doesn\'t have NCCL built in")\n'
    )
    with run_command("-n", "2", str(script)) as command:
        assert command.finish() == 1, command.text
        assert "start again" not in command.text
