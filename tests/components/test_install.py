"""The commands of docs/install.md by which potluck is installed or tried, with the wheels of `make
wheels`, where neither a compiler nor this checkout is to be seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.components import ROOT, environment
from support.wheels import wheels_of

WAIT_S = 900


def commands_of(section: str) -> list[str]:
    """The lines of the shell in a section of docs/install.md, without their remarks."""
    page = (ROOT / "docs" / "install.md").read_text()
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with dist/, and variables with which only an empty environment of Python, pipx and
    uv are found."""
    folder = tmp_path_factory.mktemp("clean")
    (folder / "dist").mkdir()
    for wheel in wheels_of("x86_64"):
        (folder / "dist" / wheel.name).hardlink_to(wheel)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=WAIT_S)
    tools = environment("installers", "pipx==1.18.4").parent
    for name in ("pipx", "uv", "uvx"):
        found = tools / name if name == "pipx" else Path(sys.executable).with_name(name)
        (folder / "venv/bin" / name).symlink_to(found)
    kept = ("PIP_CERT", "PIP_INDEX_URL", "SSL_CERT_FILE", "UV_INDEX_URL", "HTTPS_PROXY")
    variables = {name: os.environ[name] for name in kept if name in os.environ}
    variables |= {
        "PATH": f"{folder}/venv/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "CC": "/nonexistent",
        "CXX": "/nonexistent",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_SYSTEM_CERTS": "1",
    }
    return folder, variables


LINES = commands_of("Install")


def test_the_page_has_each_way() -> None:
    assert [line.split()[0] for line in LINES] == ["make", "pip", "uvx", "pipx"]


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("line", LINES[1:], ids=lambda line: line.split()[0])
def test_a_command_of_the_page_gives_a_potluck_with_its_native_core(
    line: str, clean: tuple[Path, dict[str, str]]
) -> None:
    folder, variables = clean
    if line.startswith("pip "):
        line += " && potluck doctor"
    done = subprocess.run(
        ["sh", "-ec", line],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^engine +native", done.stdout, re.MULTILINE), done.stdout + done.stderr
