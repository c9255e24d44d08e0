"""``potluck run`` with scripts that do not use potluck: processes, output, signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from support.commands import Command, potluck_command, process_ends, run_command

# What is about processes themselves: signals, sessions, descriptors, streams, the interpreter.
executed = pytest.mark.real_exec


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def pid_in(line: str) -> int:
    return int(re.search(r"pid (\d+)", line)[1])


SLEEPER = """
import os, sys, time
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


def test_every_line_has_its_worker_in_front(script) -> None:
    path = script("import os, sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    with run_command("--workers", "3", path) as run:
        assert run.finish() == 0
        expected = sorted(f"[{rank}] {word}" for rank in range(3) for word in ("out", "err"))
        assert sorted(run.lines) == expected


@executed
def test_lines_from_stderr_stay_on_stderr(script) -> None:
    path = script("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    done = subprocess.run(
        [*potluck_command(), "run", path], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] out\n", "[0] err\n")


def test_arguments_after_the_script_are_the_scripts(script) -> None:
    path = script("import sys\nprint(sys.argv[1:])\n")
    with run_command("--workers", "1", path, "--workers", "9", "--help", "--", "-x") as run:
        assert run.finish() == 0
        assert run.lines == ["[0] ['--workers', '9', '--help', '--', '-x']"]


MODULE = {
    "pkg/__init__.py": "",
    "pkg/net.py": "NAME = 'beside'",
    "pkg/__main__.py": "import pkg.train",
    "pkg/train.py": """
import os, sys
import potluck, common
from .net import NAME
if os.environ["RANK"] == "1" and os.environ["POTLUCK_RESTARTS"] == "0":
    os.kill(os.getpid(), 9)
ctx = potluck.init()
print(__name__, __package__, NAME, common.NAME, sys.argv, ctx.world_size)
ctx.close()
""",
    "common.py": "NAME = 'from the root'",
    "src/pkg2/job.py": "import sys, common; print(common.NAME, sys.argv)",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for path, text in MODULE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def in_folder(folder: Path, *arguments: str) -> Command:
    return Command([*potluck_command(), "run", *arguments], cwd=folder)


def test_a_module_runs_as_under_python_m(project: Path) -> None:
    summary = project / "summary.json"
    options = ("--workers", "2", "--json", str(summary))
    with in_folder(project, *options, "-m", "pkg.train", "-m", "--epochs=3") as run:
        assert run.finish() == 0, run.text
        script = project / "pkg" / "train.py"
        said = f"__main__ pkg beside from the root ['{script}', '-m', '--epochs=3'] 2"
        assert run.text.count(said) == 2, run.text
        assert "starting worker 1 again" in run.text
    assert json.loads(summary.read_text())["job"].startswith("train-")
    with in_folder(project, *options, "--module", "pkg") as run:  # its __main__.py
        assert run.finish() == 0, run.text
        said = f"pkg.train pkg beside from the root ['{project / 'pkg' / '__main__.py'}'] 2"
        assert run.text.count(said) == 2, run.text
    assert json.loads(summary.read_text())["job"].startswith("pkg-")
    (project / ".git").mkdir()
    with in_folder(project / "pkg", "-m", "pkg2.job") as run:  # found in src of the repository
        assert run.finish() == 0, run.text
        assert f"from the root ['{project / 'src' / 'pkg2' / 'job.py'}']" in run.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-m", "pkg.trian"), "no package of that name with a __main__.py, in {0}, {0}/src. Call"),
        (("-m", "pkg2"), "-m pkg2: there is no such module"),
        (("-m", "pkg/train.py"), "the name of a module is needed, such as pkg.train"),
        (("-m", ".train"), "the name of a module is needed"),
        (("-m", "common.py"), "a file runs without -m"),
        (("pkg.train",), "; a module runs with -m: potluck run -m pkg.train"),
        (
            ("pkg/",),
            "'pkg' is a directory (seen from {0}); a module runs with -m: potluck run -m pkg",
        ),
        (("pkg/train",), "'pkg/train' does not exist (seen from {0}); is it pkg/train.py?"),
        (("pkg.trian",), "the script 'pkg.trian' does not exist (seen from {0})"),
        (
            ("--root", "pkg", "-m", "pkg.train"),
            "no package of that name with a __main__.py, in {0}/pkg",
        ),
        (("--root", "none", "-m", "pkg.train"), "--root none: there is no such folder"),
    ],
)
def test_where_a_module_was_looked_for_is_said(
    project: Path, words: tuple[str, ...], said: str
) -> None:
    with in_folder(project, *words) as run:
        assert run.finish() == 2
        assert said.format(project) in run.text


