"""The process group between real processes: how it is found, torch's own tests, killed ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.ports import reserved_ports

ROOT = Path(__file__).parents[2]
REPRESENTATIVE = [
    *("test_all_reduce_sum", "test_all_gather_coalesced_with_empty", "test_reduce_max"),
    *("test_gather", "test_scatter", "test_sparse_all_reduce_sum", "test_isend"),
    *("test_send_recv_any_source", "test_monitored_barrier_gloo_subgroup"),
    *("test_DistributedDataParallelCPU",),
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
]


def environment(home: Path, **variables: str) -> dict[str, str]:
    return os.environ | {"POTLUCK_HOME": str(home), "OMP_NUM_THREADS": "1"} | variables


def test_torchs_own_tests_of_a_backend_pass(tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes.json"
    run = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(ROOT / "tests" / "torch_suite" / "suite.py")),
            *("potluck", str(outcomes), *REPRESENTATIVE),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(tmp_path),
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(outcomes.read_text())
    failed = {name: each["reason"] for name, each in found.items() if each["outcome"] == "fail"}
    assert failed == {}
    passed = [name for name, each in found.items() if each["outcome"] == "pass"]
    assert len(passed) == len(REPRESENTATIVE), found


@pytest.mark.parametrize("limit_s", [20, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_killed_in_ddp_or_fsdp2_is_named_by_every_survivor_in_time(
    tmp_path: Path, limit_s: int
) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "torch_kills.py")),
            *("--tries", "2", "--limit", str(limit_s), "--seed", "1"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(tmp_path),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all survivors named the lost rank" in run.stdout


ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("potluck", init_method="potluck://")
mine = torch.ones(2)
dist.all_reduce(mine)
dist.barrier()
store = dist.distributed_c10d._get_default_store()
store.set("key", "value")
print(dist.get_backend(), dist.get_world_size(), mine.tolist(), store.get("key"), store.add("n", 2))
dist.destroy_process_group()
"""


def test_torch_finds_the_backend_by_itself_and_a_world_needs_no_store_server(
    tmp_path: Path,
) -> None:
    variables = ("RANK", "WORLD_SIZE", "POTLUCK_AGENT")
    env = {k: v for k, v in environment(tmp_path).items() if k not in variables}
    run = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=200, env=env
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "potluck 1 [1.0, 1.0] b'value' 2"


BOUND = """
import torch, torch.distributed as dist
assert "POTLUCK" not in dist.Backend._plugins
import potluck.torch
device = torch.device("cuda", 0)  # which this machine only seems to have
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
torch.accelerator.device_count = lambda: 1
dist.init_process_group("potluck", init_method="potluck://", device_id=device)
part = dist.split_group(split_ranks=[[0]])
mine = torch.ones(2)
dist.all_reduce(mine, group=part)
print(dist.group.WORLD.bound_device_id, type(part).__name__, mine.tolist())
dist.destroy_process_group()
"""


