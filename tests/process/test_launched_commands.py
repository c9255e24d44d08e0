"""Several `potluck run` of one world, as another launcher starts them: they train together."""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.commands import Command, potluck_command
from support.ports import reserved_ports

SCRIPT = """
import os, signal
import numpy as np
import potluck

with potluck.init() as ctx:
    total = ctx.all_reduce(np.full(1, ctx.rank + 1.0))[0]
    print(f"rank {ctx.rank} of {ctx.world_size}, here {ctx.local_rank}: {total:g}", flush=True)
    if os.environ.get("DIES") == str(ctx.rank):
        os.kill(os.getpid(), signal.SIGKILL)
    if "DIES" in os.environ:
        ctx.barrier(timeout=60)
"""

GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1,), dist.get_rank() + 1.0)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g}", flush=True)
dist.destroy_process_group()
"""

SOON_S = 60.0


@contextmanager
def commands(
    folder: Path, script: str, firsts: dict[int, int], size: int, **more: str
) -> Iterator[list[Command]]:
    """A command for each first rank in ``firsts``, with so many workers, each with a home of its
    own, as on machines of their own."""
    path, psk = folder / "train.py", secrets.token_hex(32)
    path.write_text(script)
    with reserved_ports(1) as (port,), ExitStack() as stack:
        made = []
        for first, num in firsts.items():
            environment = {
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "POTLUCK_PSK": psk},
                **{"RANK": str(first), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"},
                "POTLUCK_HOME": str(folder / f"home-{first}"),
            }
            words = [*potluck_command(), "run", "--workers", str(num), str(path)]
            made.append(stack.enter_context(Command(words, env=environment | more)))
        yield made


def test_two_commands_of_two_and_three_workers_are_one_world(tmp_path: Path) -> None:
    with commands(tmp_path, SCRIPT, {0: 2, 2: 3}, 5) as made:
        for run in made:
            assert run.finish() == 0, run.text
        told = "\n".join(run.text for run in made)
    found = sorted(re.findall(r"rank (\d) of 5, here (\d): 15$", told, re.MULTILINE))
    assert found == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1"), ("4", "2")]
    assert "potluck: ranks 2 to 4 of 5, by the variables of your environment" in made[1].text


def test_a_script_for_gloo_has_one_world_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with commands(tmp_path, GLOO, {0: 2, 2: 2}, 4) as made:
        for run in made:
            assert run.finish() == 0, run.text
        told = "\n".join(run.text for run in made)
    assert sorted(re.findall(r"rank (\d) of 4: 10$", told, re.MULTILINE)) == ["0", "1", "2", "3"]


def test_a_killed_worker_ends_both_commands(tmp_path: Path) -> None:
    """None of its own can take its place: no worker is started again, and nobody waits long."""
    began = time.monotonic()
    with commands(tmp_path, SCRIPT, {0: 1, 1: 2}, 3, DIES="2") as made:
        for run in made:
            assert run.finish() != 0, run.text
    assert time.monotonic() - began < SOON_S
    assert "PeerLost" in made[0].text


def test_ranks_that_overlap_are_an_error(tmp_path: Path) -> None:
    """Rank 1 is started twice, rank 3 never."""
    with commands(tmp_path, SCRIPT, {0: 2, 1: 2}, 4, POTLUCK_PEER_TIMEOUT_S="15") as made:
        codes = [run.finish() for run in made]
        told = "\n".join(run.text for run in made)
    assert 0 not in codes, told
    assert "another process has already connected as rank 1" in told


def test_commands_under_mpirun_are_one_world(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs the program 'mpirun' (Debian, Ubuntu: apt-get install openmpi-bin)")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    words = [*start, *potluck_command(), "run", "--workers", "2", str(script)]
    environment = {"POTLUCK_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    with Command(words, env=environment) as run:
        assert run.finish() == 0, run.text
    found = sorted(re.findall(r"rank (\d) of 4, here (\d): 10", run.text))
    assert found == [("0", "0"), ("1", "1"), ("2", "2"), ("3", "3")]


@pytest.mark.parametrize(
    ("words", "variables", "error"),
    [
        (["run", "-n", "4", "train.py"], {"RANK": "1", "WORLD_SIZE": "2"}, "do not fit together"),
        (["run", "-n", "4", "train.py"], {"WORLD_SIZE": "8"}, "RANK is not set"),
        (
            ["run", "-n", "2", "--chaos", "kill rank 1 at step 1", "train.py"],
            {"RANK": "0", "WORLD_SIZE": "4"},
            "--chaos: this is one of several commands of a world of 4 workers",
        ),
        (
            ["plan", "train.py"],
            {"RANK": "0", "WORLD_SIZE": "2"},
            "`potluck plan` starts all workers",
        ),
        (
            ["federated", "run", "train.py", "--clients", "train.py"],
            {"RANK": "0", "WORLD_SIZE": "2"},
            "`potluck federated run` starts all workers itself",
        ),
    ],
)
def test_what_would_train_apart_is_an_error(
    words: list[str], variables: dict[str, str], error: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {"POTLUCK_HOME": str(tmp_path / "home")} | variables
    with Command([*potluck_command(), *words], cwd=tmp_path, env=environment) as run:
        assert run.finish() == 2, run.text
    assert error in run.text
