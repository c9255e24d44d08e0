"""Scripts that bring their environment: ``potluck run`` and the page docs/environments.md, with an
index of the test's own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import Command, potluck_command
from support.package_index import BACKEND, Index, package_index, tiny_source, tiny_wheel
from support.pages import DOCS

pytestmark = pytest.mark.real_exec

SHOW = """
import sys
import numpy as np
import foo, potluck
with potluck.init() as ctx:
    total = ctx.all_reduce(np.ones(2))
    print("foo", foo.VERSION, "in", sys.prefix, "of", total[0], potluck.__file__)
"""


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with package_index() as index:
        index.add(tiny_wheel("foo"))
        yield index


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all tests: each wheel is fetched once."""
    return tmp_path_factory.mktemp("home")


def run(
    script: Path, home: Path, index: Index, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    given = {"POTLUCK_HOME": str(home), "POTLUCK_PACKAGE_INDEX": index.url} | variables
    return subprocess.run(
        [*potluck_command(), "run", "--plain", *options, str(script)],
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_script_runs_with_the_packages_that_it_asks_for(
    tmp_path: Path, home: Path, index: Index
) -> None:
    (tmp_path / "requirements.txt").write_text("foo==1.0\n")
    script = tmp_path / "train.py"
    script.write_text(SHOW)
    first = run(script, home, index, "-n", "2", PYTHONPATH="/nowhere", CONDA_PREFIX="/conda")
    assert first.returncode == 0, first.stdout + first.stderr
    places = re.findall(r"foo 1\.0 in (\S+) of 2\.0 (\S+)", first.stdout)
    assert len(places) == 2
    for prefix, package in places:
        assert prefix.startswith(str(home / "environments"))
        assert package.startswith(prefix)
    assert re.search(r"environment: Python 3\.\d+, \d+ packages from requirements", first.stdout)
    assert re.search(r"environment: ready after \d.* MB from 127\.0\.0\.1\)", first.stdout)
    sent = dict(index.sent)
    again = run(script, home, index)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "ready after" not in again.stdout
    assert dict(index.sent) == sent  # each wheel left the index once


def test_what_can_not_be_had_ends_the_run_in_one_line(
    tmp_path: Path, home: Path, index: Index
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"# /// script\n# dependencies = ['foo==9']\n# ///\n{SHOW}")
    done = run(script, home, index)
    assert done.returncode == 2
    assert "the block in train.py: No solution found" in done.stderr
    assert "foo==9" in done.stderr
    script.write_text(f"# /// script\n# dependencies = []\n# ///\n{SHOW}")
    done = run(script, home, index)
    assert "'foo', which is not in its environment: add it to the file" in done.stderr
    done = run(script, home, index, "--installed")
    assert done.returncode == 1
    assert "the script needs the Python package 'foo'" in done.stderr


def test_an_owner_who_wants_no_environments_is_named(
    tmp_path: Path, home: Path, index: Index
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"# /// script\n# dependencies = ['foo']\n# ///\n{SHOW}")
    done = run(script, home, index, POTLUCK_ENVIRONMENTS="off")
    assert done.returncode == 2
    assert "makes no environments for scripts" in done.stderr
    assert "potluck run --installed" in done.stderr


def test_a_package_is_built_where_the_job_and_the_owner_allow_it(
    tmp_path: Path, home: Path, index: Index
) -> None:
    index.add(tiny_source("sourced"), tiny_wheel("tinybackend", module=BACKEND))
    script = tmp_path / "train.py"
    script.write_text(
        f"# /// script\n# dependencies = ['foo', 'sourced']\n# ///\nimport sourced\n{SHOW}"
    )
    done = run(script, home, index, POTLUCK_ENVIRONMENTS="builds")
    assert done.returncode == 2
    assert "sourced 1.0 has no wheel" in done.stderr
    assert "--allow-builds builds it from source" in done.stderr
    done = run(script, home, index, "--allow-builds")
    assert done.returncode == 2
    assert "builds nothing from source, and there is no wheel of sourced 1.0" in done.stderr
    if shutil.which("bwrap") is not None:
        done = run(script, home, index, "--allow-builds", POTLUCK_ENVIRONMENTS="builds")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "foo 1.0 in" in done.stdout


def test_the_page_of_environments_runs(tmp_path: Path, home: Path, index: Index) -> None:
    """Its commands in their order, in a folder with its files."""
    page = (DOCS / "environments.md").read_text()
    for name, text in re.findall(r"```\w+ title=\"(\S+)\"\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text)
    commands = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert len(commands) >= 3
    given = {"POTLUCK_HOME": str(home), "POTLUCK_PACKAGE_INDEX": index.url}
    index.add(tiny_wheel("tqdm", "4.67.0", module="def tqdm(values):\n    return values\n"))
    for command in "".join(commands).splitlines():
        assert command.startswith("potluck ")
        words = [*potluck_command(), *command.split()[1:]]
        with Command(words, cwd=tmp_path, env=given) as typed:
            assert typed.finish() == 0, typed.text