def test_a_device_may_be_named_at_the_start_and_then_torch_splits_groups(tmp_path: Path) -> None:
    """In a torch that loads no extensions by itself: there potluck.torch is imported."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BOUND],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "cuda:0 PotluckProcessGroup [1.0, 1.0]"


PAIR = """
import os, torch, torch.distributed as dist
dist.init_process_group("potluck", init_method="potluck://")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
store.set(f"from {rank}", str(rank))
other = store.get(f"from {1 - rank}")
both = dist.new_group(backend="gloo")
mine = torch.ones(1)
dist.all_reduce(mine, group=both)
os.write(1, f"rank {rank} {other} {mine.item()}{os.linesep}".encode())  # whole, whoever else writes
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["potluck", "torchrun"])
def test_one_script_runs_under_potluck_run_and_torchrun(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(PAIR if launcher == "potluck" else PAIR.replace("potluck://", "env://"))
    program = str(Path(sys.executable).with_name(launcher))
    options = (
        ["run", "--workers", "2"]
        if launcher == "potluck"
        else ["--standalone", "--nproc-per-node=2"]
    )
    command = [program, *options, str(script)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment(tmp_path)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rank 0 b'1' 2.0" in run.stdout
    assert "rank 1 b'0' 2.0" in run.stdout


EVERY_WAY = """
import sys, torch, torch.distributed as dist
rank, file, port, own = int(sys.argv[1]), *sys.argv[2:]
here = {"rank": rank, "world_size": 2}
ways = {
    f"file://{file}": here,
    f"tcp://127.0.0.1:{port}": here,
    f"potluck://127.0.0.1:{own}": here,
    "potluck://": {"world_size": 2},  # no rank: they find each other
}
for url, options in ways.items():
    dist.init_process_group("potluck", init_method=url, **options)
    mine = torch.tensor([dist.get_rank() + 1.0])
    part = dist.new_group([0, 1])
    dist.all_reduce(mine, group=part)
    assert mine.item() == 3 and dist.get_world_size() == 2
    print(url.partition(":")[0], dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
"""


def test_ranks_meet_by_file_by_tcp_by_an_address_and_by_discovery(tmp_path: Path) -> None:
    with reserved_ports(3) as numbers:
        *ports, discovery = map(str, numbers)
        found = environment(
            tmp_path,
            POTLUCK_DISCOVERY="static",
            POTLUCK_PEERS="127.0.0.1",
            POTLUCK_GRADIENT_PORT=discovery,
        )
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", EVERY_WAY, str(rank), str(tmp_path / "file"), *ports],
                stdout=subprocess.PIPE,
                text=True,
                env=found,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=200)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for rank, lines in enumerate(said):
        assert lines[:3] == [f"file {rank}", f"tcp {rank}", f"potluck {rank}"]
    assert {lines[3] for lines in said} == {"potluck 0", "potluck 1"}


DISAGREE = """
import sys, datetime, torch.distributed as dist
rank, world_size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(path, 2)
try:
    dist.init_process_group("potluck", store=store, rank=rank, world_size=world_size,
                            timeout=datetime.timedelta(seconds=20))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_ranks_that_disagree_about_the_world_size_are_told_at_once(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DISAGREE, str(rank), str(size), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(tmp_path),
        )
        for rank, size in ((0, 2), (1, 3))
    ]
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    for text in said:
        assert "ConfigurationError" in text
        assert "give all ranks the same world_size" in text


HOOKED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("potluck", init_method="potluck://")
models = []
for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model._register_builtin_comm_hook(hook)
    model(torch.tensor([[1.0 + dist.get_rank(), 1 / 3]])).sum().backward()
    models.append(model)
exact, halved = (model.module.weight.grad for model in models)
assert exact[0, 0] == halved[0, 0] == 1.5
assert exact[0, 1] == torch.tensor(1 / 3)
assert halved[0, 1] == torch.tensor(1 / 3).half().float(), halved
dist.destroy_process_group()
"""


def test_ddps_builtin_hooks_average_gradients(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HOOKED)
    run = subprocess.run(
        [str(Path(sys.executable).with_name("potluck")), "run", "--workers", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(tmp_path),
    )
    assert run.returncode == 0, run.stdout + run.stderr


KILLED = """
import os, signal, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("potluck", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
mine = torch.ones(4)
try:
    dist.all_reduce(mine)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(mine)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("has_shared_memory", ["1", "0"])
def test_an_error_about_a_killed_rank_has_the_words_that_programs_search_for(
    tmp_path: Path, has_shared_memory: str
) -> None:
    survivor, killed = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(tmp_path, POTLUCK_USE_SHARED_MEMORY=has_shared_memory),
        )
        for rank in range(2)
    ]
    said = survivor.communicate(timeout=200)[0]
    assert killed.communicate(timeout=200)[0] == ""
    assert killed.returncode == -signal.SIGKILL
    assert re.search(r"lost rank 1 .*: Connection closed by peer: ", said), said
