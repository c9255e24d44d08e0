"""Every line of docs/coming-from.md is run: its code in worlds of two, its commands as such."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.commands import Command, potluck_command

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
SCRIPT = Path(__file__).parent / "scripts" / "coming_from.py"
SECTIONS = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
COMMANDS = sorted(set(re.findall(r"`\$ ([^`]+)`", PAGE.read_text())))
POTLUCK_RUN = [*potluck_command(), "run", "--workers", "2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]

TRAIN = """
import numpy as np, potluck
with potluck.init() as ctx:
    total = ctx.all_reduce(np.ones(1))[0]
    print(f"of {ctx.world_size}: {total:g}", flush=True)
"""


def free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(sock.getsockname()[1]) for sock in socks]


def need_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs the program 'mpirun' (Debian, Ubuntu: apt-get install openmpi-bin)")


def test_the_page_has_a_section_for_each_library() -> None:
    libraries = ["torch.distributed", "Horovod", "MPI", "pmetal", "ml_core", "axonml", "dmlf"]
    assert libraries == SECTIONS


@pytest.mark.parametrize("section", SECTIONS)
def test_the_right_column_of_a_section_runs(section: str, tmp_path: Path) -> None:
    *ports, discovery = free_ports(3)
    arguments = [str(PAGE), section, *ports]
    environment = {
        **{"OMP_NUM_THREADS": "1", "POTLUCK_HOME": str(tmp_path), "POTLUCK_DISCOVERY": "static"},
        **{"POTLUCK_PEERS": "127.0.0.1", "POTLUCK_GRADIENT_PORT": discovery},
    }
    start = POTLUCK_RUN
    if section == "MPI":
        need_mpirun()
        start = [*MPIRUN, "-n", "2", sys.executable]
    if section in ("torch.distributed", "MPI"):
        arguments.append("--beside")
    with Command([*start, str(SCRIPT), *arguments], env=environment) as run:
        assert run.finish(110) == 0, run.text
        ends = re.findall(rf"rank (\d): {section} is through, (\d+) compared", run.text)
    assert sorted(rank for rank, _ in ends) == ["0", "1"], run.text
    if "--beside" in arguments:
        assert min(int(compared) for _, compared in ends) >= 12, run.text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    program, *words = command.split()
    told = "of 2: 2"
    folder = tmp_path
    if program == "potluck":
        words = [*potluck_command(), *words]
    elif program == "mpirun":
        need_mpirun()
        words = [*MPIRUN, *words]
    elif program == "python":
        words = [sys.executable, *words]
    else:
        assert program == "make"
        words = ["make", "--dry-run", *words]
        told, folder = "", ROOT
    words = [sys.executable if word == "python" else word for word in words]
    if "bench" in command and program == "potluck":
        words, told = [*words, "--sizes", "4KiB", "--rounds", "1", "--against", "none"], "4 KiB"
    if "examples/" in command:
        words, told, folder = [*words, "--require-accuracy", "0"], "accuracy", ROOT
    with Command(words, cwd=folder, env={"OMP_NUM_THREADS": "1"}) as run:
        assert run.finish(110) == 0, run.text
        assert told in run.text


def test_options_that_the_page_names_exist() -> None:
    for option in re.findall(r"`(--[a-z-]+)", PAGE.read_text()):
        assert option in (ROOT / "examples" / "digits.py").read_text()
