"""``%%potluck`` in real notebooks: a kernel by nbclient, on one machine and on a cluster of three,
and JupyterLab in a real browser. tests/process/test_notebook.py does the rest without Jupyter."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from support.commands import Command, comes_true
from support.components import ROOT, environment, program
from support.machines import cluster_of, form

SCRIPT = Path(__file__).with_name("scripts") / "notebook.py"
PACKAGES = ("jupyterlab==4.6.6", "nbclient==0.11.0", "ipykernel==7.4.0")
TOTAL = """%%potluck {options} --return total
import os
import numpy as np
import potluck
with potluck.init() as ctx:
    total = ctx.all_reduce(np.full(3, ctx.rank + 1.0))
    print("rank", ctx.rank, "of", ctx.world_size, os.environ.get("POTLUCK_NAME"))
"""
SLEEP = """%%potluck -n 2
import os, time
print("worker", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def jupyter() -> Path:
    """The Python of an environment with Jupyter."""
    return environment("notebooks", *PACKAGES)


def text_of(outputs: list[dict[str, Any]]) -> str:
    return "".join(each.get("text", "") for each in outputs)


def run_cells(
    command: list[str], cells: list[str], folder: Path, variables: dict[str, str]
) -> list[list[dict[str, Any]]]:
    done = subprocess.run(
        command,
        input=json.dumps(cells),
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    outputs: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return outputs


def cells_of(page: Path) -> list[str]:
    """The indented blocks of a page of the documentation."""
    blocks = re.findall(r"(?:^    .*\n)+", page.read_text(), re.M)
    return [textwrap.dedent(each) for each in blocks]


def test_a_kernel_runs_the_cells_of_the_page(jupyter: Path, tmp_path: Path) -> None:
    cells = cells_of(ROOT / "docs" / "notebooks.md")
    _, ran, used = run_cells([str(jupyter), str(SCRIPT)], cells, tmp_path, dict(os.environ))
    assert {"[0] rank 0 of 2", "[1] rank 1 of 2"} <= set(text_of(ran).splitlines())
    assert text_of(used) == "9.0\n"


def test_an_error_of_a_cell_is_one_line_and_an_error(jupyter: Path, tmp_path: Path) -> None:
    cells = ["%load_ext potluck", "%%potluck --return\npass", "%%potluck\n1 / 0", "print('on')"]
    _, wrong, failed, _ = run_cells([str(jupyter), str(SCRIPT)], cells, tmp_path, dict(os.environ))
    assert wrong[-1]["ename"] == "CellError"
    assert wrong[-1]["traceback"] == ["potluck: %%potluck --return: names of variables are missing"]
    assert failed[-1]["traceback"] == ["potluck: the cell's job ended with exit code 1"]
    assert "ZeroDivisionError" in text_of(failed)


def test_the_stop_button_ends_the_job_and_the_kernel_goes_on(jupyter: Path, tmp_path: Path) -> None:
    cells = ["%load_ext potluck", SLEEP, "print('the kernel goes on')"]
    command = [str(jupyter), str(SCRIPT), "--stop", "[1] worker"]
    _, stopped, after = run_cells(command, cells, tmp_path, dict(os.environ))
    assert stopped[-1]["ename"] == "KeyboardInterrupt"
    assert text_of(after) == "the kernel goes on\n"
    workers = re.findall(r"\] worker (\d+)", text_of(stopped))
    assert workers
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.needs_root_netns
def test_a_cell_runs_on_three_machines(jupyter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    with cluster_of(3, tmp_path / "homes") as members:
        form(*members)
        ada = members[0]
        cells = ["%load_ext potluck", TOTAL.format(options="--nodes 3"), "print(total.sum())"]
        command = ada.host.command([jupyter, SCRIPT])
        _, ran, used = run_cells(command, cells, folder, ada.variables)
    assert "rank 2 of 3" in text_of(ran)
    assert text_of(used) == "18.0\n"


# ---------------------------------------------------------------- JupyterLab in a browser

NOTEBOOK = [
    "%load_ext potluck",
    TOTAL.format(options="-n 2"),
    "print('sum', total.sum())",
    SLEEP,
]


@pytest.fixture(scope="module")
def browser() -> tuple[Path, str]:
    """The Python of an environment with Playwright, and Debian's Chromium."""
    chromium = program("chromium", "chromium")
    return environment("playwright", "playwright==1.65.2"), chromium


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def test_jupyterlab_in_a_browser_runs_a_cell_and_stops_one(
    jupyter: Path, browser: tuple[Path, str], tmp_path: Path
) -> None:
    """The pictures are kept in build/components/pictures, to be looked at."""
    python, chromium = browser
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    written = {
        "cells": [{**cell, "id": f"c{n}", "source": text} for n, text in enumerate(NOTEBOOK)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "cells.ipynb").write_text(json.dumps(written))
    pictures = ROOT / "build" / "components" / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    port = free_port()
    options = [
        *("--allow-root", "--no-browser", "--ip=127.0.0.1", f"--port={port}"),
        *("--ServerApp.port_retries=0", "--IdentityProvider.token=secret"),
    ]
    server = [str(jupyter), "-m", "jupyterlab", *options]
    with Command(server, cwd=tmp_path, env={"JUPYTER_CONFIG_DIR": str(tmp_path / "c")}) as lab:
        assert comes_true(lambda: f"127.0.0.1:{port}/lab" in lab.text, 60), lab.text
        script = SCRIPT.with_name("jupyterlab_page.py")
        address = f"http://127.0.0.1:{port}/lab/tree/cells.ipynb?token=secret"
        done = subprocess.run(
            [str(python), str(script), chromium, address, str(pictures)],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr + done.stdout + lab.text
        lab.process.terminate()
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "[1] rank 1 of 2" in seen["ran"]
    assert "sum 9.0" in seen["used"]
    assert "KeyboardInterrupt" in seen["stopped"]
    assert len(seen["workers"]) == 2
    assert not [pid for pid in seen["workers"] if Path(f"/proc/{pid}").exists()]
