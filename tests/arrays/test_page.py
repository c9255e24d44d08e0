"""The scripts on the page of JAX and MLX run as they stand there."""

from __future__ import annotations

from typing import Any

import pytest

from support.pages import snippets

pytest.importorskip("jax", reason="pip install 'potluck[jax]'")
pytest.importorskip("mlx.core", reason="pip install 'potluck[mlx]'")


def test_the_scripts_on_the_page_of_jax_and_mlx(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for script in snippets("arrays.md"):
        exec(compile(script, "arrays.md", "exec"), names)
    names["ctx"].close()
    first, *trained = capsys.readouterr().out.splitlines()
    assert first == "[0. 1. 2.] (1, 2) mlx.core.bfloat16"
    assert trained == ["[ 1.  -2.   0.5  3. ]", "[[ 1.  -2.   0.5  3. ]]"]
