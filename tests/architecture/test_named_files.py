"""Files that a page about the code names are there."""

from __future__ import annotations

import re
from functools import cache

import pytest

from support.sources import ROOT, named
from support.ways import WAYS

PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/algorithms.md")
PAGES += ("docs/membership.md", "docs/security.md")
PAGES += tuple(named(page) for page in sorted(WAYS.glob("*.md")))


@cache
def known() -> set[str]:
    """All files of code. A name may leave out the folders that stand before it."""
    folders = ("src", "native", "tests")
    files = [path for each in folders for path in (ROOT / each).rglob("*") if path.is_file()]
    return {"/".join(path.parts[start:]) for path in files for start in range(len(path.parts))}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_about_the_code_names_files_that_exist(page: str) -> None:
    told = re.findall(r"`([\w/]+\.(?:py|cpp|hpp))`", (ROOT / page).read_text())
    assert told
    assert sorted(set(told) - known()) == []
