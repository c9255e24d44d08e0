"""A parameter server in worker processes of ``potluck run``: the example."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")
pytest.importorskip("torch")

from support.commands import run_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"


@pytest.mark.parametrize("options", [(), ("--synchronous",)], ids=["asynchronous", "synchronous"])
def test_the_example_classifies_digits_on_two_workers(options: tuple[str, ...]) -> None:
    with run_command("--workers", "2", str(EXAMPLE), *options) as run:
        assert run.finish() == 0
        assert any(line.startswith("[0] test accuracy") for line in run.lines)