def test_workers_get_what_launchers_agree_on(script) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR"
    path = script(f"import os\nprint([os.environ[name] for name in {names.split()!r}])\n")
    with run_command("--workers", "2", path) as run:
        assert run.finish() == 0
        assert sorted(run.lines) == [
            f"[{rank}] ['{rank}', '2', '{rank}', '2', '127.0.0.1']" for rank in (0, 1)
        ]


def test_threads_are_shared_out_unless_the_user_chose(script) -> None:
    path = script("import os\nprint(os.environ['OMP_NUM_THREADS'])\n")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    with run_command("--workers", "2", path, OMP_NUM_THREADS="") as run:
        assert run.finish() == 0
        assert sorted(run.lines) == [f"[0] {share}", f"[1] {share}"]
    with run_command("--workers", "1", path, OMP_NUM_THREADS="7") as run:
        assert run.finish() == 0
        assert run.lines == ["[0] 7"]


def test_the_first_failing_exit_code_is_returned_and_the_others_are_stopped(script) -> None:
    path = script(
        "import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else None\n"
        "time.sleep(600)\n"
    )
    with run_command("--workers", "3", path) as run:
        assert run.finish() == 7
        run.wait_for("worker 1 exited with code 7")


def test_who_exits_with_a_reason_is_named_and_not_those_that_miss_it(script) -> None:
    """Seen: the reason was nowhere. The others' PeerLost ended the job, and a signal the exit."""
    path = script(
        """
import atexit, sys, time
atexit.register(time.sleep, 1)  # what is registered first comes last: after potluck has ended
import numpy as np
import potluck
ctx = potluck.init()
ctx.all_reduce(np.ones(1))
if ctx.rank == 1:
    sys.exit("there is no data on this machine")
ctx.all_reduce(np.ones(1))
"""
    )
    with run_command("--workers", "3", path) as run:
        assert run.finish() == 1
        assert run.lines[-1].startswith("potluck: worker 1 exited with code 1")
        assert "there is no data on this machine" in run.lines[-1]


def test_a_missing_package_is_one_sentence_with_the_pip_command(script) -> None:
    path = script("import no_such_package_of_anyone\n")
    with run_command(path) as run:
        assert run.finish() == 1
        last = run.lines[-1]
        assert "needs the Python package 'no_such_package_of_anyone'" in last
        assert "-m pip install no_such_package_of_anyone" in last


@executed
def test_ctrl_c_reaches_the_workers_and_leaves_nothing(script, own_environment: Path) -> None:
    path = script(
        "import os, time\n"
        "try:\n    print('pid', os.getpid(), flush=True)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n    raise SystemExit(0)\n"
    )
    with run_command("--workers", "2", path) as run:
        pids = [pid_in(run.wait_for(lambda line, r=r: f"[{r}] pid" in line)) for r in (0, 1)]
        run.signal(signal.SIGINT)
        assert run.finish() == 130
        assert [line for line in run.lines if "interrupted" in line and "[" in line[:1]]
        assert all(process_ends(pid) for pid in pids)
    assert list((own_environment / "run").iterdir()) == []


