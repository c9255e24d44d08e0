"""``potluck run`` with scripts that train together: losses, returns, failures, all for real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from support.commands import potluck_command, process_ends, run_command

# The smallest elastic loop there is: a counter that all ranks keep equal. What the training loop
# does with models and optimizers is tested with it; here it is about processes.
COUNTER = """
import os, sys, time
import numpy as np
import potluck
from potluck.errors import Evicted, OperationTimeout, PeerLost

LOST = (Evicted, OperationTimeout, PeerLost)
num_steps, seconds, min_world_size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
print("pid", os.getpid(), flush=True)
context = potluck.init()
step, agreed = 0, False
while True:
    try:
        if not agreed:
            step, agreed = int(context.all_gather(np.array([step])).max()), True
            enough = max(num_steps, step + 3)
        if step >= enough and context.world_size >= min_world_size:
            break
        context.begin_step(step)
        time.sleep(seconds)
        context.all_reduce(np.ones(1000), op="mean")
        outcome = context.commit(step, loss=1.0)
        step += bool(outcome)
        context.report(step=step, loss=outcome.loss, samples_per_s=10.0, device="cpu")
        if outcome.reform:
            agreed = False
            context.reform()
    except LOST as error:
        print("lost", error, flush=True)
        agreed = False
        while True:
            try:
                context.reform(error)
                break
            except LOST as again:
                error = again
