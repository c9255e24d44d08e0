"""From nothing to two machines: a newcomer types the commands of docs/walk.md at two clean ones,
hosts with environments of their own that see nothing of this checkout. They train a script with
three packages that neither of them has, on 500 MB of data that one of them has."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from support.commands import Command
from support.components import ROOT
from support.hosts import Network, missing
from support.pages import snippets
from support.walking import BLOCKS, Person, paired
from support.wheels import wheels_of

PORT = 3141
INSTALL = "pip install --find-links dist potluck"
ROWS = 31_250_000


def installed(folder: Path) -> tuple[Path, float]:
    """An environment in which the walk's first command was typed: its programs, and the seconds
    that took."""
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True, timeout=600)
    (folder / "dist").mkdir()
    for wheel in wheels_of("x86_64"):
        (folder / "dist" / wheel.name).hardlink_to(wheel)
    began = time.monotonic()
    programs = folder / "env/bin"
    subprocess.run([programs / "python", "-m", *shlex.split(INSTALL)], cwd=folder, check=True)
    return programs, time.monotonic() - began


def make_samples(folder: Path) -> None:
    """500 MB: three features a row, and what the weights 1, -2, 0.5 make of them."""
    folder.mkdir()
    samples = np.lib.format.open_memmap(
        folder / "samples.npy", mode="w+", dtype=np.float32, shape=(ROWS, 4)
    )
    random = np.random.default_rng(0)
    for part in np.array_split(samples, 50):
        part[:, :3] = random.standard_normal((len(part), 3), np.float32)
        part[:, 3] = part[:, :3] @ np.array([1.0, -2.0, 0.5], np.float32)
    samples.flush()


def test_a_newcomer_trains_on_two_clean_machines(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    for name in ("desk", "laptop"):
        assert any(block.startswith(f"{name}$ {INSTALL}\n") for block in BLOCKS)
        (tmp_path / name).mkdir()
    desk_has, seconds = installed(tmp_path / "desk")
    laptop_has, more = installed(tmp_path / "laptop")
    [script] = [each for each in snippets("walk.md") if "# /// script" in each]
    fetched = tmp_path / "fetched"
    wanted = re.search(r"^# dependencies = (\[.*\])$", script, re.MULTILINE)
    assert wanted
    packages = json.loads(wanted[1])
    assert len(packages) == 3
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", fetched]
    subprocess.run([*pip, *packages], check=True, timeout=600)

    with ExitStack() as stack:
        left, right, internet = stack.enter_context(Network(3))
        url = f"http://{internet.address}:{PORT}/simple"
        served = [internet.address, str(PORT), *map(str, fetched.glob("*.whl"))]
        words = [sys.executable, "-m", "support.package_index", *served]
        tests = {"PYTHONPATH": str(ROOT / "tests")}
        index = stack.enter_context(Command(internet.command(words), env=tests, orders=True))
        index.wait_for("index: ")
        given = {"POTLUCK_PACKAGE_INDEX": url, "PYTHONPATH": ""}
        desk = Person(left, "desk", tmp_path, stack, desk_has, **given)
        laptop = Person(right, "laptop", tmp_path, stack, laptop_has, **given)

        make_samples(desk.folder.parent / "samples")
        (desk.folder / "packages.py").write_text(script)

        began = time.monotonic()
        agent = desk.types("potluck up")
        agent.read_until(lambda _: "founds a cluster" in agent.text)
        paired(desk, laptop)
        second = laptop.types("potluck up")
        second.read_until(lambda _: "laptop (" in second.text and "joins" in second.text)
        both = desk.types("potluck run --data ../samples packages.py")
        both.read_until(lambda _: "starting 2 workers" in both.text)  # all was fetched
        assert both.finish() == 0, both.text

        assert "starting 2 workers on desk, laptop" in both.text
        for rank, name in enumerate(("desk", "laptop")):
            line = rf"\[ *{rank} {name}\] rank {rank} of 2: 31,250,000  1  -2  0\.5"
            assert re.search(line, both.text), both.text
        assert both.text.count("data samples: here after") == 1, both.text
        assert str(ROOT) not in both.text
        trained = time.monotonic() - began
    commands = 2 + len(desk.typed) + len(laptop.typed)
    assert commands <= 8
    print(
        f"newcomer: {commands} commands, {trained:.0f} s from the first agent to the end, and "
        f"{seconds + more:.0f} s to install potluck twice\n{both.text}"
    )
