"""Files that a module's docstring names, ``like_this.py`` or ``like_this/``, are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "potluck"
SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_names_files_that_exist(path: Path) -> None:
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    for name in re.findall(r"``([\w/]+(?:\.py|/))``", told):
        places = (path.parent, PACKAGE, ROOT)
        assert any((place / name).exists() for place in places), f"{name} is not there"
