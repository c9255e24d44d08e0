"""Ranks that wait say for whom: those of torch's process group, and those of `potluck run`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.commands import Command, run_command
from support.ports import reserved_ports

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "meet.py"
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")


@pytest.fixture
def port() -> Iterator[int]:
    """Where rank 0 will listen; no other program does."""
    with reserved_ports(1) as [number]:
        yield number


def rank(number: int, world_size: int, port: int, home: Path, script: Path = SCRIPT) -> Command:
    return Command(
        [sys.executable, "-W", "ignore", str(script), "potluck"],
        env={
            "POTLUCK_HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(number),
            "WORLD_SIZE": str(world_size),
        },
    )


@needs_torch
def test_with_env_rank_0_names_who_is_missing_though_torchs_store_waits(
    tmp_path: Path, port: int
) -> None:
    with rank(0, 3, port, tmp_path) as zero, rank(2, 3, port, tmp_path) as two:
        zero.wait_for(f"potluck: rank 0 waits at 127.0.0.1:{port} for rank 1 (of 3 ranks) to call")
        two.wait_for("potluck: rank 2 waits for rank 1 (of 3 ranks) to join the process group")
        with rank(1, 3, port, tmp_path) as one:
            for number, each in enumerate((zero, one, two)):
                assert each.finish() == 0, each.text
                assert f"rank {number}: 3" in each.text


@needs_torch
def test_with_env_and_no_rank_0_the_others_say_where_they_look(tmp_path: Path, port: int) -> None:
    with rank(1, 2, port, tmp_path) as one:
        one.wait_for(f"potluck: rank 1 can't reach rank 0 at 127.0.0.1:{port}; is rank 0 started")
        with rank(0, 2, port, tmp_path) as zero:
            assert zero.finish() == one.finish() == 0, zero.text + one.text


@needs_torch
def test_under_torchrun_the_missing_rank_is_named_with_its_node(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    with Command(
        [*torchrun, "--nproc-per-node", "2", str(SCRIPT), "potluck", str(gate)],
        env={"POTLUCK_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    ) as run:
        run.wait_for("potluck: rank 0 waits for rank 1 on torchrun's node 0 (of 2 ranks) to join")
        gate.touch()
        assert run.finish() == 0, run.text
        assert "rank 1: 2" in run.text


def test_potluck_run_names_the_worker_that_the_first_group_waits_for(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with run_command("--workers", "2", str(SCRIPTS / "late_init.py"), str(gate)) as run:
        line = run.wait_for("ready: 1 of 2 workers; still waiting for worker 1 (its process ")
        assert "runs and has not called potluck.init() yet)" in line
        gate.touch()
        assert run.finish() == 0, run.text
        assert "rank 1 of 2" in run.text


IN_A_STORE = """
import sys, threading
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("potluck", init_method="potluck://", timeout=timedelta(seconds=100))
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 2:
    while not Path(sys.argv[1]).exists():
        threading.Event().wait(0.05)
    store.set("weights", "here")
print(dist.get_rank(), store.get("weights"), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@needs_torch
def test_a_key_that_no_rank_sets_is_named_with_all_who_wait_for_it(tmp_path: Path) -> None:
    script, gate = tmp_path / "in_a_store.py", tmp_path / "gate"
    script.write_text(IN_A_STORE)
    with run_command("--workers", "3", str(script), str(gate)) as run:
        run.wait_for("no rank has set the key 'weights' in the store, which rank 0, 1 asked for")
        gate.touch()
        assert run.finish() == 0, run.text
        assert "2 b'here'" in run.text


IN_GLOO = """
import numpy as np
import potluck
with potluck.init(backend="gloo", timeout_s=90) as ctx:
    print(f"rank {ctx.rank}:", ctx.all_reduce(np.ones(1))[0])
"""


@needs_torch
def test_gloo_worlds_name_the_missing_too(tmp_path: Path, port: int) -> None:
    script = tmp_path / "in_gloo.py"
    script.write_text(IN_GLOO)
    with rank(2, 3, port, tmp_path, script) as two:
        two.wait_for(f"potluck: rank 2 can't reach rank 0 at 127.0.0.1:{port}; is it started?")
        with rank(0, 3, port, tmp_path, script) as zero:
            zero.wait_for("potluck: rank 0 waits for rank 1 (of 3 ranks) to join")
            with rank(1, 3, port, tmp_path, script) as one:
                for each in (zero, one, two):
                    assert each.finish() == 0, each.text


ON_A_RING = """
import sys
import numpy as np
import potluck
peers = sys.argv[2:]
with potluck.init("ring", peers=peers, rank=int(sys.argv[1]), timeout_s=90) as ctx:
    print(f"rank {ctx.rank}:", ctx.all_reduce(np.ones(1))[0], flush=True)
"""


def test_ranks_of_a_fixed_list_name_those_that_have_not_come(tmp_path: Path) -> None:
    script = tmp_path / "on_a_ring.py"
    script.write_text(ON_A_RING)
    peers: list[str] = []

    def start(number: int) -> Command:
        return Command(
            [sys.executable, str(script), str(number), *peers], env={"POTLUCK_HOME": str(tmp_path)}
        )

    with reserved_ports(3) as ports:
        peers += [f"127.0.0.1:{port}" for port in ports]
        with start(0) as zero, start(2) as two:
            for each, number in ((zero, 0), (two, 2)):
                each.wait_for(
                    f"potluck: rank {number} waits for rank 1 at {peers[1]} (of 3 ranks); are"
                )
            with start(1) as one:
                for each in (zero, one, two):
                    assert each.finish() == 0, each.text
                    assert ": 3.0" in each.text