context.report(parameter_hash=f"{step:04x}", committed_steps=step)
context.close()
"""


SOON_S = 15.0
"""Half of the deadline of an operation: a loss that is mended earlier was not waited for."""


@pytest.fixture
def counter(tmp_path: Path) -> str:
    path = tmp_path / "counter.py"
    path.write_text(COUNTER)
    return str(path)


def told(path: Path) -> dict:
    return json.loads(path.read_text())


def test_workers_form_a_group_and_finish_with_equal_parameters(counter, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    with run_command("-n", "3", "--json", str(summary), counter, "20", "0", "0") as run:
        assert run.finish() == 0, run.text
        run.wait_for(lambda line: line.startswith("parameters ") and line.endswith("equal on all"))
    result = told(summary)
    assert result["committed_steps"] == 20
    assert result["hashes_equal"] is True
    assert [worker["parameter_hash"] for worker in result["workers"]] == ["0014"] * 3
    assert result["recoveries"] == []


def test_a_killed_worker_is_left_behind_and_taken_back_in(counter, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    with run_command(
        *("-n", "4", "--chaos", "kill rank 2 at step 10", "--json", str(summary)),
        *(counter, "20", "0.02", "4"),
    ) as run:
        assert run.finish() == 0, run.text
        run.wait_for(
            lambda line: re.fullmatch(
                r"potluck: worker 2 lost \(killed by SIGKILL \(9\)\), re-formed in \d+\.\d\d s, "
                r"step 10 run again, training on after \d+\.\d\d s",
                line,
            )
        )
        run.wait_for(lambda line: re.fullmatch(r"potluck: worker 2 rejoined at step \d+", line))
    result = told(summary)
    (recovery,) = result["recoveries"]
    assert recovery["workers"] == ["2"]
    assert recovery["step"] == 10
    assert recovery["run_again"] is True
    assert 0 <= recovery["reformed_s"] <= recovery["recovered_s"] < SOON_S
    assert [worker["restarts"] for worker in result["workers"]] == [0, 0, 1, 0]
    assert result["hashes_equal"] is True
    assert result["committed_steps"] >= 20


@pytest.mark.parametrize("delay", [0, 2])
def test_two_kills_in_rounds_cost_no_step_and_no_sample(delay: int, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    orders = "kill rank 2 at step 30; kill rank 1 at step 101"
    script = str(Path(__file__).parent / "scripts" / "rounds.py")
    with run_command(
        *("-n", "3", "--chaos", orders, "--json", str(summary)), *(script, str(delay))
    ) as run:
        assert run.finish() == 0, run.text
    said = [line for line in run.lines if "counted once" in line]
    assert len(said) >= 2
    assert all(line.endswith("True") for line in said), run.text
    result = told(summary)
    recoveries = result["recoveries"]
    assert {name for each in recoveries for name in each["workers"]} == {"1", "2"}, run.text
    assert not any(recovery["run_again"] for recovery in recoveries), run.text
    assert result["steps_run_again"] == 0
    assert result["hashes_equal"] is True


def test_a_job_begins_without_a_worker_that_keeps_dying_and_takes_it_in_later(
    tmp_path: Path,
) -> None:
    """Workers 0 to 2 ask for a group when worker 3 has died twice, which then has 4 s more."""
    gate, others = tmp_path / "gate", tmp_path / "others"
    script = tmp_path / "counter.py"
    script.write_text(
        COUNTER.replace(
            "context = potluck.init()",
            f"gate = {str(gate)!r} if os.environ['RANK'] == '3' else {str(others)!r}\n"
            "while not os.path.exists(gate):\n"
            "    time.sleep(0.01)\n"
            "context = potluck.init()\n"
            "print('enters a world of', context.world_size, flush=True)",
        )
    )
    with run_command(
        *("-n", "4", "--wait", "4", "--min-workers", "2", "--max-restarts", "1000"),
        *(str(script), "20", "0.02", "4"),
    ) as run:
        killed, begun, mark = 0, False, 0
        while not begun:
            line = run.wait_for(
                lambda line: line.startswith("[3] pid ") or "enters a world of" in line, since=mark
            )
            mark = run.lines.index(line, mark) + 1
            begun = "enters a world of" in line
            if not begun:
                os.kill(int(line.split()[-1]), signal.SIGKILL)
                killed += 1
                if killed == 2:
                    others.touch()
        assert line.endswith("enters a world of 3"), run.text
        assert killed >= 2, run.text
        gate.touch()
        run.wait_for("beginning with 3 workers: worker 3 is not ready after 4 s")
        run.wait_for("[3] enters a world of 4")
        assert run.finish() == 0, run.text


def test_a_stopped_worker_is_evicted_and_comes_back(counter, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    with run_command(
        *("-n", "3", "--chaos", "stop rank 1 at step 5 for 8 s", "--peer-timeout", "4"),
        *("--json", str(summary), counter, "20", "0.02", "3"),
    ) as run:
        assert run.finish() == 0, run.text
        run.wait_for("worker 1 stands still: its process")
        run.wait_for("worker 1 rejoined at step")
    result = told(summary)
    (recovery,) = result["recoveries"]
    assert recovery["workers"] == ["1"]
    assert recovery["step"] == 5
    assert [worker["restarts"] for worker in result["workers"]] == [0, 0, 0]
    assert result["hashes_equal"] is True


def test_a_short_stop_evicts_nobody(counter, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    with run_command(
        *("-n", "3", "--chaos", "stop rank 1 at step 5 for 0.5 s", "--json", str(summary)),
        *(counter, "20", "0", "0"),
    ) as run:
        assert run.finish() == 0, run.text
    assert told(summary)["recoveries"] == []


def test_when_all_are_killed_all_begin_again(counter, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    with run_command(
        "-n", "2", "--chaos", "kill all at step 5", "--json", str(summary), counter, "10", "0", "0"
    ) as run:
        assert run.finish() == 0, run.text
    result = told(summary)
    assert [worker["restarts"] for worker in result["workers"]] == [1, 1]
    assert result["committed_steps"] == 10


def test_with_restarts_used_up_the_others_go_on_alone(counter, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    with run_command(
        *("-n", "3", "--max-restarts", "0", "--chaos", "kill rank 0 at step 5"),
        *("--json", str(summary), counter, "30", "0", "0"),
    ) as run:
        assert run.finish() == 0, run.text
        run.wait_for("worker 0 killed by SIGKILL (9); not started again after 0 restarts")
    result = told(summary)
    assert [worker["finished"] for worker in result["workers"]] == [False, True, True]


def test_a_newcomer_still_starting_at_the_end_is_stopped(counter) -> None:
    mark = Path(counter).with_name("newcomer")
    slow = "import os, pathlib, time\n"
    slow += f"newcomer = pathlib.Path({str(mark)!r})\n"
    slow += "if os.environ['POTLUCK_RESTARTS'] == '1':\n    newcomer.touch()\n    time.sleep(600)\n"
    # The members finish only when the newcomer is there.
    begins = "context.begin_step(step)"
    waits = "while step == 19 and not newcomer.exists():\n            time.sleep(0.01)\n        "
    Path(counter).write_text(slow + COUNTER.replace(begins, waits + begins))
    with run_command("-n", "2", "--chaos", "kill rank 1 at step 5", counter, "20", "0", "0") as run:
        assert run.finish() == 0, run.text
        run.wait_for("stopping worker 1: the members of the job have finished")


def test_an_exception_on_one_rank_reaches_all_with_rank_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "failing.py"
    path.write_text(
        "import numpy as np, potluck\n"
        "context = potluck.init()\n"
        "for step in range(100):\n"
        "    if step == 5 and context.rank == 1:\n"
        "        raise ValueError('bad batch')\n"
        "    context.all_reduce(np.ones(1000))\n"
    )
    with run_command("-n", "3", str(path)) as run:
        assert run.finish() == 1
        for rank in (0, 2):
            run.wait_for(
                lambda line, rank=rank: (
                    line.startswith(f"[{rank}] ")
                    and "RemoteError" in line
                    and "rank 1" in line
                    and "ValueError: bad batch" in line
                )
            )
        run.wait_for(
            lambda line: line.startswith("potluck: rank 1, worker 1 failed: ValueError: bad batch")
        )
        for rank in (0, 2):  # where it was in the script, and nothing of potluck's insides
            said = [line for line in run.text.splitlines() if line.startswith(f"[{rank}] ")]
            assert f'[{rank}]   File "{path}", line 6, in <module>' in said
            assert len([line for line in said if "  File " in line]) == 1, run.text


def test_a_worker_nobody_can_link_to_fails_the_run_at_once_and_says_so(tmp_path: Path) -> None:
    """With its listener's thread dead it would form group after group, each to be lost again."""
    path = tmp_path / "broken.py"
    path.write_text(
        "import socket\nimport numpy as np\nimport potluck\n"
        "context = potluck.init()\n"
        "context.barrier()\n"
        "if context.rank == 1:\n"
        "    listener = context._backend._base.listener\n"
        "    def broken(): raise MemoryError('no room')\n"
        "    listener._acceptor._accept = broken\n"
        "    socket.create_connection(('127.0.0.1', listener.port))\n"
        "while True:\n"
        "    context.all_reduce(np.ones(1000), op='mean', timeout=600)\n"
    )
    summary = tmp_path / "summary.json"
    with run_command("-n", "2", "--json", str(summary), str(path)) as run:
        assert run.finish() == 1, run.text
    result = told(summary)
    said = "\n".join(result["problems"])
    assert "no rank can connect to rank 1 (worker 1 at 127.0.0.1:" in said
    assert "broke (MemoryError: no room). The script is not to blame: start it again" in said
    assert result["recoveries"] == [], "no second group was formed"


