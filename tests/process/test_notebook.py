"""A cell of a notebook as a job of real workers: values come back, the stop button ends it.

tests/components/test_notebooks.py does the same in a real kernel and in JupyterLab.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck import load_ipython_extension
from potluck.cli.notebook import CellError
from support.commands import comes_true


class Shell:
    """The part of IPython's shell that the magic uses."""

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}
        load_ipython_extension(self)

    def register_magic_function(self, function: Any, kind: str, name: str) -> None:
        assert (kind, name) == ("cell", "potluck")
        self.run = function

    def push(self, variables: dict[str, Any]) -> None:
        self.variables |= variables


TOTAL = """
import sys
import numpy as np
import potluck
import beside
with potluck.init() as ctx:
    total = ctx.all_reduce(np.full(3, ctx.rank + beside.ONE))
    print("rank", ctx.rank, sys.argv[1:])
results = {"total": total, "world": ctx.world_size}
"""


def test_a_cell_trains_and_its_values_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("ONE = 1.0\n")
    shell = Shell()
    shell.run("-n 2 --return results -- --epochs 3", TOTAL)
    results = shell.variables["results"]
    assert np.array_equal(results["total"], np.full(3, 3.0))
    assert results["world"] == 2
    assert "[1] rank 1 ['--epochs', '3']" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("cell_")] == []


def test_a_cell_that_fails_says_in_which_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CellError, match="the cell's job ended with exit code 1"):
        Shell().run("--return x", "x = 1\nraise ValueError('no')\n")
    assert ", line 2, in <module>" in capsys.readouterr().out


def test_a_cell_that_ends_early_returns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CellError, match=r"the values of x did not come.*before its last line"):
        Shell().run("--return x", "x = 1\nimport sys\nsys.exit()\n")


STOPPED = """
from test_notebook import Shell
try:
    Shell().run("-n 2", "import time; print('begun', flush=True); time.sleep(600)")
finally:
    print("the magic has ended", flush=True)
print("the next cell runs")
"""


@pytest.mark.real_exec
def test_the_stop_button_ends_the_workers_and_what_waits_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED]
    kernel = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=_with_this_folder(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with kernel:
        assert kernel.stdout is not None
        begun = [kernel.stdout.readline(), kernel.stdout.readline()]
        assert sorted(begun) == ["[0] begun\n", "[1] begun\n"]
        kernel.send_signal(signal.SIGINT)
        out, err = kernel.communicate(timeout=60)
    assert "the magic has ended" in out  # after the command, whose workers have ended by then
    assert "the next cell runs" not in out
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert list(tmp_path.iterdir()) == []


KILLED = """
from test_notebook import Shell
Shell().run("", "import time; print('begun', flush=True)\\nwhile True: print(1), time.sleep(0.1)")
"""


@pytest.mark.real_exec
def test_a_killed_kernel_leaves_no_script_behind(tmp_path: Path) -> None:
    """Nor one that another kernel needs, which runs a cell in the same folder."""
    kernels = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED],
            cwd=tmp_path,
            env=_with_this_folder() | {"TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for kernel in kernels:
        assert kernel.stdout is not None
        while "begun" not in (line := kernel.stdout.readline()):
            assert line, "the cell ended"
    for num_left in (1, 0):
        kernel = kernels.pop()
        kernel.kill()
        kernel.communicate()
        assert comes_true(lambda n=num_left: len(list(tmp_path.glob("cell_*.py"))) <= n)
        assert len(list(tmp_path.glob("cell_*.py"))) == num_left


def _with_this_folder() -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=str(Path(__file__).parent))