DEEP = """
import time
def deeper(n):
    if n:
        deeper(n - 1)
    print("it is there", flush=True)
    time.sleep(600)
deeper(3)
"""


@executed
def test_ctrl_c_shows_one_line_for_each_worker(script) -> None:
    with run_command("--workers", "3", script(DEEP)) as run:
        for rank in range(3):
            run.wait_for(f"[{rank}] it is there")
        since = run.mark
        run.signal(signal.SIGINT)
        assert run.finish() == 130
    said = sorted(line for line in run.lines[since:] if line.startswith("["))
    assert said == [f"[{rank}] KeyboardInterrupt (script.py, line 8)" for rank in range(3)]


@executed
def test_another_error_after_ctrl_c_is_shown_whole(script) -> None:
    path = script(DEEP.replace("deeper(3)", "try: deeper(3)\nfinally: 1 / 0"))
    with run_command(path) as run:
        run.wait_for("it is there")
        run.signal(signal.SIGINT)
        assert run.finish() == 130
    assert "ZeroDivisionError: division by zero" in run.text
    assert "    finally: 1 / 0" in run.text


TRAINS = """
import sys
import numpy as np
import potluck
from potluck.checkpoint import CheckpointStore
from potluck.training import ElasticLoop, Schedule, StateReplica

state = {"steps": np.zeros(1)}

def restore(found):
    state["steps"] = found["steps"].copy()

ctx = potluck.init()
replica = StateReplica(lambda: state, restore)
store = CheckpointStore(sys.argv[1], asynchronous=sys.argv[2] == "asynchronous")
job = ElasticLoop(ctx, Schedule(800_000, 8, epochs=1), replica, checkpoint=store)
for share in job:
    if job.step_number in (0, 20):
        print("at step", job.step_number, "with", state["steps"][0], flush=True)
    with job.step():
        done = ctx.all_reduce(np.ones(1), op="mean")
        job.commit(loss=0.5)
        state["steps"] = state["steps"] + done
"""


@pytest.mark.parametrize(
    "how",
    [
        *("waits", "asynchronous"),
        pytest.param("waits", marks=[executed, pytest.mark.long], id="executed"),
    ],
)
def test_ctrl_c_leaves_a_checkpoint_of_the_last_step(script, tmp_path: Path, how: str) -> None:
    path = script(TRAINS.replace("(0, 20)", "range(20, 90)"))  # before the first one of save_every
    words = ["--workers", "2", path, str(tmp_path / "saved"), how]
    with run_command(*words) as run:
        run.wait_for("at step 20")
        run.signal(signal.SIGINT)
        assert run.finish() == 130, run.text
        kept = int(re.search(r"interrupted; the checkpoint of step (\d+) is kept", run.text)[1])
        assert kept >= 20
        said = [line for line in run.lines if line.startswith("[") and "at step" not in line]
        assert len(said) == 2, said
    with run_command(*words) as run:
        run.wait_for(f"resumed from the checkpoint of step {kept}")
        if kept < 89:
            run.wait_for(f"at step {max(kept, 20)} with {max(kept, 20)}.0")
        run.signal(signal.SIGINT)
        assert run.finish() == 130


ROUNDS = """
import sys, time
import torch
import potluck
from potluck.torch import DiLoCo, ElasticLoop, Gossip, LocalSGD

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
numbers = torch.arange(1600.0)[:, None]
job = ElasticLoop(
    *(model, optimizer, (numbers,)),
    batch_size=8, strategy=eval(sys.argv[1]), checkpoint=sys.argv[2],
)
steps = 0
for (x,) in job:
    with job.step():
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    steps += 1
    if sys.argv[3] == "slow":
        time.sleep(0.02 if steps < 20 else 0.2)
        if steps == 20:
            print("at step 20", flush=True)
print("ended with", job.committed, flush=True)
"""


