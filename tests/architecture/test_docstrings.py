"""Files that a module's docstring or a page about the code names are there."""

from __future__ import annotations

import ast
import re

import pytest

from support.sources import PACKAGE, ROOT, named, parsed
from support.ways import WAYS

POTLUCK = ROOT / "src" / "potluck"
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/algorithms.md")
PAGES += ("docs/membership.md", "docs/security.md")
PAGES += tuple(named(page) for page in sorted(WAYS.glob("*.md")))


def test_a_module_names_files_that_exist() -> None:
    missing = [
        f"{named(path)}: {name}"
        for path in PACKAGE
        for name in re.findall(r"``([\w/]+(?:\.py|/))``", ast.get_docstring(parsed(path)) or "")
        if not any(
            (place / name).exists() for place in (path.parent, POTLUCK, POTLUCK / "_core", ROOT)
        )
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_about_the_code_names_files_that_exist(page: str) -> None:
    """A name may leave out the folders that stand before it in the text."""
    folders = ("src", "native", "tests")
    files = [path for each in folders for path in (ROOT / each).rglob("*") if path.is_file()]
    known = {"/".join(path.parts[start:]) for path in files for start in range(len(path.parts))}
    told = re.findall(r"`([\w/]+\.(?:py|cpp|hpp))`", (ROOT / page).read_text())
    assert told
    assert sorted(set(told) - known) == []