def test_ranks_that_disagree_fail_the_run_with_both_calls(tmp_path: Path) -> None:
    path = tmp_path / "desync.py"
    path.write_text(
        "import numpy as np, potluck\n"
        "context = potluck.init()\n"
        "context.all_reduce(np.ones(10 + context.rank))\n"
    )
    with run_command("-n", "2", str(path)) as run:
        assert run.finish() == 1
        run.wait_for("Desync")


def test_a_blocked_group_ends_with_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "blocked.py"
    path.write_text(
        "import time, numpy as np, potluck\n"
        "context = potluck.init()\n"
        "print('in', flush=True)\n"
        "time.sleep(600) if context.rank == 0 else context.barrier(timeout=600)\n"
    )
    with run_command("-n", "2", str(path)) as run:
        run.wait_for("[0] in")
        run.wait_for("[1] in")
        run.signal(signal.SIGINT)
        assert run.finish() == 130


def test_status_shows_a_training_job_with_ranks_and_steps(counter) -> None:
    with run_command("-n", "2", counter, "1000000", "0.01", "2") as run:
        run.wait_for(lambda line: line.startswith("[0] pid"))
        job = {"step": -1}
        # Each worker's reports come by themselves: one may be late.
        while job["step"] < 3 or not all(worker["device"] for worker in job["workers"]):
            shown = subprocess.run(
                [*potluck_command(), "status", "--json"], capture_output=True, timeout=200
            )
            (job,) = json.loads(shown.stdout)["jobs"]
        assert job["epoch"] == 1
        assert job["loss"] == 1.0
        assert [worker["rank"] for worker in job["workers"]] == [0, 1]
        assert {worker["phase"] for worker in job["workers"]} == {"member"}
        assert {worker["device"] for worker in job["workers"]} == {"cpu"}
        run.signal(signal.SIGINT)
        assert run.finish() == 130


def test_a_worker_killed_from_outside_is_noticed_as_fast_as_by_order(counter) -> None:
    with run_command("-n", "2", counter, "100", "0.02", "2") as run:
        pid = int(run.wait_for(lambda line: line.startswith("[1] pid")).split()[-1])
        run.wait_for(lambda line: line.startswith("[0] pid"))
        os.kill(pid, signal.SIGKILL)
        run.wait_for("worker 1 killed by SIGKILL (9)")
        assert process_ends(pid)
        assert run.finish() == 0, run.text
