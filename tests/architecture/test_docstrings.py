"""Files that a module's docstring or a page about the code names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "potluck"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAGES = ("ARCHITECTURE.md", "docs/algorithms.md", "docs/membership.md", "docs/security.md")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_names_files_that_exist(path: Path) -> None:
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    for name in re.findall(r"``([\w/]+(?:\.py|/))``", told):
        places = (path.parent, PACKAGE, ROOT)
        assert any((place / name).exists() for place in places), f"{name} is not there"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_about_the_code_names_files_that_exist(page: str) -> None:
    """A name may leave out the folders that stand before it in the text."""
    folders = ("src", "native", "tests")
    files = [path for each in folders for path in (ROOT / each).rglob("*") if path.is_file()]
    known = {"/".join(path.parts[start:]) for path in files for start in range(len(path.parts))}
    told = re.findall(r"`([\w/]+\.(?:py|cpp|hpp))`", (ROOT / page).read_text())
    assert told
    assert sorted(set(told) - known) == []
