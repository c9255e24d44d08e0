"""`potluck run --data` on one machine: the page docs/data.md, and what is refused."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import potluck_command
from support.examples import EXAMPLES
from support.pages import DOCS

pytestmark = pytest.mark.real_exec


def done(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=os.environ | {"POTLUCK_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    section = (DOCS / "data.md").read_text().partition("## Data that comes with a job")[2]
    section = section.partition("\n## ")[0]
    for name, text in re.findall(r"```python title=\"(\S+)\"\n(.*?)```", section, re.DOTALL):
        (tmp_path / name).write_text(text)
    commands = "".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL)).splitlines()
    assert len(commands) == 7
    own = {"potluck": potluck_command(), "python": [sys.executable]}
    said = []
    for command in commands:
        name, *words = shlex.split(command)
        found = done(tmp_path, *own.get(name, [name]), *words)
        assert found.returncode == 0, command + found.stdout + found.stderr
        said.append(found.stdout)
    assert said[2].count("mean 499.5") == 2
    assert "There are no data sets of jobs" in said[4]
    assert said[6].count("1000 samples, the first 0.0") == 2
    assert said[6].count("NUMPY") == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--data", "nowhere"], "nowhere does not exist; name a folder"),
        (["--data", "train.py"], "train.py is a file; name a folder"),
        (["--data", "../up=pets"], "'../up' is no name for data"),
        (["--data", "pets", "--data", "pets=home"], "pets is called pets, too"),
        (["--data", "cats=pets"], "this job has no data set 'pets' (it has cats)"),
        ([], "this job has no data set 'pets' (it has none)"),
    ],
)
def test_what_can_not_be_is_one_clear_error(tmp_path: Path, given: list[str], text: str) -> None:
    for name in ("pets", "home"):
        (tmp_path / name).mkdir()
    script = tmp_path / "train.py"
    script.write_text("from potluck.data import shared\nshared('pets')\n")
    found = done(tmp_path, *potluck_command(), "run", *given, "train.py")
    assert found.returncode != 0
    assert text in " ".join((found.stdout + found.stderr).split()), found.stdout + found.stderr


def test_the_example_trains_on_shards_that_it_wrote(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    example = str(EXAMPLES / "shared_data.py")
    written = done(tmp_path, sys.executable, example, "write", "digits")
    assert written.returncode == 0, written.stderr
    found = done(tmp_path, *potluck_command(), "run", "--data", "digits", "-n", "2", example)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("after 7000 samples") == 2, found.stdout
