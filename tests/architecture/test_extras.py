"""The pip command that a missing package is answered with installs that package."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache

from support.sources import PACKAGE, ROOT, nodes, parsed

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
TEXTS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]


@cache
def required() -> set[tuple[str, str]]:
    """(package, extra) of every ``require("package.module", "extra")`` in the source."""
    return {
        (package.partition(".")[0], extra)
        for path in PACKAGE
        if "require(" in path.read_text()
        for node in nodes(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "require"
        for package, extra in [[ast.literal_eval(each) for each in node.args[:2]]]
    }


def test_each_package_that_is_asked_for_is_in_its_extra() -> None:
    names = {
        extra: {re.split(r"[<>=!~; \[]", each)[0] for each in packages}
        for extra, packages in EXTRAS.items()
    }
    assert [
        f"{package} is not in the extra {extra}"
        for package, extra in sorted(required())
        if {"sklearn": "scikit-learn"}.get(package, package.replace("_", "-")) not in names[extra]
    ] == []


def test_every_extra_that_a_text_names_exists() -> None:
    named = {
        extra.strip()
        for path in TEXTS
        for extras in re.findall(r"pip install '?potluck\[([\w, -]+)\]", path.read_text())
        for extra in extras.split(",")
    }
    assert {"torch", "sklearn"} <= named <= set(EXTRAS)
    assert {extra for _, extra in required()} == {
        *("torch", "mpi", "data", "tensorboard", "ecosystem", "bench", "torchft", "sklearn"),
        *("privacy", "ray", "dask", "debug"),
    }
