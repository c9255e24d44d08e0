"""Each public name is listed once, can be imported, and says what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from pathlib import Path

import pytest

import potluck
from potluck._core.backends.base import Backend
from potluck.training import Replica

ROOT = Path(potluck.__file__).parent
INTERFACE = [
    name
    for each in (Backend, Replica)
    for name, value in vars(each).items()
    if inspect.getdoc(value)
]
MODULES = ("potluck", "potluck.errors", "potluck.torch", "potluck.torch.pipeline")
MODULES += ("potluck.training", "potluck.testing", "potluck.parameter_server")
MODULES += ("potluck.data", "potluck.estimators", "potluck.federated")


def test_no_public_name_is_listed_twice() -> None:
    assert sorted(potluck.__all__) == sorted(set(potluck.__all__))


def test_type_checkers_see_exactly_the_names_that_exist() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    [block] = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = [
        (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    real = [(home, name) for home, names in potluck._HOMES.items() for name in names]
    real += [("potluck", name) for name in potluck._MODULES]
    assert sorted(seen) == sorted(real)


PACKAGES = sorted(
    ".".join(("potluck", *path.parent.relative_to(ROOT).parts))
    for path in ROOT.rglob("__init__.py")
)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_star_import_brings_names_and_no_modules(package: str) -> None:
    """``from potluck import *`` after ``import torch`` must leave torch what it is."""
    missing = {"potluck.torch": "torch", "potluck.estimators": "sklearn"}
    for start, needed in missing.items():
        if package.startswith(start):
            pytest.importorskip(needed)
    home = importlib.import_module(package)
    names = getattr(home, "__all__", [name for name in vars(home) if not name.startswith("_")])
    listed = hasattr(home, "__all__")
    found = [n for n in names if isinstance(getattr(home, n), types.ModuleType)]
    # A package without __all__ has only submodules, which are there once they were imported.
    assert [n for n in found if listed or getattr(home, n).__name__ != f"{package}.{n}"] == []


@pytest.mark.parametrize("module", MODULES)
def test_each_public_name_is_importable_and_documented(module: str) -> None:
    if module.startswith("potluck.torch"):
        pytest.importorskip("torch")
    if module == "potluck.estimators":
        pytest.importorskip("sklearn")
    home = importlib.import_module(module)
    names = home.__all__ if hasattr(home, "__all__") else vars(home)
    undocumented = [text for name in names for text in without_docstring(name, getattr(home, name))]
    assert undocumented == [], f"public names of {module} without a docstring"


def without_docstring(name: str, thing: object) -> list[str]:
    """``name``, if it is potluck's own and says nothing, and such methods if it is a class."""
    if not getattr(thing, "__module__", "potluck").startswith("potluck"):
        return []
    missing = [] if (inspect.getdoc(thing) or "").strip() else [name]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        missing += [
            f"{name}.{method}"
            for base in thing.__mro__
            if base.__module__.startswith("potluck")
            for method, value in vars(base).items()
            if not method.startswith("_")
            and isinstance(value, types.FunctionType | property | staticmethod | classmethod)
            and not inspect.getdoc(getattr(thing, method))
            # What the protocol says of a method holds for whoever implements it.
            and method not in INTERFACE
        ]
    return missing


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = potluck.nonsense


def test_dir_lists_the_public_names() -> None:
    assert set(potluck.__all__) <= set(dir(potluck))