@pytest.mark.parametrize(
    "strategy",
    [
        "LocalSGD(every=80)",
        "LocalSGD(every=7)",
        pytest.param("LocalSGD(every=7)", marks=[executed, pytest.mark.long], id="executed"),
        "Gossip()",
        "DiLoCo(every=12, fragments=2, delay=2)",
    ],
)
def test_ctrl_c_ends_a_round_early_and_leaves_a_checkpoint(
    script, tmp_path: Path, strategy: str
) -> None:
    words = ["--workers", "2", script(ROUNDS), strategy, str(tmp_path / "saved")]
    with run_command(*words, "slow") as run:
        run.wait_for("[0] at step 20")
        run.signal(signal.SIGINT)
        assert run.finish() == 130, run.text
        kept = int(re.search(r"interrupted; the checkpoint of step (\d+) is kept", run.text)[1])
        assert kept >= 20
        said = [line for line in run.lines if "KeyboardInterrupt" in line]
        assert len(said) == 2, run.text
    with run_command(*words, "fast") as run:
        assert run.finish() == 0
        run.wait_for(f"resumed from the checkpoint of step {kept}")
        run.wait_for("[1] ended with 1600")


@executed
def test_a_second_ctrl_c_kills_workers_that_ignore_the_first(script) -> None:
    path = script(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('not now', flush=True))\n"
        "print('pid', os.getpid(), flush=True)\n"
        "while True:\n    time.sleep(600)\n"
    )
    with run_command(path) as run:
        pid = pid_in(run.wait_for("pid"))
        run.signal(signal.SIGINT)
        run.wait_for("not now")
        run.signal(signal.SIGINT)
        assert run.finish() == 130
        assert process_ends(pid)


@executed
def test_a_terminated_run_stops_its_workers(script) -> None:
    with run_command("--workers", "2", script(SLEEPER)) as run:
        pids = [pid_in(run.wait_for(lambda line, r=r: f"[{r}] pid" in line)) for r in (0, 1)]
        run.signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM
        assert all(process_ends(pid) for pid in pids)


@executed
def test_workers_die_with_an_agent_that_is_killed(script) -> None:
    with run_command("--workers", "2", script(SLEEPER)) as run:
        pids = [pid_in(run.wait_for(lambda line, r=r: f"[{r}] pid" in line)) for r in (0, 1)]
        run.signal(signal.SIGKILL)
        assert all(process_ends(pid) for pid in pids)


