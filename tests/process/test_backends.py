"""Gloo and MPI behind the same context as our own links, in real processes; and their failures."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.commands import Command, potluck_command
from support.ports import reserved_ports

SCRIPTS = Path(__file__).parent / "scripts" / "backends"
SOON_S = 20.0
"""What the shortest deadlines may become on a machine that also does other work."""
SUITE = Path(__file__).parents[1] / "conformance" / "test_communicators.py"
SAME = str(SCRIPTS / "same_everywhere.py")
FAILURES = str(SCRIPTS / "failures.py")
GLOO_FAILURES = [sys.executable, FAILURES, "gloo"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
RUN_SUITE = [sys.executable, str(SCRIPTS / "suite.py"), str(SUITE)]

needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None,
    reason="needs the program 'mpirun' (Debian, Ubuntu: apt-get install openmpi-bin)",
)


@contextlib.contextmanager
def ranks(count: int, arguments: Sequence[str], **variables: str) -> Iterator[list[Command]]:
    """The same command as every rank of a world, started by hand."""
    with contextlib.ExitStack() as stack:
        [port] = stack.enter_context(reserved_ports(1))
        yield [
            stack.enter_context(
                Command(
                    [*arguments],
                    env={
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(count),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        "OMP_NUM_THREADS": "1",
                        **variables,
                    },
                )
            )
            for rank in range(count)
        ]


# -- every promise of a communicator, on the other libraries' links


def test_gloo_keeps_every_promise_of_a_communicator(tmp_path: Path) -> None:
    suite = [*RUN_SUITE, str(tmp_path)]
    with ranks(3, suite, POTLUCK_CONFORMANCE="gloo", POTLUCK_TEST_SEED="1") as runs:
        for run in runs:
            assert run.finish(280) == 0, run.text
            assert run.wait_for(" passed")


@needs_mpi
@pytest.mark.parametrize(
    "without",
    [
        # A backend gets arrays of NumPy; that importing torch takes longer than all other tests.
        pytest.param("torch_tensors", id="arrays"),
        pytest.param("", id="all", marks=pytest.mark.long),
    ],
)
def test_mpi_keeps_every_promise_of_a_communicator(without: str, tmp_path: Path) -> None:
    variables = {"POTLUCK_CONFORMANCE": "mpi", "POTLUCK_TEST_SEED": "1", "OMP_NUM_THREADS": "1"}
    suite = [*RUN_SUITE, str(tmp_path), *(["-k", f"not {without}"] if without else [])]
    with Command([*MPIRUN, "-n", "4", *suite], env=variables) as run:
        assert run.finish(280) == 0, run.text
        assert len(re.findall(r"\d passed", run.text)) == 4, run.text


# -- one script, four ways to start it


@pytest.mark.real_exec
@pytest.mark.parametrize(
    ("start", "told"),
    [
        ([sys.executable], "world 1 sum 1 local ranks [0]"),
        ([*potluck_command(), "run", "-n", "2"], "world 2 sum 3 local ranks [0, 1]"),
        ([*TORCHRUN, "--standalone", "--nproc-per-node", "2"], "world 2 sum 3 local ranks [0, 1]"),
        pytest.param(
            [*MPIRUN, "-n", "4"], "world 4 sum 10 local ranks [0, 1, 2, 3]", marks=needs_mpi
        ),
    ],
    ids=["python", "potluck-run", "torchrun", "mpirun"],
)
def test_the_same_script_runs_under_every_launcher(start: list[str], told: str) -> None:
    program = [sys.executable] if start[0] == "mpirun" else []
    with Command([*start, *program, SAME], env={"OMP_NUM_THREADS": "1"}) as run:
        assert run.finish() == 0, run.text
        run.wait_for(told)


SITES = """
import os, potluck
number = os.environ["RANK"]
os.environ["POTLUCK_SITE"] = f"home/rack{number}"
if START == "discovery":
    from potluck import AutoDiscoveryBackend, DistributedContext
    from potluck._core.cluster.discovery.configured import StaticPeers
    ports = [int(port) for port in os.environ["PORTS"].split(",")]
    finders = [StaticPeers([("127.0.0.1", port) for port in ports])]
    backend = AutoDiscoveryBackend(2, finders=finders, port=ports[int(number)])
    ctx = DistributedContext(backend, timeout_s=60)
else:
    ctx = potluck.init()
print(sorted(member.site for member in ctx.members), flush=True)
ctx.barrier()
ctx.close()
"""


@pytest.mark.parametrize("start", ["variables", "discovery"])
def test_ranks_learn_the_sites_of_each_other_however_they_meet(start: str) -> None:
    script = [sys.executable, "-c", SITES.replace("START", repr(start))]
    with (
        reserved_ports(2) as ports,
        ranks(2, script, PORTS=",".join(map(str, ports)), POTLUCK_PSK="ab" * 32) as runs,
    ):
        for run in runs:
            assert run.finish() == 0, run.text
            run.wait_for("['home/rack0', 'home/rack1']")


PODS = {
    "stateful-set": {"HOSTNAME": "ml-workers-{}", "RANK": "ml-workers-{}"},
    "indexed-job": {"HOSTNAME": "train-{}", "JOB_COMPLETION_INDEX": "{}"},
    "pod-index": {"HOSTNAME": "ml-workers-{}", "POD_INDEX": "{}"},
}
"""What tells pods apart: the kubelet's HOSTNAME, and what controller or specification add."""

