"""The plug-ins for front ends: they open the group that is wanted, or none, and ask for what is
missing."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from potluck.torch import plugins as plugin


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The groups that would have been opened."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        plugin.dist, "init_process_group", lambda name, timeout: calls.append((name, timeout))
    )
    return calls


def test_without_a_launcher_no_group_is_opened(opened: list[tuple[str, Any]]) -> None:
    assert not plugin.start("potluck", None)
    assert opened == []


def test_under_a_launcher_the_named_group_is_opened(
    opened: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert plugin.start("potluck", timedelta(seconds=7))
    assert opened == [("potluck", timedelta(seconds=7))]


def test_a_group_that_is_there_is_taken(
    opened: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin.dist, "is_initialized", lambda: True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert plugin.start("gloo", None)
    assert opened == []


BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("accelerate", "transformers", "torchft"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import potluck
for use in ("from potluck.torch.plugins.accelerate import process_group; process_group()",
            "import potluck.torch.plugins.transformers",
            "from potluck.torch import ProcessGroupPotluck"):
    try:
        exec(use)
    except potluck.errors.MissingDependency as error:
        print(error)
"""


def test_a_missing_front_end_is_one_sentence_with_the_pip_command() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=200, check=True
    )
    assert run.stdout.splitlines() == [
        f"this needs the Python package {package!r}, which is not installed: "
        f"pip install 'potluck[{extra}]'"
        for package, extra in (
            *(("accelerate", "ecosystem"), ("transformers", "ecosystem")),
            ("torchft", "torchft"),
        )
    ]


def test_a_name_that_potluck_torch_lacks_is_an_attribute_error() -> None:
    import potluck.torch

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = potluck.torch.nonsense