@executed
@pytest.mark.parametrize("workers", [1, 2])
def test_what_workers_started_ends_with_an_agent_that_is_killed(script, workers: int) -> None:
    path = script(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('pid', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with run_command("--workers", str(workers), path) as run:
        mine = [
            pid_in(run.wait_for("pid" if workers == 1 else f"[{r}] pid")) for r in range(workers)
        ]
        run.signal(signal.SIGKILL)
        assert all(process_ends(pid) for pid in mine)


@executed
def test_what_a_worker_started_ends_with_it(script) -> None:
    path = script(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('pid', child.pid, flush=True)\n"
    )
    with run_command(path) as run:
        pid = pid_in(run.wait_for("pid"))
        assert run.finish() == 0
        assert process_ends(pid)


def test_a_killed_worker_is_started_again(script, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = script(
        "import os, signal, pathlib\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "if os.environ['RANK'] == '1' and not mark.exists():\n"
        "    mark.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('whole')\n"
    )
    with run_command("--workers", "2", path) as run:
        assert run.finish() == 0
        run.wait_for("worker 1 killed by SIGKILL (9)")
        run.wait_for("starting worker 1 again (restart 1 of 3)")
        assert sorted(line for line in run.lines if "whole" in line) == ["[0] whole", "[1] whole"]


def test_a_worker_that_is_always_killed_fails_the_run_in_the_end(script) -> None:
    path = script("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with run_command("--max-restarts", "1", path) as run:
        assert run.finish() == 128 + signal.SIGKILL
        run.wait_for("not started again after 1 restarts")


def test_long_and_unfinished_lines_arrive_whole_or_cut_but_bounded(script) -> None:
    path = script("import sys\nsys.stdout.write('x' * 200_000 + '\\nlast')\n")
    with run_command(path) as run:
        assert run.finish() == 0
        assert "".join(line.removeprefix("[0] ") for line in run.lines) == "x" * 200_000 + "last"
        assert max(map(len, run.lines)) < 70_000


def test_status_shows_a_running_job_and_then_nothing(script) -> None:
    def status() -> dict:
        done = subprocess.run(
            [*potluck_command(), "status", "--json"], capture_output=True, text=True, timeout=200
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    path = script(SLEEPER)
    assert status() == {"version": 1, "cluster": None, "jobs": []}
    with run_command("--workers", "2", path) as run:
        pids = [pid_in(run.wait_for(lambda line, r=r: f"[{r}] pid" in line)) for r in (0, 1)]
        (job,) = status()["jobs"]
        assert job["script"] == path
        assert job["pid"] == run.process.pid
        assert [worker["pid"] for worker in job["workers"]] == pids
        assert {worker["phase"] for worker in job["workers"]} == {"starting"}
        table = subprocess.run(
            [*potluck_command(), "status"], capture_output=True, text=True, timeout=200
        )
        assert "script.py" in table.stdout
        run.signal(signal.SIGTERM)
        run.finish()
    assert status() == {"version": 1, "cluster": None, "jobs": []}


@executed
def test_a_run_listens_on_the_loopback_only_and_keeps_no_state(
    script, own_environment: Path
) -> None:
    """Without ``potluck up`` the command is its own agent: nothing of that is left or reachable."""
    with run_command("--workers", "2", script(SLEEPER)) as run:
        for rank in (0, 1):
            run.wait_for(lambda line, r=rank: f"[{r}] pid" in line)
        sockets = psutil.Process(run.process.pid).net_connections()
        assert {each.laddr.ip for each in sockets if each.status == "LISTEN"} == {"127.0.0.1"}
        assert not [each for each in sockets if each.type == socket.SOCK_DGRAM]
        run.signal(signal.SIGTERM)
        run.finish()
    left = {path.name for path in own_environment.rglob("*")}
    assert left <= {
        *("run", "workers", "cluster_secret", "node_keypair", "admissions"),
        *("code_store", "jobs"),  # empty folders
    }


def test_two_runs_at_once_are_both_shown(script) -> None:
    path = script(SLEEPER)
    with run_command(path) as first, run_command(path) as second:
        first.wait_for("pid")
        second.wait_for("pid")
        with Command([*potluck_command(), "status", "--json"]) as status:
            assert status.finish() == 0
            jobs = json.loads(status.text)["jobs"]
        assert {job["pid"] for job in jobs} == {first.process.pid, second.process.pid}
        for run in (first, second):
            run.signal(signal.SIGTERM)
            run.finish()


def test_the_file_of_a_killed_agent_is_removed_by_status(script, own_environment: Path) -> None:
    with run_command(script(SLEEPER)) as run:
        run.wait_for("pid")
        (file,) = (own_environment / "run").glob("*.json")
        assert file.stat().st_mode & 0o777 == 0o600
        run.signal(signal.SIGKILL)
        run.finish()
    assert file.exists()
    with Command([*potluck_command(), "status"]) as status:
        assert status.finish() == 0
        assert status.lines == [
            "No job runs here. Start one with: potluck run --workers 4 train.py"
        ]
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "the script 'nowhere.py' does not exist"),
        (["."], "is a directory"),
        (["--workers", "0", __file__], "--workers 0: a number from 1 to 256 is needed"),
        (["--max-restarts", "-1", __file__], "--max-restarts -1"),
        (["--chaos", "explode", __file__], "'explode' can't be understood; write for example"),
        (["--chaos", "kill rank 1 at step 3", __file__], "the highest rank is 0, with --workers 1"),
        (["/dev/null"], "the script '/dev/null' is no file"),
        (["--json", ".", __file__], "--json .: that is a directory"),
        (["--nodes", "3", __file__], "--nodes 3: this machine is in no cluster"),
        (["--min-nodes", "2", __file__], "--min-nodes 2: this machine is in no cluster"),
        (["--min-nodes", "3", "--nodes", "2", __file__], "--min-nodes 3 is more than --nodes 2"),
        (["--min-workers", "0", __file__], "--min-workers 0: 1 or more is needed"),
        (["--min-workers", "3", "-n", "2", __file__], "--min-workers 3 is more than the 2 of"),
        (["--wait", "-1", __file__], "--wait -1: seconds, 0 or more, are needed"),
        (["--wait", "nan", __file__], "--wait nan: seconds, 0 or more, are needed"),
        (["--json", "/no/such/place.json", __file__], "there is no directory /no/such"),
        (["--peer-timeout", "-3", __file__], "peer_timeout_s"),
        (["--on", ", ", __file__], "--on , : name machines"),
        (["--collect", __file__, __file__], "test_run.py is no folder; give another one"),
        (["--collect", "/dev/null/x", __file__], "/dev/null is no folder"),
    ],
)
def test_bad_options_are_one_clear_sentence(arguments: list[str], words: str) -> None:
    with run_command(*arguments) as run:
        assert run.finish() == 2
        (line,) = run.lines
        assert line.startswith("potluck: ")
        assert words in line


def test_a_job_that_is_to_wait_for_others_does_not_begin_without_a_cluster() -> None:
    with run_command(__file__, POTLUCK_MIN_PEERS="2") as run:
        assert run.finish() == 2
        (line,) = run.lines
        assert line.startswith("potluck: POTLUCK_MIN_PEERS=2: this machine is in no cluster")


def test_a_fault_that_never_happens_fails_the_run(script, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    order = "kill rank 0 at step 9"
    with run_command("--chaos", order, "--json", str(summary), script("print(1)\n")) as run:
        assert run.finish() == 1
        run.wait_for(f"the fault '{order}' never happened")
    told = json.loads(summary.read_text())
    assert told["exit_code"] == 1
    assert told["problems"] == [f"the fault '{order}' never happened"]
    assert told["version"] == 1


@executed
def test_version_and_help_teach() -> None:
    with Command([*potluck_command(), "--version"]) as shown:
        assert shown.finish() == 0
        assert re.fullmatch(r"potluck \d+\.\d+\.\d+\S*", shown.text)
    with Command([*potluck_command(), "run", "--help"], env={"COLUMNS": "100"}) as shown:
        assert shown.finish() == 0
        assert "potluck run --workers 4 train.py" in shown.text
        assert "kill rank 2 at step 60" in shown.text


@executed
def test_no_worker_holds_a_descriptor_of_the_agent(script) -> None:
    path = script(
        "import os\n"
        "typed = os.environ['POTLUCK_TYPED'].partition(':')[0]  # the worker's own pipe\n"
        "print('open:', sorted({*os.listdir('/proc/self/fd')} - {typed}))\n"
    )
    with run_command("--workers", "2", path) as run:
        assert run.finish() == 0, run.text
        found = [line for line in run.lines if "open:" in line]
        assert len(found) == 2
        for line in found:
            numbers = [int(number) for number in re.findall(r"'(\d+)'", line)]
            assert {0, 1, 2} <= set(numbers) <= {0, 1, 2, 3}, "3 is the directory being listed"
    assert os.path.exists(path)


@executed
def test_when_nobody_reads_the_output_any_more_the_run_ends(script) -> None:
    path = script("while True:\n    print('line')\n")
    with subprocess.Popen(
        [*potluck_command(), "run", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"[0] line\n"
        run.stdout.close()
        assert run.wait(200) == 128 + signal.SIGPIPE


@executed
def test_what_a_terminal_cannot_show_is_written_in_escapes(script) -> None:
    """It would else end the thread that writes, and the run would hang."""
    path = script("print('loss \\u2193', flush=True)\nprint('on we go')\n")
    done = subprocess.run(
        [*potluck_command(), "run", path],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, "the script itself could not print it"
    assert "'ascii' codec can't encode" in done.stderr
    path = script("import sys\nsys.stdout.buffer.write(b'loss \\xe2\\x86\\x93\\non we go\\n')\n")
    done = subprocess.run(
        [*potluck_command(), "run", path],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (0, "[0] loss \\u2193\n[0] on we go\n")


@executed
def test_a_run_works_with_its_streams_closed(script, tmp_path: Path) -> None:
    """As some service managers start it. Python's sys.stdout is None then."""
    path = script(
        f"import pathlib\nprint('line')\npathlib.Path({str(tmp_path)!r}, 'ran').touch()\n"
    )
    command = shlex.join([*potluck_command(), "run", path])
    for closed in (">&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, timeout=200
        )
        assert (done.returncode, done.stderr) == (0, "")
        (tmp_path / "ran").unlink()


@executed
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_an_output_on_a_full_disk_is_said_in_one_sentence(script) -> None:
    path = script("print('line', flush=True)\nimport time\ntime.sleep(600)\n")
    told = []
    for arguments in (["run", path], ["status"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*potluck_command(), *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=200,
            )
        told.append((done.returncode, done.stderr.splitlines()[0]))
        assert "Traceback" not in done.stderr
    what = "No space left on device"
    assert told == [
        (128 + signal.SIGPIPE, f"potluck: the output can't be written any more ({what})"),
        (1, f"potluck: {what}; make room or write elsewhere"),
    ]


@executed
def test_more_workers_than_open_files_allow_is_said_with_what_to_do(script) -> None:
    path = script("print('hi')\n")
    command = shlex.join([*potluck_command(), "run", "-n", "30", path])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 64; {command}"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 127
    assert "Too many open files; start fewer workers here, or allow more" in done.stdout
    assert "Traceback" not in done.stderr


def test_all_output_of_a_talkative_worker_arrives(script) -> None:
    path = script("for number in range(50_000):\n    print(number)\n")
    done = subprocess.run(
        [*potluck_command(), "run", path], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.split("\n") == [*(f"[0] {number}" for number in range(50_000)), ""]


def test_files_in_the_output_directory_are_brought_by_fetch(script, tmp_path: Path) -> None:
    """Without ``potluck up``: the same variable, and the same commands, as on many machines."""
    path = script(
        "import os, pathlib\n"
        "name = os.environ['RANK'] + '.pt'\n"
        "pathlib.Path(os.environ['POTLUCK_OUTPUT'], name).write_text(name)\n"
    )
    with run_command("--workers", "2", path) as run:
        assert run.finish() == 0
    job = run.text.rsplit("potluck fetch ", 1)[1].split()[0]
    assert "2 files were written on " in run.text

    def potluck(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*potluck_command(), *arguments],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=tmp_path,
        )

    assert job in potluck("fetch").stdout
    done = potluck("fetch", job)
    assert done.returncode == 0, done.stderr
    assert {each.name for each in (tmp_path / job).iterdir()} == {"0.pt", "1.pt"}
    with run_command("--workers", "2", "--collect", str(tmp_path / "out"), path) as run:
        assert run.finish() == 0
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"0.pt", "1.pt"}
    assert potluck("fetch", "--remove", job).returncode == 0
    for arguments, words in (
        (("fetch", job), "no machine that is there has files of a job"),
        (("fetch", "--remove"), "name a JOB"),
        (("fetch", "--to", str(Path.home()), job), "so give a folder of their own"),
    ):
        refused = potluck(*arguments)
        assert refused.returncode == 2
        assert words in refused.stderr