PROCESS_GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("potluck", init_method="potluck://")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"world {dist.get_world_size()} sum {total.item():g}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        *(("context", kind) for kind in PODS),
        ("process-group", "indexed-job"),
        pytest.param("process-group", "stateful-set", marks=pytest.mark.long),
        pytest.param("process-group", "pod-index", marks=pytest.mark.long),
    ],
)
def test_pods_of_kubernetes_take_their_numbers_as_ranks(script: str, kind: str) -> None:
    arguments = [SAME] if script == "context" else ["-c", PROCESS_GROUP]
    cluster = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with contextlib.ExitStack() as stack:
        [port] = stack.enter_context(reserved_ports(1))
        runs = []
        for number in range(3):
            named = {name: value.format(number) for name, value in PODS[kind].items()}
            meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            variables = cluster | meeting | named | {"OMP_NUM_THREADS": "1"}
            runs.append(stack.enter_context(Command([sys.executable, *arguments], env=variables)))
        for run in runs:
            assert run.finish() == 0, run.text
        runs[0].wait_for("world 3 sum 6")


def test_a_pod_that_lacks_half_of_the_description_does_not_train_alone() -> None:
    variables = {"WORLD_SIZE": "3", "POD_INDEX": "", "MASTER_ADDR": "ml-workers-0.ml-workers"}
    with Command([sys.executable, SAME], env=variables) as run:
        assert run.finish() == 1
        assert "ConfigurationError: RANK is not set" in run.text


@pytest.mark.parametrize(
    "start",
    [
        [*potluck_command(), "run", "-n", "2"],
        [*TORCHRUN, "--standalone", "--nproc-per-node", "2"],
    ],
    ids=["potluck-run", "torchrun"],
)
def test_gloo_runs_under_launchers_with_one_word_changed(start: list[str]) -> None:
    with Command([*start, SAME, "gloo"], env={"OMP_NUM_THREADS": "1"}) as run:
        assert run.finish() == 0, run.text
        run.wait_for("world 2 sum 3 local ranks [0, 1]")


# -- what goes wrong


def stories(lines: Sequence[str]) -> dict[tuple[str, int], dict[str, Any]]:
    decoder = json.JSONDecoder()
    starts = [(line, at.start()) for line in lines for at in re.finditer('{"story"', line)]
    told = [decoder.raw_decode(line, start)[0] for line, start in starts]
    return {(each["story"], each["rank"]): each for each in told}


def test_failures_in_gloo_are_our_errors_on_every_rank_and_in_time() -> None:
    names = ["worlds", "absent", "unheard", "broken", "killed"]
    with (
        reserved_ports(len(names)) as ports,
        ranks(3, [*GLOO_FAILURES, ",".join(names), ",".join(map(str, ports))]) as runs,
    ):
        codes = [run.finish() for run in runs]
        told = stories([line for run in runs for line in run.lines])
    assert codes == [0, 0, -9], [run.text for run in runs]
    for rank in range(3):
        assert told["worlds", rank]["error"] == "ConfigurationError"
        assert "give all ranks the same world_size" in told["worlds", rank]["text"]
    for rank in (0, 2):
        absent = told["absent", rank]
        assert absent["error"] == absent["again"]
        assert absent["error"] in ("OperationTimeout", "PeerLost"), absent
        assert absent["cause"] == "RuntimeError"
        assert absent["seconds"] < SOON_S
    assert "OperationTimeout" in {told["absent", rank]["error"] for rank in (0, 2)}
    assert told["unheard", 0]["error"] == "OperationTimeout"
    assert "recv(float64, shape (3,), from rank 1, tag 3)" in told["unheard", 0]["text"]
    assert told["broken", 1]["error"] == "ZeroDivisionError"
    for rank in (0, 2):
        assert told["broken", rank]["error"] == "RemoteError"
        assert "rank 1" in told["broken", rank]["text"]
        assert "a bad batch" in told["broken", rank]["text"]
        assert told["broken", rank]["seconds"] < SOON_S
    for rank in (0, 1):
        killed = told["killed", rank]
        assert (killed["error"], killed["again"]) == ("PeerLost", "PeerLost"), killed
        assert killed["lost"] == 2
        assert killed["seconds"] < SOON_S


def test_the_host_of_the_store_may_die_too() -> None:
    with (
        reserved_ports(1) as [port],
        ranks(2, [*GLOO_FAILURES, "host_killed", str(port)]) as runs,
    ):
        codes = [run.finish() for run in runs]
        told = stories([line for run in runs for line in run.lines])
    assert codes == [-9, 0], runs[1].text
    assert told["host_killed", 1]["error"] == "PeerLost"
    assert told["host_killed", 1]["lost"] == 0


@needs_mpi
def test_a_deadline_in_mpi_is_our_error_and_ends_the_job() -> None:
    with Command([*MPIRUN, "-n", "3", sys.executable, FAILURES, "mpi", "absent"]) as run:
        code = run.finish()
        told = stories(run.lines)
    for rank in (0, 2):
        assert told["absent", rank]["error"] == "OperationTimeout"
        assert told["absent", rank]["again"] == "OperationTimeout"
        assert told["absent", rank]["seconds"] < SOON_S
    assert code != 0, "a job with operations that never ended must not look like a success"


@needs_mpi
@pytest.mark.parametrize("story", ["broken", "uncaught"])
def test_a_rank_that_raises_is_told_to_all_ranks_of_mpi_and_ends_the_job(story: str) -> None:
    with Command([*MPIRUN, "-n", "3", sys.executable, FAILURES, "mpi", story]) as run:
        code = run.finish()
        told = stories(run.lines)
    for rank in (0, 2):
        assert told[story, rank]["error"] == "RemoteError", run.text
        assert told[story, rank]["lost"] == 1
        assert told[story, rank]["seconds"] < SOON_S
    if story == "broken":
        assert told[story, 1]["error"] == "ZeroDivisionError"
        assert "a bad batch" in told[story, 0]["text"]
    else:
        assert "AssertionError: nobody caught this" in told[story, 0]["text"]
    assert code == 1, run.text
