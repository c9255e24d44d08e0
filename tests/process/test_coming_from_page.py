"""Every line of docs/coming-from.md is run: its code in worlds of two, its commands as such."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from support.commands import Command, potluck_command
from support.ports import reserved_ports

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
SCRIPT = Path(__file__).parent / "scripts" / "coming_from.py"
SECTIONS = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
COMMANDS = sorted(set(re.findall(r"`\$ ([^`]+)`", PAGE.read_text())))
LEAST_CHECKED = {"Horovod": 12, "pmetal": 10, "ml_core": 35, "axonml": 10, "dmlf": 1}
POTLUCK_RUN = [*potluck_command(), "run", "--workers", "2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]

TRAIN = """
import numpy as np, potluck
with potluck.init() as ctx:
    total = ctx.all_reduce(np.ones(1))[0]
    print(f"of {ctx.world_size}: {total:g}", flush=True)
"""


def need_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs the program 'mpirun' (Debian, Ubuntu: apt-get install openmpi-bin)")


def test_the_page_has_a_section_for_each_library() -> None:
    libraries = ["torch.distributed", "Horovod", "MPI", "pmetal", "ml_core", "axonml", "dmlf"]
    assert libraries == SECTIONS


@pytest.mark.parametrize("section", SECTIONS)
def test_the_right_column_of_a_section_runs(section: str, tmp_path: Path) -> None:
    start = POTLUCK_RUN
    if section == "MPI":
        need_mpirun()
        start = [*MPIRUN, "-n", "2", sys.executable]
    beside = ["--beside"] if section in ("torch.distributed", "MPI") else []
    with reserved_ports(3) as numbers:
        *ports, discovery = map(str, numbers)
        environment = {
            **{"OMP_NUM_THREADS": "1", "POTLUCK_HOME": str(tmp_path)},
            **{"POTLUCK_DISCOVERY": "static", "POTLUCK_PEERS": "127.0.0.1"},
            "POTLUCK_GRADIENT_PORT": discovery,
        }
        arguments = [str(PAGE), section, *ports, *beside]
        with Command([*start, str(SCRIPT), *arguments], env=environment) as run:
            assert run.finish() == 0, run.text
            ends = re.findall(
                rf"rank (\d): {section} is through, (\d+) compared, (\d+) ch", run.text
            )
    assert sorted(rank for rank, _, _ in ends) == ["0", "1"], run.text
    if beside:
        assert min(int(compared) for _, compared, _ in ends) >= 12, run.text
    else:
        assert min(int(checked) for _, _, checked in ends) >= LEAST_CHECKED[section], run.text


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
        words += ["--rounds", "1", "--round-seconds", "0.01"]
        told = "64 KiB"
    if "examples/" in command:
        told, folder = "accuracy", ROOT
    with Command(words, cwd=folder, env={"OMP_NUM_THREADS": "1"}) as run:
        assert run.finish() == 0, run.text
        assert told in run.text


def test_options_that_the_page_names_exist() -> None:
    for option in re.findall(r"`(--[a-z-]+)", PAGE.read_text()):
        assert option in (ROOT / "examples" / "digits.py").read_text()
