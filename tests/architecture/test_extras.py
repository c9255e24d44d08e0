"""The pip command that a missing package is answered with installs that package."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest

from support.sources import PACKAGE, ROOT, parsed

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
TEXTS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]


def required() -> Iterator[tuple[str, str]]:
    """(package, extra) of every ``require("package.module", "extra")`` in the source."""
    for path in PACKAGE:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "require":
                package, extra = (ast.literal_eval(each) for each in node.args[:2])
                yield package.partition(".")[0], extra


REQUIRED = sorted(set(required()))


@pytest.mark.parametrize(("package", "extra"), REQUIRED, ids=lambda each: each)
def test_each_package_that_is_asked_for_is_in_its_extra(package: str, extra: str) -> None:
    names = [re.split(r"[<>=!~; ]", each)[0] for each in EXTRAS[extra]]
    assert {"sklearn": "scikit-learn"}.get(package, package.replace("_", "-")) in names


def test_every_extra_that_a_text_names_exists() -> None:
    named = {
        extra.strip()
        for path in TEXTS
        for extras in re.findall(r"pip install '?potluck\[([\w, -]+)\]", path.read_text())
        for extra in extras.split(",")
    }
    assert {"torch", "sklearn"} <= named <= set(EXTRAS)
    assert {extra for _, extra in REQUIRED} == {
        *("torch", "mpi", "data", "tensorboard", "ecosystem", "bench", "torchft", "sklearn"),
        "privacy",
    }
