"""No circle of imports, those for type checkers included; nothing imports the root package.

``lint-imports`` keeps the floors, and leaves out what is imported for type checkers only.
"""

from __future__ import annotations

from functools import cache
from graphlib import CycleError, TopologicalSorter

import grimp

ROOT = "potluck"


@cache
def imports_of_modules() -> dict[str, set[str]]:
    graph = grimp.build_graph(ROOT, exclude_type_checking_imports=False, cache_dir=None)
    return {
        module: graph.find_modules_directly_imported_by(module) & graph.modules
        for module in graph.modules
    }


def circle(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_imports() -> None:
    imports = {name: found - {ROOT} for name, found in imports_of_modules().items() if name != ROOT}
    assert circle(imports) == []


def test_nothing_imports_the_root_package() -> None:
    importers = {name for name, found in imports_of_modules().items() if ROOT in found}
    assert importers == set()
    running = grimp.build_graph(ROOT, exclude_type_checking_imports=True, cache_dir=None)
    assert running.find_modules_that_directly_import(ROOT) == set()


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"a"}})
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})
    assert not circle({"a": {"b"}, "b": {"c"}})
